"""Products of the native kernel: equal to float64 products, and to themselves in any company."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import build, linear
from pallas_kernels.cpu.linear import Matrix

pytestmark = pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")

FORMATS = ("float32", "bfloat16", "float16", "int8", "int8:64", "int4", "int4:32", "int4:64+zeros")


def random_matrix(kind: str, outputs: tuple, inputs: int, rng) -> Matrix:
    """Returns a matrix [O..., inputs]."""
    if kind in ("float32", "bfloat16", "float16"):
        return Matrix(put(rng.standard_normal((*outputs, inputs)), kind))
    bits, group = int(kind[3]), kind[5:].removesuffix("+zeros")
    groups = inputs // int(group) if group else 1
    limit = 2 ** (bits - 1)
    values = put(rng.integers(-limit, limit, (*outputs, inputs)), f"int{bits}")
    scale = put(rng.uniform(-0.02, 0.02, (groups, *outputs)))
    zero = put(rng.uniform(-3, 3, scale.shape)) if "zeros" in kind else None
    return Matrix(values, scale, zero)


def put(x: np.ndarray, dtype: str = "float32") -> jax.Array:
    """Returns the array on the device; unlike `jnp.asarray`, it compiles nothing."""
    return jax.device_put(x.astype(jnp.dtype(dtype)))


def dequantized(matrix: Matrix) -> np.ndarray:
    """Returns the matrix in float64."""
    weight = np.asarray(matrix.weight).astype(np.float64)
    if matrix.scale is None:
        return weight
    groups = len(matrix.scale)
    wide = weight.reshape(*weight.shape[:-1], groups, -1)
    scale = np.moveaxis(np.asarray(matrix.scale, np.float64), 0, -1)[..., None]
    zero = 0 if matrix.zero is None else np.moveaxis(np.asarray(matrix.zero), 0, -1)[..., None]
    return ((wide - zero) * scale).reshape(weight.shape)


def magnitudes(matrix: Matrix) -> np.ndarray:
    """Returns the largest terms of each element that a product may add: |value| and |zero|."""
    zero = None if matrix.zero is None else -np.abs(np.asarray(matrix.zero))
    weight = np.abs(np.asarray(matrix.weight).astype(np.float32))
    return np.abs(dequantized(matrix._replace(weight=weight, zero=zero)))


def test_the_kernels_are_available():
    assert build.unavailable_reason() is None


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [(1,), (4, 50)], ids=str)
def test_products_equal_those_in_float64(kind, rows):
    rng = np.random.default_rng(0)
    for inputs in (64, 576) + (() if ":" in kind or "int4" in kind else (1, 65, 100)):
        x = put(rng.standard_normal((*rows, inputs)), "bfloat16")
        matrices = [random_matrix(kind, outputs, inputs, rng) for outputs in ((3, 5), (130,), (1,))]
        assert linear.is_supported(x, matrices, inputs)
        results = linear.products(x, matrices, 1, jnp.float32)
        for y, matrix in zip(results, matrices, strict=True):
            expected = np.einsum(
                "...i,oi->...o", np.asarray(x, float), dequantized(matrix).reshape(-1, inputs)
            )
            assert y.shape == (*rows, *matrix.weight.shape[:-1]) and y.dtype == jnp.float32
            # Errors of a sum are relative to the terms, which may cancel.
            terms = np.abs(np.asarray(x, float)) @ magnitudes(matrix).reshape(-1, inputs).T
            found = np.asarray(y).reshape(expected.shape)
            assert (np.abs(found - expected) <= 1e-6 * terms).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_are_rounded_once(dtype):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((5, 96)), dtype)
    matrices = [random_matrix(dtype, (40,), 96, rng)]
    wide, rounded = (linear.products(x, matrices, 1, d)[0] for d in (jnp.float32, jnp.dtype(dtype)))
    np.testing.assert_array_equal(wide.astype(dtype), rounded)


SHAPES = 32


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_in_any_number_of_rows(kind):
    """Rows computed alone, in company and in another order are equal bit for bit."""
    rng = np.random.default_rng(3)
    for _ in range(SHAPES // len(FORMATS)):
        inputs = 64 * int(rng.integers(1, 12))
        outputs = (int(rng.integers(1, 150)),)
        rows = int(rng.choice([2, 3, 5, 6, 7, 8, 13, 20, 64, 200]))
        dtype = rng.choice(["float32", "bfloat16"])
        x = rng.standard_normal((rows, inputs)).astype(jnp.dtype(dtype))
        matrix = random_matrix(kind, outputs, inputs, rng)
        together = np.asarray(linear.products(x, [matrix], 1, jnp.float32)[0])
        for row in {0, rows - 1, int(rng.integers(rows))}:
            alone = linear.products(x[row : row + 1], [matrix], 1, jnp.float32)[0]
            np.testing.assert_array_equal(np.asarray(alone)[0], together[row])
        part = linear.products(x[::-1][: rows // 2 + 1], [matrix, matrix], 1, jnp.float32)
        np.testing.assert_array_equal(part[1], together[::-1][: rows // 2 + 1])


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_zeros_have_zeros_and_do_not_change_others(kind):
    rng = np.random.default_rng(3)
    matrices = [random_matrix(kind, (outputs,), 576, rng) for outputs in (130, 7)]
    dense = rng.standard_normal((20, 576))
    for live in ([], [4], [0, 7, 19], list(range(1, 20))):
        x = np.zeros_like(dense)
        x[live] = dense[live]
        for result, alone in zip(
            linear.products(put(x, "bfloat16"), matrices, 1, jnp.float32),
            linear.products(put(dense, "bfloat16"), matrices, 1, jnp.float32),
            strict=True,
        ):
            expected = np.zeros(result.shape, np.float32)
            expected[live] = np.asarray(alone)[live]
            np.testing.assert_array_equal(result, expected)


def test_an_order_of_sums_that_depends_on_the_rows_is_noticed():
    """XLA's products, the control: with other numbers of rows they have other bits."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((64, 1536)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((576, 1536)), jnp.float32)
    product = jax.jit(lambda x, w: x @ w.T)
    together = np.asarray(product(x, w))
    assert any((np.asarray(product(x[:n], w)) != together[:n]).any() for n in (1, 2, 5, 16))


