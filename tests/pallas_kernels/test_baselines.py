"""Attention of other libraries: called with the right inputs, checked before it is timed."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tree_attention
from pallas_kernels.benchmarks import baselines
from pallas_kernels.benchmarks.shapes import Shape, device_inputs, emphasize_new_tokens, tree_mask

SHAPE = Shape(2, 5, 5, 2, 3, 16, 40)
LIVE = 33


def call(shape: Shape = SHAPE, mask=None):
    """Returns two layers, the mask, and the attention of the first layer."""
    layers = [emphasize_new_tokens(device_inputs(shape, jnp.float32, seed)) for seed in range(2)]
    mask = tree_mask(shape.nodes) if mask is None else mask
    lengths = jnp.full(shape.batch, LIVE, jnp.int32)
    return layers, mask, tree_attention(**layers[0], lengths=lengths, mask=jnp.asarray(mask))


def installed(name: str) -> bool:
    library = name.split()[0]
    return library == "jax.nn" or importlib.util.find_spec(library) is not None


def test_the_mask_of_a_tree():
    assert tree_mask(1).tolist() == [[True]]
    assert tree_mask(4).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, False, True],
    ]


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("name", [name for name in baselines.BASELINES if "cudnn" not in name])
def test_a_baseline_computes_the_same_attention(name, nodes):
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    shape = Shape(2, nodes, nodes, 2, 3, 16, 40)
    layers, mask, expected = call(shape)
    assert baselines.skip_reason(name, layers, mask, LIVE, expected) is None
    program = baselines.make_program(name, layers, mask, LIVE)
    assert np.prod(baselines.wait(program()).shape) == np.prod(expected.shape)


@pytest.mark.parametrize("name", ["jax.nn xla", "jax.nn xla packed"])
def test_a_baseline_with_a_wrong_mask_is_reported(name):
    layers, mask, expected = call()
    chain = np.tri(SHAPE.nodes, dtype=bool)
    assert baselines.skip_reason(name, layers, chain, LIVE, expected).startswith(
        "wrong: relative error"
    )
    reason = baselines.skip_reason(name, layers, mask, LIVE, jnp.full_like(expected, jnp.nan))
    assert reason.startswith("wrong: relative error nan")
