"""The argument `weights` for quantized checkpoints: exact, rounded again, or refused."""

import re

import jax
import numpy as np
import pytest

import magicjax
import models
from tests.models.quantized_layouts import write_pair


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
            magicjax.loading.weight_format(path, weights)


PART = dict(ignored=("lm_head", "layers.1.mlp.down_proj"))


def test_blocks_that_are_quantized_in_part_need_a_format(tmp_path):
    folder, plain = write_pair(tmp_path, "awq", **PART)
    for weights in (None, "int4:8"):  # nothing is rounded to zero points
        message = r"others are not, such as model.layers.1.mlp.down_proj.weight: .* or 'int8' to"
        with pytest.raises(ValueError, match=message):
            models.load_checkpoint(folder, weights=weights)
    for weights in ("none", "int8"):
        found = models.load_checkpoint(folder, "float32", weights=weights).params
        right = models.load_checkpoint(plain, weights=weights).params
        assert jax.tree.all(jax.tree.map(np.array_equal, found, right))


def test_a_format_quantizes_the_matrices_that_a_checkpoint_does_not(tmp_path):
    folder, plain = write_pair(tmp_path, "packed", **PART)
    found = models.load_checkpoint(folder, "float32", weights="int4:8")
    rounded = models.load_checkpoint(plain, weights="int4:8")
    exact = models.load_checkpoint(folder, "float32", weights="none")
    mlp, rounded, exact = (c.params["params"]["layers_1"]["mlp"] for c in (found, rounded, exact))
    np.testing.assert_array_equal(mlp["down"]["weight"], rounded["down"]["weight"])
    np.testing.assert_array_equal(models.dequantize(**mlp["up"]), exact["up"]["weight"])