def test_concurrent_calls_have_the_same_bits():
    """Several threads of a process call the kernels, whose tasks share one pool of threads."""
    rng = np.random.default_rng(8)
    matrix = random_matrix("bfloat16", (400,), 576, rng)
    inputs = [jnp.asarray(rng.standard_normal((n, 576)), jnp.float32) for n in (1, 5, 20, 64)]
    product = jax.jit(lambda x: linear.products(x, [matrix], 1, jnp.float32)[0])
    expected = [np.asarray(product(x)) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: np.asarray(product(inputs[i % 4])), range(200)))
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, expected[i % 4])


def test_unsupported_calls_are_left_to_xla():
    rng = np.random.default_rng(5)
    x = jnp.zeros((1, 96), jnp.bfloat16)
    assert linear.is_supported(x, [random_matrix("int4:32", (4,), 96, rng)], 96)
    odd = random_matrix("int4:32", (4,), 96, rng)
    assert not linear.is_supported(x, [odd._replace(scale=odd.scale[:1].repeat(12, 0))], 96)
    assert not linear.is_supported(jnp.zeros((0, 96)), [], 96)
    assert not linear.is_supported(jnp.zeros((linear.MOST_ROWS + 1, 96)), [], 96)
    float8 = Matrix(jnp.zeros((4, 96), jnp.float8_e4m3fn), jnp.ones((1, 4)))
    assert not linear.is_supported(x, [float8], 96)
    assert not linear.is_supported(jnp.zeros((1, 96), jnp.int32), [], 96)


def test_grad_and_vmap():
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((3, 32)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((8, 32)), jnp.float32)

    def native(x, w):
        return linear.products(x, [Matrix(w)], 1, jnp.float32)[0]

    gradients = jax.grad(lambda x, w: (native(x, w) ** 2).sum(), (0, 1))(x, w)
    expected = jax.grad(lambda x, w: ((x @ w.T) ** 2).sum(), (0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), gradients, expected)
    mapped = jax.vmap(native, (0, None))(x[:, None], w)
    np.testing.assert_array_equal(mapped[:, 0], native(x, w))


def test_inconsistent_matrices_are_refused():
    rng = np.random.default_rng(7)
    x = jnp.zeros((1, 96), jnp.bfloat16)
    int8, int4 = (random_matrix(kind, (4,), 96, rng) for kind in ("int8", "int4:32"))
    for matrices, message in (
        ([int8._replace(scale=int8.scale.astype(jnp.bfloat16))], "are not float32"),
        ([int8, int4], "several dtypes"),
        ([int4._replace(scale=int4.scale[:1].repeat(12, 0))], "multiples of a step"),
    ):
        assert not linear.is_supported(x, matrices, 96)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(linear.products(x, matrices, 1, jnp.float32))
