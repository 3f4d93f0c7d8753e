"""Caches in 8 and 4 bits: rounding errors, and attention that reads them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import Quantized, dequantize, quantize, tree_attention
from pallas_kernels.benchmarks.shapes import Shape
from pallas_kernels.cpu import build
from pallas_kernels.quantized import LARGEST
from pallas_kernels.xla import BLOCK
from tests.pallas_kernels.attention_cases import CPU, compiled, make_inputs, relative_error
from tests.quick import quick

every_bits = pytest.mark.parametrize("bits", sorted(LARGEST))
every_backend = pytest.mark.parametrize("backend", ["reference", "xla", CPU])
SMALL = Shape(4, 5, 7, 2, 3, 8, 6)
SHAPES = (
    SMALL,
    Shape(4, 1, 1, 2, 1, 64, 40),  # one row
    Shape(4, 16, 16, 1, 4, 64, 70),  # many rows
    Shape(6, 5, 5, 1, 1, 64, BLOCK + 300),  # few rows, by blocks because it is quantized
)


def random_array(shape, dtype=np.float32, seed=0):
    """Returns vectors of very different sizes."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-6, 6, shape[:-1])
    return jnp.asarray(rng.standard_normal(shape) * size[..., None], dtype)


@functools.cache
def compiled_quantize(bits: int):
    return jax.jit(lambda x: quantize(x, bits))


restore = jax.jit(dequantize, static_argnums=1)


@every_bits
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_element_is_off_by_more_than_half_a_step(bits, dtype):
    x = random_array((3, 2, 50, 16), dtype)
    quantized = compiled_quantize(bits)(x)
    scales = np.asarray(quantized.scales, np.float64)
    x = np.asarray(x, np.float64)
    np.testing.assert_allclose(scales, np.abs(x).max(-1) / LARGEST[bits], rtol=1e-6)
    error = np.abs(np.asarray(restore(quantized, jnp.float32), np.float64) - x)
    # A little more than half: x / scale, at most 127, is rounded to float32 first.
    assert 0.4 < (error / scales[..., None]).max() <= 0.5 + 127 * 2**-23


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_of_powers_of_two_make_elements_exact(dtype):
    """So what is stored is what was computed with, and rounding it again changes nothing."""
    x = np.array(random_array((3, 2, 50, 16)))
    if dtype == "float16":
        x = x / np.abs(x).max(-1, keepdims=True) * 100
    x = x.astype(jnp.dtype(dtype))
    x[0, 0, :3, 0] = [127, 127.0625, 63.5]
    x[0, 0, :3, 1:] = 0
    store = jax.jit(lambda x: quantize(x, 8, power_of_two=True))
    stored = store(x)
    steps = np.asarray(stored.scales)
    assert (np.frexp(steps)[0][steps > 0] == 0.5).all()
    assert steps[0, 0, :3].tolist() == [1, 1 if dtype == "bfloat16" else 2, 0.5]
    largest = np.abs(np.asarray(x, np.float64)).max(-1)
    assert (largest <= 127.5 * steps).all() and (largest >= 63 * steps).all()
    elements = restore(stored, x.dtype)
    wide = np.asarray(restore(stored, jnp.float32))
    np.testing.assert_array_equal(elements, wide.astype(x.dtype))
    np.testing.assert_array_equal(np.asarray(elements, float), wide)
    again = store(elements)
    np.testing.assert_array_equal(again.values, stored.values)
    np.testing.assert_array_equal(again.scales, stored.scales)
    ordinary = compiled_quantize(8)(x.astype(np.float32))  # the control
    exact = np.asarray(restore(ordinary, x.dtype)) == np.asarray(restore(ordinary, jnp.float32))
    assert exact.all() == (dtype == "float32")


@every_bits
def test_a_vector_of_zeros_stays_zeros(bits):
    x = jnp.zeros((2, 3, 4)).at[0, 0].set(1e-30)
    quantized = compiled_quantize(bits)(x)
    assert (np.asarray(quantized.scales).reshape(-1)[1:] == 0).all()
    for dtype in (jnp.float32, jnp.bfloat16):
        restored = np.asarray(restore(quantized, dtype), np.float32)
        np.testing.assert_allclose(restored, x, rtol=0.01)
        assert (restored.reshape(6, 4)[1:] == 0).all()


@every_bits
def test_a_token_is_written_to_both_leaves(bits):
    cache, entries = random_array((2, 3, 10, 8)), random_array((2, 3, 2, 8), seed=1)

    @jax.jit
    def commit(cache, entries, at):
        def write(leaf, new):
            return lax.dynamic_update_slice_in_dim(leaf, new, at, axis=2)

        return jax.tree.map(write, cache, entries)

    quantized = compiled_quantize(bits)
    written = commit(quantized(cache), quantized(entries), 4)
    assert isinstance(written, Quantized)
    expected = quantized(cache.at[:, :, 4:6].set(entries))
    jax.tree.map(np.testing.assert_array_equal, written, expected)
    with pytest.raises(ValueError):  # 4 bits must not be written into 8
        commit(quantized(cache), compiled_quantize(12 - bits)(entries), 4)


