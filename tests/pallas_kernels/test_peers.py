"""Other libraries' attention: asked the right question, checked before it is timed."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tree_attention
from pallas_kernels.benchmarks import baselines
from pallas_kernels.benchmarks.shapes import Shape, attentive, device_inputs, tree_mask

SHAPE = Shape(2, 5, 5, 2, 3, 16, 40)
LIVE = 33


def question(shape: Shape = SHAPE, mask=None):
    """Returns (two layers, mask, our answer for the first)."""
    layers = [attentive(device_inputs(shape, jnp.float32, seed)) for seed in range(2)]
    mask = tree_mask(shape.nodes) if mask is None else mask
    lengths = jnp.full(shape.batch, LIVE, jnp.int32)
    return layers, mask, tree_attention(**layers[0], lengths=lengths, mask=jnp.asarray(mask))


def installed(name: str) -> bool:
    library = name.split()[0]
    return library == "jax.nn" or importlib.util.find_spec(library) is not None


def test_a_tree_is_no_chain():
    assert tree_mask(1).tolist() == [[True]]
    assert tree_mask(4).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, False, True],
    ]


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("name", [name for name in baselines.PEERS if "cudnn" not in name])
def test_a_peer_answers_what_we_answer(name, nodes):
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    shape = Shape(2, nodes, nodes, 2, 3, 16, 40)
    layers, mask, ours = question(shape)
    assert baselines.why_not(name, layers, mask, LIVE, ours) is None
    program = baselines.make(name, layers, mask, LIVE)
    assert np.prod(baselines.wait(program()).shape) == np.prod(ours.shape)


@pytest.mark.parametrize("name", ["jax.nn xla", "jax.nn xla packed"])
def test_a_peer_that_hides_the_wrong_tokens_is_reported_as_wrong(name):
    layers, mask, ours = question()
    chain = np.tri(SHAPE.nodes, dtype=bool)
    assert baselines.why_not(name, layers, chain, LIVE, ours).startswith("wrong: differs by")
    reason = baselines.why_not(name, layers, mask, LIVE, jnp.full_like(ours, jnp.nan))
    assert reason.startswith("wrong: differs by nan")


def test_a_long_prefix_does_not_outweigh_the_new_tokens():
    """With inputs that are simply normal it would: a wrong mask would pass for rounding."""
    shape = Shape(1, 5, 5, 1, 1, 64, 32768)
    normal = device_inputs(shape, jnp.float32)
    for inputs, seen in ((attentive(normal), True), (normal, False)):
        lengths = jnp.full(1, shape.slots, jnp.int32)
        masks = tree_mask(5), np.tri(5, dtype=bool)
        a, b = (tree_attention(**inputs, lengths=lengths, mask=jnp.asarray(m)) for m in masks)
        error = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a))
        assert (error > 2 * baselines.TOLERANCE["bfloat16"]) == seen, error


def test_what_another_library_raises_is_its_answer(monkeypatch):
    layers, mask, ours = question()

    def fail(*arguments, **options):
        raise RuntimeError("No supported engine\nand a long trace")

    monkeypatch.setattr(jax.nn, "dot_product_attention", fail)
    reason = baselines.why_not("jax.nn xla", layers, mask, LIVE, ours)
    assert reason == "failed: RuntimeError: No supported engine"


@pytest.mark.parametrize("name", baselines.PEERS)
def test_one_that_is_not_here_says_so(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: None)
    layers, mask, ours = question()
    reason = baselines.why_not(name, layers, mask, LIVE, ours)
    wanted = {"torch": "torch is not installed", "tokamax": "tokamax is not installed"}
    wanted["jax.nn"] = "needs an NVIDIA GPU with cuDNN" if "cudnn" in name else None
    assert reason == wanted[name.split()[0]]
