"""The argument `weights` for quantized checkpoints: exact, rounded again, or refused."""

import re

import jax
import numpy as np
import pytest

import magicjax
import models
from magicjax.loading import abstract_model
from magicjax.sources import Source
from tests.magicjax import keywords
from tests.models.quantized_layouts import write_pair
from tests.models.test_huggingface import assert_identical


@pytest.mark.parametrize("name", ["awq", "fp8"])
@pytest.mark.parametrize("offload", [False, True])
def test_another_format_rounds_the_dequantized_matrices(tmp_path, name, offload):
    folder, plain = write_pair(tmp_path, name)
    found = magicjax.load(folder, "float32", weights="int8:4", offload=offload)
    right = magicjax.load(plain, "float32", weights="int8:4", offload=offload)
    assert str(found.weights) == "int8:4"
    tensors = (jax.tree.leaves((m.params, m.layout)) for m in (found, right))
    for x, y in zip(*tensors, strict=True):
        np.testing.assert_array_equal(x, y)


def same_weights(first, second):
    both = [models.dequantize_params(c.params, np.float32) for c in (first, second)]
    return jax.tree.all(jax.tree.map(np.array_equal, *both))


@pytest.mark.parametrize(
    "name, weights, form",
    [
        ("awq", "int4:8", "int4:8+zeros"),
        ("awq", "int4:8+zeros", "int4:8+zeros"),
        ("awq", "int4:4", "int4:4+zeros"),
        ("packed", "int4:8", "int4:8"),
        ("packed, 8 bits", "int8", "int8"),
        ("fp8", "float8", "float8"),
        ("fp8, blocks", "float8:8", "float8:8"),
        ("fp8, blocks", "float8:4", "float8:4"),
    ],
)
def test_the_format_of_a_checkpoint_and_smaller_groups_are_exact(name, weights, form, tmp_path):
    folder, _ = write_pair(tmp_path, name)
    found, stored = models.load_checkpoint(folder, weights=weights), models.load_checkpoint(folder)
    assert str(found.module.weights) == form
    assert same_weights(found, stored)


def test_formats_of_other_checkpoints_are_refused(tmp_path):
    folder, plain = write_pair(tmp_path, "packed")
    for path, weights in ((folder, "float8"), (folder, "int4:8+zeros"), (plain, "float8")):
        message = f"weights='{re.escape(weights)}': only checkpoints have float8 values and zero"
        with pytest.raises(ValueError, match=message):
            models.load_checkpoint(path, weights=weights)
        with pytest.raises(ValueError, match=message):
            Source(path).matrix_formats(weights)


PART = dict(ignored=("lm_head", "layers.1.mlp.down_proj"))


@pytest.mark.parametrize(
    "name, weights, form",
    [("awq", None, None), ("awq", "int4:8", "int4:8"), ("fp8", "float8", None)],
)
@pytest.mark.slow
def test_matrices_that_a_checkpoint_does_not_quantize(name, weights, form, tmp_path, logits_of):
    folder, plain = write_pair(tmp_path, name, **PART)
    found = models.load_checkpoint(folder, "float32", weights=weights)
    formats = dict(found.module.weights.texts)
    assert formats.pop("layers_1/mlp/down", None) == form
    assert len(formats) == 13 and len({*formats.values()}) == 1
    if form is None:
        right = models.load_checkpoint(plain)
        assert same_weights(found, right)
        logits = [np.asarray(logits_of(x.module, x.params, TOKENS)) for x in (found, right)]
        np.testing.assert_allclose(*logits, atol=1e-4)


# A matrix of each, and some in floating point: no two layers are alike.
MIXTURE = ("packed", "packed, zeros", "float8", "packed, 8 bits", "int8")
IGNORED = ("lm_head", "layers.0.mlp.up_proj", "layers.1.self_attn.q_proj")
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)


def test_each_matrix_has_the_format_of_the_checkpoint(tmp_path, logits_of):
    folder, plain = write_pair(tmp_path, MIXTURE, IGNORED)
    found, right = models.load_checkpoint(folder, "float32"), models.load_checkpoint(plain)
    formats = found.module.weights
    assert formats.in_blocks == {"int4:8", "int4:8+zeros", "float8", "int8"}
    assert formats.of("layers_0/mlp/up") is formats.of("layers_1/attention/q") is None
    assert same_weights(found, right)
    logits = [np.asarray(logits_of(x.module, x.params, TOKENS)) for x in (found, right)]
    np.testing.assert_allclose(*logits, atol=1e-4)
    models.save_checkpoint(tmp_path / "saved", found.module, found.params)
    again = models.load_checkpoint(tmp_path / "saved")
    assert again.module == found.module
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)


