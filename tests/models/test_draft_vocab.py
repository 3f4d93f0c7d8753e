"""A draft vocabulary: a model with embeddings of some tokens is a model with repeated ones."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.layers import NEVER

SIZE = 7
OWN = np.array([4, 0, 11, 18, 7, 2])  # each has its own embedding; the others share the last


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def small(request, random_params, tiny):
    """A module and its parameters, with the map."""
    module = models.build(
        dataclasses.replace(tiny[0].config, tie_embeddings=request.param, draft_vocab_size=SIZE)
    )
    vocab_map = np.full(19, SIZE - 1, np.int32)
    vocab_map[OWN] = np.arange(SIZE - 1)
    params = random_params(module)["params"] | {"vocab_map": jnp.asarray(vocab_map)}
    return module, {"params": params}


def test_logits_are_those_of_a_model_with_repeated_embeddings(small, logits_of):
    module, params = small
    inner = dict(params["params"])
    vocab_map = np.asarray(inner.pop("vocab_map"))
    for name in {"embedding", "unembedding"} & set(inner):
        inner[name] = inner[name][vocab_map]
    whole = models.build(dataclasses.replace(module.config, draft_vocab_size=None))
    tokens = np.arange(16).reshape(2, 8)  # with and without own embeddings
    found, wanted = logits_of(module, params, tokens), logits_of(whole, {"params": inner}, tokens)
    np.testing.assert_allclose(found[..., OWN], wanted[..., OWN], rtol=1e-5, atol=1e-6)
    others = np.setdiff1d(np.arange(19), OWN)
    assert (np.asarray(found)[..., others] == np.float32(NEVER)).all()


def test_a_round_trip_keeps_the_map_in_every_dtype(small, tmp_path):
    module, params = small
    models.save_checkpoint(tmp_path / "model", module, params)
    for dtype in (None, "bfloat16"):
        read = models.load_checkpoint(tmp_path / "model", dtype)
        found = read.params["params"]["vocab_map"]
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, params["params"]["vocab_map"])
        assert read.config == module.config
        assert read.params["params"]["embedding"].dtype == (dtype or "float32")
