"""Quantized matrices: bounds of the error, products, shapes, and what is refused."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from magicjax.sources import Source
from models import WeightFormat, quantized
from sharding import EMBED, HEAD_DIM, HEADS, MLP
from tests.magicjax import tiny
from tests.quick import quick

FORMATS = ("int8", "int8:8", "int4:8", "int4:channel")
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, tiny.VOCAB, (2, 12)), jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(12), (2, 12))


def halves(q, k, v):
    return q / 2, None


@functools.partial(jax.jit, static_argnums=0)
def _logits(module, params):
    hidden, _, _ = module.apply(params, TOKENS, POSITIONS, models.in_every_layer(halves))
    return module.apply(params, hidden, method="unembed")


def logits(module, params) -> np.ndarray:
    return np.asarray(_logits(module, params))


UNKNOWN = [8, True, False, b"int8", "int3", "int4:0", "int4:", "int8:-1", "fp8", "int16"]


@pytest.mark.parametrize("value", UNKNOWN)
def test_unknown_formats_are_refused(value):
    with pytest.raises(ValueError, match=f"weights={value!r} is unknown: use 'int8', 'int4'"):
        models.parse_weights(value)


@pytest.mark.parametrize("text", ["float8", "float8:64", "int4:32+zeros"])
def test_nothing_is_rounded_to_formats_of_checkpoints(text):
    form = WeightFormat.parse(text)
    assert str(form) == text
    with pytest.raises(ValueError, match="only checkpoints have float8 values and zero"):
        models.quantize(np.ones((64, 8)), form, 1)
    with pytest.raises(ValueError, match="only checkpoints have float8 values and zero"):
        Source("opt-125m").matrix_formats(text)


def test_groups_that_do_not_divide_a_matrix_are_refused():
    config = models.family_config("llama", **SMOLLM)
    with pytest.raises(ValueError, match="128 do not divide the 576 .*q: use int4:64 or int4:32"):
        models.build(config, weights=WeightFormat.parse("int4"))
    assert str(models.build(config, weights=WeightFormat.parse("int4:64")).weights) == "int4:64"
    narrow = dataclasses.replace(config, hidden_size=640)  # divides 128, and heads do not
    with pytest.raises(ValueError, match="the 576 inputs of attention/out"):
        models.build(narrow, weights=WeightFormat.parse("int4"))
    with pytest.raises(ValueError, match="the 768 inputs of mlp/down on each of 2 devices"):
        WeightFormat(4, 512).check({"mlp/down": 768}, 2)
    with pytest.raises(ValueError, match="the 192 inputs of mlp/down .*: use float8:64 or float8"):
        WeightFormat(8, 128, is_float=True).check({"mlp/down": 192}, 2)
    with pytest.raises(ValueError, match="the 64 inputs of mlp/down .*: use float8:16 or float8:8"):
        WeightFormat(8, 48, is_float=True).check({"mlp/down": 64}, 2)


SMOLLM = dict(
    vocab_size=64,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    max_positions=64,
)


@pytest.mark.parametrize("text", FORMATS)
def test_the_largest_element_is_exact_and_errors_are_at_most_half_a_scale(text):
    weight = np.random.default_rng(0).standard_normal((3, 4, 4, 8)).astype(np.float32)
    weight[1, 2] = 0  # a channel of zeros
    weight[0, 0] *= 1000  # and one that is much larger than the others
    form = WeightFormat.parse(text)
    parts = models.quantize(weight, form, 2)
    groups = 32 // (form.group or 32)
    assert parts["weight"].dtype == form.dtype and parts["scale"].shape == (groups, 3, 4)
    values = parts["weight"].astype(np.int32).reshape(3, 4, groups, -1)
    wide = weight.reshape(values.shape)
    largest = np.abs(wide).max(-1, keepdims=True)
    lowest = np.where(largest, -(2 ** (form.bits - 1)), 0)
    assert (values.min(-1, keepdims=True) == lowest).all() and (values[1, 2] == 0).all()
    error = np.abs(np.asarray(quantized.dequantize(**parts)).reshape(values.shape) - wide)
    scale = np.abs(parts["scale"]).transpose(1, 2, 0)[..., None]
    at_largest = np.take_along_axis(error, np.abs(wide).argmax(-1, keepdims=True), -1)
    assert (at_largest <= 1e-6 * largest).all()
    clipped = values == 2 ** (form.bits - 1) - 1
    assert (error <= scale * np.where(clipped, 1, 0.5) * (1 + 1e-5)).all()
    # One scale for all channels would be too coarse.
    assert scale.max() > 100 * np.median(scale)


def test_a_matrix_of_the_format_is_exact():
    rng, form = np.random.default_rng(0), WeightFormat.parse("int4:8")
    values = rng.integers(-8, 8, (3, 2, 8))
    values[..., 0] = -8
    weight = (values * rng.uniform(0.5, 2, (3, 2, 1)).astype(np.float32)).reshape(3, 16)
    parts = models.quantize(weight, form, 1)
    np.testing.assert_allclose(quantized.dequantize(**parts), weight, rtol=1e-6)


product = jax.jit(functools.partial(quantized.product, precision="highest"))


@pytest.mark.parametrize("rows", [0, 1, 3, 64], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("text", FORMATS)
def test_products_are_those_with_the_dequantized_matrix(text, rows):
    """With few rows all groups at once, with many group by group."""
    rng, form = np.random.default_rng(0), WeightFormat.parse(text)
    parts = models.quantize(rng.standard_normal((3, 8, 4, 16)), form, 2)
    x = jnp.asarray(rng.standard_normal((rows, 4, 16)), jnp.float32)
    parts = jax.tree.map(jnp.asarray, parts)
    for zero in (None, jnp.asarray(rng.normal(0, 3, parts["scale"].shape), jnp.float32)):
        matrix = np.asarray(quantized.dequantize(**parts, zero=zero), np.float64)
        found = product(x, **parts, zero=zero)
        expected = np.einsum("rij,abij->rab", x, matrix)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("text", FORMATS)
def test_logits_are_those_of_the_dequantized_model(text):
    whole = tiny.model()
    model = tiny.quantized(whole, text)
    plain = models.dequantize_params(model.params, jnp.float32)
    found = logits(model.module, model.params)
    np.testing.assert_allclose(found, logits(whole.module, plain), rtol=2e-5, atol=2e-5)
    assert np.abs(found - logits(whole.module, whole.params)).max() > 1e-3


def test_a_mesh_divides_groups_with_the_inputs():
    for text, divided in (("int4:8", True), ("int8", False)):
        block = models.block_params(models.build(tiny.config(), weights=WeightFormat.parse(text)))
        out, down, q = block["attention"]["out"], block["mlp"]["down"], block["attention"]["q"]
        assert out["scale"].names == (HEADS if divided else None, EMBED)
        assert down["scale"].names == (MLP if divided else None, EMBED)
        assert q["scale"].names == (EMBED if divided else None, HEADS, HEAD_DIM)
        assert q["scale"].value.dtype == jnp.float32
        assert q["weight"].value.shape == (4, 8, 32)


@pytest.mark.parametrize("text", quick(FORMATS, "int4:8"))
def test_a_checkpoint_is_quantized_as_its_parameters_are(tmp_path, text):
    whole, form = tiny.model(), WeightFormat.parse(text)
    models.save_checkpoint(tmp_path / "model", whole.module, whole.params)
    found = models.load_checkpoint(tmp_path / "model", weights=form)
    assert str(found.module.weights) == text
    jax.tree.map(np.testing.assert_array_equal, found.params, tiny.quantized(whole, text).params)
    boxes = nn.meta.unbox(models.abstract_params(found.module))
    declared = jax.tree.map(lambda x: (x.shape, x.dtype), boxes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found.params) == declared
    models.save_checkpoint(tmp_path / "other", found.module, found.params)
    again = models.load_checkpoint(tmp_path / "other")
    assert again.module == found.module
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)