def greedy(model, mesh=None):
    settings = {"max_tokens": 8, "drafter": "prompt-lookup:2", "tree": "chain:2"}
    return np.asarray(keywords.generate(model, TOKENS, mesh=mesh, **settings).tokens).tolist()


def on_meshes(folder):
    """Returns the greedy text on two devices, and on two stages."""
    found = []
    for axes in ({"model": 2}, {"stage": 2}):
        mesh = magicjax.make_mesh(**axes, devices=jax.devices()[:2])
        found.append(greedy(magicjax.load(folder, "float32", mesh=mesh), mesh))
    return found


def test_offloaded_layers_keep_their_formats(tmp_path):
    folder, plain = write_pair(tmp_path, MIXTURE, IGNORED)
    resident, offloaded = (magicjax.load(folder, "float32", offload=o) for o in (False, True))
    assert offloaded.weights == resident.weights == abstract_model(folder, offload=True).weights
    assert len(offloaded.layout.blocks) == 2  # a stack of each layer
    right = greedy(magicjax.load(plain, "float32"))
    assert greedy(offloaded) == greedy(magicjax.offload(resident)) == greedy(resident) == right


@pytest.mark.slow
def test_layers_in_one_format_can_be_divided(tmp_path, eight):
    folder, plain = write_pair(tmp_path, ("packed", "packed, zeros"))
    right = greedy(magicjax.load(plain, "float32"))
    assert eight(on_meshes, folder=str(folder)) == [right] * 2


def refused_on_stages(folder):
    """Returns the text after both remedies."""
    mesh = magicjax.make_mesh(stage=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="all stages need the same: load the target with the mesh"):
        greedy(magicjax.load(folder, "float32"), mesh)
    with pytest.raises(ValueError, match="pass weights='none' or 'int8'"):
        magicjax.load(folder, "float32", mesh=mesh)
    return greedy(magicjax.load(folder, "float32", mesh=mesh, weights="none"), mesh)


def test_layers_that_differ_are_loaded_with_the_mesh_as_the_error_says(tmp_path, eight):
    folder, plain = write_pair(tmp_path, "packed, zeros", IGNORED)
    found = eight(refused_on_stages, folder=str(folder))
    assert found == greedy(magicjax.load(plain, "float32"))


@pytest.mark.parametrize(
    ("layout", "ignored", "message"),
    [
        ("packed", IGNORED, r"is quantized \(int4:8\) in some layers"),
        ("packed, zeros", IGNORED, r"is quantized \(int4:8\+zeros\) in some layers"),
        (("packed", "float8"), ("lm_head",), "has integers in some layers .* and float8 in others"),
    ],
)
@pytest.mark.parametrize("weights", ["none", "int8"])
@pytest.mark.slow
def test_layers_in_several_formats_are_alike_as_the_error_says(
    layout, ignored, message, weights, tmp_path
):
    folder, plain = write_pair(tmp_path, layout, ignored)
    with pytest.raises(ValueError, match=f"{message}.*: pass weights='none' or 'int8'"):
        models.load_checkpoint(folder, "float32", uniform_layers=True)
    found, right = (
        models.load_checkpoint(x, "float32", weights=weights, uniform_layers=True)
        for x in (folder, plain)
    )
    assert str(found.module.weights) == weights
    assert_identical(found.params, right.params)


def test_a_format_quantizes_the_matrices_that_a_checkpoint_does_not(tmp_path):
    folder, plain = write_pair(tmp_path, "packed", **PART)
    found = models.load_checkpoint(folder, "float32", weights="int4:8")
    rounded = models.load_checkpoint(plain, weights="int4:8")
    exact = models.load_checkpoint(folder, "float32", weights="none")
    mlp, rounded, exact = (c.params["params"]["layers_1"]["mlp"] for c in (found, rounded, exact))
    np.testing.assert_array_equal(mlp["down"]["weight"], rounded["down"]["weight"])
    np.testing.assert_array_equal(models.dequantize(**mlp["up"]), exact["up"]["weight"])
