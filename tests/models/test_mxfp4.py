"""gpt-oss with experts in MXFP4: read exactly in 8 bits, or dequantized."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

import models

# E2M1: the sign in bit 3, and exponents and fractions of 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CONFIG = models.family_config(
    "gpt_oss",
    vocab_size=32,
    hidden_size=64,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_positions=32,
    positions=models.Rope(theta=1000.0),
    qkv_bias=True,
    out_bias=True,
    num_experts=3,
    experts_per_token=2,
    swiglu_limit=7.0,
    sliding_window=8,
)


@pytest.fixture
def folders(tmp_path, random_params):
    """Returns the same model with experts in MXFP4 and in float32."""
    module, draw = models.build(CONFIG), np.random.default_rng(0)
    plain, coded = tmp_path / "plain", tmp_path / "mxfp4"
    models.save_checkpoint(plain, module, random_params(module))
    tensors = safetensors.numpy.load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, (outputs, inputs) in {"gate_up": (64, 64), "down": (64, 32)}.items():
        full = f"model.layers.0.mlp.experts.{name}_proj"
        codes = draw.integers(0, 16, (3, outputs, inputs))
        exponents = draw.integers(120, 128, (3, outputs, inputs // 32)).astype(np.uint8)
        grouped = codes.reshape(3, outputs, inputs // 32, 32)
        scale = np.float32(2.0) ** (exponents.astype(np.float32) - 127)
        values = (VALUES[grouped] * scale[..., None]).reshape(3, outputs, inputs)
        tensors[full] = np.ascontiguousarray(values.swapaxes(1, 2))
        del stored[full]
        packed = grouped[..., ::2] | grouped[..., 1::2] << 4
        stored |= {f"{full}_blocks": packed.astype(np.uint8), f"{full}_scales": exponents}
    coded.mkdir()
    safetensors.numpy.save_file(tensors, plain / "model.safetensors")
    safetensors.numpy.save_file(stored, coded / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    (coded / "config.json").write_text(
        json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    return plain, coded


def test_dequantized_values_are_those_of_the_format(folders):
    plain, coded = (models.load_checkpoint(x, weights="none") for x in folders)
    assert coded.module == plain.module
    assert jax.tree.all(jax.tree.map(np.array_equal, coded.params, plain.params))


@pytest.mark.parametrize("weights", [None, "int8:32"])
@pytest.mark.slow
def test_eight_bits_hold_experts_exactly(folders, logits_of, weights):
    plain, coded = folders
    found = models.load_checkpoint(coded, "float32", weights=weights)
    expected = models.load_checkpoint(plain)
    attention = found.params["params"]["layers_0"]["attention"]["q"]
    assert ("scale" in attention) == (weights is not None)
    for name in ("gate", "up", "down"):
        parts = found.params["params"]["layers_0"]["mlp"][name]
        values = models.dequantize(parts["weight"], parts["scale"])
        exact = expected.params["params"]["layers_0"]["mlp"][name]["weight"]
        np.testing.assert_array_equal(values, exact)
    router = found.params["params"]["layers_0"]["mlp"]["router"]
    assert set(router) == {"weight", "bias"}  # not quantized
    tokens = np.random.default_rng(1).integers(0, 32, (2, 20)).astype(np.int32)
    logits = logits_of(found.module, found.params, tokens)
    exact = logits_of(expected.module, expected.params, tokens)
    bound = 2e-5 if weights is None else 0.05  # rounded attention
    assert np.abs(logits - exact).max() < bound * np.abs(exact).max()


def test_quantized_experts_in_one_tensor_cannot_be_saved(folders, tmp_path):
    found = models.load_checkpoint(folders[1], weights="int8:32")
    with pytest.raises(ValueError, match="load it with weights='none' to save it"):
        models.save_checkpoint(tmp_path / "x", found.module, found.params)


def test_a_tensor_without_scales_is_refused(folders):
    _, coded = folders
    tensors = safetensors.numpy.load_file(coded / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    safetensors.numpy.save_file(tensors, coded / "model.safetensors")
    with pytest.raises(ValueError, match="missing model.layers.0.mlp.experts.down_proj_scales"):
        models.load_checkpoint(coded, weights="none")