@pytest.mark.parametrize(
    ("x", "bits", "message"),
    [
        (jnp.ones((2, 8)), 2, r"bits=2.*\[4, 8\]"),
        (jnp.ones((2, 7)), 4, "odd head size D=7.*bits=8"),
        (jnp.ones((2, 8), jnp.int32), 8, r"int32\[2, 8\].*floating"),
        (jnp.ones(()), 8, r"float32\[\].*\[\.\.\., D\]"),
    ],
)
def test_unsupported_arrays_are_refused(x, bits, message):
    with pytest.raises(ValueError, match=message):
        quantize(x, bits)


def quantized_inputs(inputs: dict, bits: int) -> tuple[dict, dict]:
    """Returns inputs with quantized caches, and inputs with the dequantized caches."""
    caches = {n: compiled_quantize(bits)(inputs[n]) for n in ("k_prefix", "v_prefix")}
    dtype = inputs["q"].dtype
    plain = {name: restore(cache, dtype) for name, cache in caches.items()}
    return inputs | caches, inputs | plain


@every_backend
@every_bits
@pytest.mark.parametrize("shape", quick(SHAPES, SHAPES[0], SHAPES[-1]), ids=str)
def test_attention_equals_that_to_the_dequantized_arrays(backend, bits, shape):
    quantized, plain = quantized_inputs(make_inputs(shape, jnp.float32), bits)
    out, lse = compiled(backend)(quantized)
    expected_out, expected_lse = compiled("reference")(plain)
    assert relative_error(out, expected_out) < 1e-5
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", quick(SHAPES, SHAPES[0], SHAPES[2]), ids=str)
def test_kernels_read_scales_of_powers_of_two_with_the_bits_of_elements(shape, dtype):
    def results(power_of_two):
        inputs = make_inputs(shape, jnp.dtype(dtype))
        stored = {
            name: quantize(inputs[name], 8, power_of_two=power_of_two)
            for name in ("k_prefix", "v_prefix")
        }
        plain = {name: restore(x, inputs["q"].dtype) for name, x in stored.items()}
        return [compiled("cpu")(inputs | caches) for caches in (stored, plain)]

    for found, expected in zip(*results(power_of_two=True), strict=True):
        np.testing.assert_array_equal(found, expected)
    (found, _), (expected, _) = results(power_of_two=False)
    assert (found != expected).any()


@pytest.mark.parametrize("shape", quick(SHAPES[1:], SHAPES[-1]), ids=str)
def test_attention_in_bf16_differs_by_rounding_alone(shape):
    quantized, _ = quantized_inputs(make_inputs(shape, jnp.bfloat16), 4)
    out, _ = compiled("xla")(quantized)
    expected, _ = compiled("reference")(quantized)
    assert out.dtype == jnp.bfloat16
    assert relative_error(out, expected) < 1e-2


@every_backend
@every_bits
def test_dead_slots_do_not_matter(backend, bits):
    inputs, _ = quantized_inputs(make_inputs(SMALL, jnp.float32), bits)
    dead = (jnp.arange(SMALL.slots) >= inputs["lengths"][:, None])[:, None]  # [B, 1, S]

    def poison(cache):
        values = jnp.where(dead[..., None], jnp.int8(-128), cache.values)
        return Quantized(values, jnp.where(dead, jnp.float32(1e30), cache.scales), bits)

    poisoned = inputs | {name: poison(inputs[name]) for name in ("k_prefix", "v_prefix")}
    for clean, dirty in zip(compiled(backend)(inputs), compiled(backend)(poisoned), strict=True):
        np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: (k, dequantize(v, jnp.float32)), "k_prefix is Quantized and v_prefix is not"),
        (lambda k, v: (dequantize(k, jnp.float32), v), "v_prefix is Quantized and k_prefix is not"),
        (lambda k, v: (k, jax.tree.map(lambda x: x[:, :, :5], v)), r"v_prefix has shape .*6, 8\)"),
        (lambda k, v: (Quantized(k.values, k.scales, 4), v), r"k_prefix has shape .*16\)"),
        (
            lambda k, v: (k, Quantized(v.values, v.scales[..., None], 8)),
            r"v_prefix.scales is float32\[4, 2, 6, 1\].*float32\[4, 2, 6\]",
        ),
        (
            lambda k, v: (k, Quantized(v.values.astype(jnp.int32), v.scales, 8)),
            r"v_prefix.values is int32.*int8\[4, 2, 6, 8\]",
        ),
    ],
    ids=["only keys", "only values", "shorter", "other bits", "an axis too many", "wide values"],
)
def test_inconsistent_caches_are_refused(change, message):
    inputs, _ = quantized_inputs(make_inputs(SMALL, jnp.float32), 8)
    k, v = change(inputs["k_prefix"], inputs["v_prefix"])
    with pytest.raises(ValueError, match=message):
        tree_attention(**(inputs | {"k_prefix": k, "v_prefix": v}))
