"""Packed matrices: values of the files, products of integers, the same bits in any company."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import linear
from pallas_kernels.cpu import build, packed
from pallas_kernels.cpu.linear import Matrix
from pallas_kernels.cpu.packed import FORMATS, GROUP, Packed

pytestmark = pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")

INPUTS = 512
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}  # bytes of a block's float16 scales


def stored(form: str, outputs: int, inputs: int = INPUTS, seed: int = 0) -> np.ndarray:
    """Returns random rows of a GGUF file: any bits, with scales of ordinary size."""
    rng, (size, octets) = np.random.default_rng(seed), sizes(form)
    blocks = rng.integers(0, 256, (outputs, inputs // size, octets), np.uint8)
    has_two = FORMATS[form].has_minima
    for at in SCALES_AT.get(form, (0, 2) if has_two else (0,)):
        scales = rng.uniform(-0.02, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def sizes(form: str) -> tuple[int, int]:
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]


def matrix_of(form: str, rows: np.ndarray) -> Packed:
    return Packed(jax.device_put(packed.pack(rows, form)), form, (len(rows),))


def dense(form: str, rows: np.ndarray) -> np.ndarray:
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[form])


def expected(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns products of x rounded to 8 bits in float64, and the sums of their magnitudes."""
    integers, scales = packed.round_activations(x)
    rounded = integers * np.repeat(scales, GROUP, 1).astype(float)
    return rounded @ weight.T.astype(float), np.abs(rounded) @ np.abs(weight.T).astype(float)


@pytest.mark.parametrize("form", FORMATS)
def test_values_are_those_of_the_file(form):
    rows = stored(form, 48)
    order = np.random.default_rng(1).permutation(48)
    weight, data = dense(form, rows)[order], packed.pack(rows, form, order)
    library = build.library()
    assert library.magicjax_packed_bytes(FORMATS[form].number) == FORMATS[form].bytes
    for xp in (np, jnp):
        found = packed.dequantize(
            Packed(jax.device_put(data) if xp is jnp else data, form, (3, 16)), xp
        )
        np.testing.assert_array_equal(np.asarray(found).reshape(48, -1), weight)
    numbers = jnp.asarray([[47, 0], [48, -1]])  # the last two are outside
    found = packed.rows(Packed(jax.device_put(data), form, (48,)), numbers)
    np.testing.assert_array_equal(found[0], weight[[47, 0]])
    assert not np.asarray(found[1]).any()


def test_some_rows_of_a_file_are_packed():
    rows = stored("Q4_K", 96)
    order = np.arange(32, 64)[::-1]
    found = packed.dequantize(Packed(packed.pack(rows, "Q4_K", order), "Q4_K", (32,)), np)
    np.testing.assert_array_equal(found, dense("Q4_K", rows)[order])
    with pytest.raises(ValueError, match="order has rows from 32 to 96 of 96"):
        packed.pack(rows, "Q4_K", np.arange(32, 97))


@pytest.mark.parametrize("to", packed.ROUNDED)
@pytest.mark.parametrize("form", ["F32", *FORMATS])
def test_matrices_are_rounded_as_llama_cpp_does(form, to):
    if form == "F32":
        rows = wide = np.random.default_rng(3).standard_normal((48, INPUTS)).astype(np.float32)
        wide[7, 32:64] = 0
    else:
        rows = stored(form, 48)
        wide = dense(form, rows)
    order = np.random.default_rng(4).permutation(48)[:32]
    right = dense(to, gguf.quantize(wide, gguf.GGMLQuantizationType[to]))[order]
    found = Packed(packed.pack(rows, form, order, None if form == to else to), to, (32,))
    if form == to:
        right = wide[order]
    np.testing.assert_array_equal(packed.dequantize(found, np), right)


def test_a_matrix_is_rounded_to_no_other_type():
    with pytest.raises(ValueError, match="in F32 cannot be packed as Q4_K"):
        packed.pack(np.zeros((16, 256), np.float32), "F32", to="Q4_K")
    with pytest.raises(ValueError, match=r"\[16, 40\] in F32 cannot be packed as Q4_0"):
        packed.pack(np.zeros((16, 40), np.float32), "F32", to="Q4_0")


