"""Attention of other libraries: called with the right inputs, checked before it is timed."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tree_attention
from pallas_kernels.benchmarks import baselines
from pallas_kernels.benchmarks.shapes import Shape, device_inputs, emphasize_new_tokens, tree_mask

LIVE = 33


def call(nodes: int):
    """Returns two layers, the mask, and the attention of the first layer."""
    shape = Shape(2, nodes, nodes, 2, 3, 16, 40)
    layers = [emphasize_new_tokens(device_inputs(shape, jnp.float32, seed)) for seed in range(2)]
    mask, lengths = tree_mask(nodes), jnp.full(shape.batch, LIVE, jnp.int32)
    return layers, mask, tree_attention(**layers[0], lengths=lengths, mask=jnp.asarray(mask))


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("name", [name for name in baselines.BASELINES if "cudnn" not in name])
def test_a_baseline_computes_the_same_attention(name, nodes):
    library = name.split()[0]
    if library != "jax.nn" and importlib.util.find_spec(library) is None:
        pytest.skip(f"{name} is not installed")
    layers, mask, expected = call(nodes)
    assert baselines.skip_reason(name, layers, mask, LIVE, expected) is None


@pytest.mark.parametrize("name", ["jax.nn xla", "jax.nn xla packed"])
def test_a_wrong_mask_a_nan_and_an_error_are_reported(name, monkeypatch):
    layers, mask, expected = call(5)
    for wrong in (
        (np.tri(5, dtype=bool), expected),
        (mask, jnp.full_like(expected, jnp.nan)),
    ):
        reason = baselines.skip_reason(name, layers, wrong[0], LIVE, wrong[1])
        assert reason.startswith("wrong: relative error")

    def fail(*arguments, **options):
        raise RuntimeError("No supported engine\nand a long trace")

    monkeypatch.setattr(jax.nn, "dot_product_attention", fail)
    reason = baselines.skip_reason(name, layers, mask, LIVE, expected)
    assert reason == "failed: RuntimeError: No supported engine"