def test_jax_uses_packed_memory_without_a_copy():
    data = packed.pack(stored("Q8_0", 64), "Q8_0")
    assert jax.device_put(data).unsafe_buffer_pointer() == data.ctypes.data


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("octet", [0x00, 0x80, 0xFF])
def test_sums_of_the_largest_integers_do_not_overflow(form, octet):
    rows = np.full_like(stored(form, 16), octet)
    size, octets = sizes(form)
    blocks = rows.reshape(16, -1, octets)
    for at in SCALES_AT.get(form, (0, 2) if FORMATS[form].has_minima else (0,)):
        blocks[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    x = np.repeat([[1.0], [-1.0]], INPUTS, 1).astype(np.float32)
    right, magnitude = expected(x, dense(form, rows))
    assert (np.abs(products(x, matrix_of(form, rows)) - right) <= 1e-6 * magnitude).all()


def test_xla_multiplies_the_dequantized_matrix():
    rows = stored("Q5_K", 32)
    x = jnp.asarray(np.random.default_rng(6).standard_normal((3, INPUTS)), jnp.float32)
    matrix = matrix_of("Q5_K", rows)
    plain = Matrix(jnp.asarray(dense("Q5_K", rows)))
    found = linear.products(x, [matrix, plain], 1, "xla")
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-3)
    by_kernel = linear.products(x, [plain, matrix], 1, "cpu")[1]
    np.testing.assert_array_equal(by_kernel, products(x, matrix))
    numbers = jnp.asarray([3, -1, 32])
    both = [linear.packed_rows(matrix, numbers, backend) for backend in ("xla", "cpu")]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("form", FORMATS)
def test_products_are_those_of_integers_and_a_row_has_the_same_bits_in_any_company(form):
    rows, rng = stored(form, 48), np.random.default_rng(2)
    weight, matrix = dense(form, rows), matrix_of(form, rows)
    x = rng.standard_normal((70, INPUTS)).astype(np.float32) * rng.uniform(0, 9, (70, 1))
    x[3, 64:96] = 0  # a group without a scale
    whole = np.asarray(products(x, matrix))
    right, magnitude = expected(x, weight)
    assert (np.abs(whole - right) <= 2e-7 * magnitude).all()
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 33, 64):
        np.testing.assert_array_equal(products(x[:count], matrix), whole[:count])
    np.testing.assert_array_equal(products(x[::-3], matrix), whole[::-3])
    with_zeros = np.zeros((9, INPUTS), np.float32)
    with_zeros[4] = x[0]
    found = np.asarray(products(with_zeros, matrix))
    np.testing.assert_array_equal(found[4], whole[0])
    assert not np.delete(found, 4, 0).any()


def products(x, *matrices, dtype=jnp.float32):
    outs = packed.products(np.asarray(x, np.float32), matrices, 1, dtype)
    return outs[0] if len(outs) == 1 else outs


def test_matrices_of_several_formats_share_a_call_and_axes_are_kept():
    forms = "Q4_K", "Q6_K", "Q8_0"
    matrices = [matrix_of(form, stored(form, 32)) for form in forms]
    shaped = [Packed(m.data, m.weight_format, (2, 16)) for m in matrices]
    x = np.random.default_rng(3).standard_normal((2, 3, INPUTS))
    for found, matrix in zip(products(x, *shaped), matrices, strict=True):
        assert found.shape == (2, 3, 2, 16)
        np.testing.assert_array_equal(found.reshape(2, 3, 32), products(x, matrix))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_are_rounded_once(dtype):
    matrix = matrix_of("Q4_K", stored("Q4_K", 32))
    x = jnp.asarray(np.random.default_rng(4).standard_normal((5, INPUTS)), dtype)
    wide, rounded = (packed.products(x, [matrix], 1, d)[0] for d in (jnp.float32, jnp.dtype(dtype)))
    np.testing.assert_array_equal(wide.astype(dtype), rounded)
    np.testing.assert_array_equal(wide, products(x.astype(jnp.float32), matrix))


def test_numbers_that_are_not_finite_are_not_hidden():
    matrix = matrix_of("Q8_0", stored("Q8_0", 16))
    x = np.ones((3, INPUTS), np.float32)
    x[0, 5], x[1, 7] = np.nan, np.inf
    found = np.asarray(products(x, matrix))
    assert not np.isfinite(found[:2]).any() and np.isfinite(found[2]).all()


def test_a_matrix_that_does_not_fit_is_refused():
    matrix = matrix_of("Q4_0", stored("Q4_0", 32))
    wrong = Packed(matrix.data, "Q4_1", (32,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a result does not fit its matrix"):
        jax.block_until_ready(products(np.ones((1, INPUTS)), wrong))
    with pytest.raises(jax.errors.JaxRuntimeError, match="inconsistent arguments"):
        jax.block_until_ready(products(np.ones((1, 48)), matrix))


def test_products_of_activations_that_are_not_rounded_are_told_apart():
    rows = stored("Q6_K", 16)
    x, weight = np.random.default_rng(5).standard_normal((2, INPUTS)), dense("Q6_K", rows)
    magnitude = np.abs(x) @ np.abs(weight.T)
    errors = np.abs(products(x, matrix_of("Q6_K", rows)) - x @ weight.T) / magnitude
    assert errors.max() > 1e-4 and errors.mean() < 1e-3
