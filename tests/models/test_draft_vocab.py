"""A draft vocabulary: a model with embeddings of some tokens is a model with repeated ones.

`with_draft_vocab` cuts the output matrix alone.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from magicjax import loading
from magicjax.drafters import spec
from magicjax.model import Model
from models.layers import NEVER
from pallas_kernels.cpu import build
from tests.magicjax import tiny as tiny_models
from tests.quick import quick

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


ENDS = (97, 3)


@pytest.mark.parametrize(
    ("tied", "packed"),
    quick([*itertools.product([False, True], repeat=2)], (True, False), (False, True)),
)
def test_a_cut_output_matrix_has_the_first_tokens_and_the_ends(
    tied, packed, random_params, logits_of
):
    if packed and not build.is_available():
        pytest.skip("needs the CPU kernels")
    config = tiny_models.config(vocab_size=112, hidden_size=32, tie_embeddings=tied)
    module = models.build(config)
    model = Model(module, random_params(module))
    model = tiny_models.packed(model) if packed else model
    cut, params = models.with_draft_vocab(model.module, model.params, 48, ENDS)
    assert models.with_draft_vocab(model.module, None, 48, ENDS) == (cut, None)
    small = Model(cut, params)
    own = [*range(16), *range(96, 112), *range(16, 31)]  # the last row is of all other tokens
    tokens = np.arange(16, 112, 6).reshape(2, 8)  # all are read
    found, wanted = (np.asarray(logits_of(m.module, m.params, tokens)) for m in (small, model))
    np.testing.assert_array_equal(found[..., own], wanted[..., own])
    assert (np.delete(found, own, -1) == np.float32(NEVER)).all()
    np.testing.assert_array_equal(small.draft_tokens(jnp.arange(47)), own)
    probs = small.over_tokens(jnp.full((1, 48), 1 / 47).at[:, -1].set(0))
    assert probs.shape == (1, 112) and probs.sum() == pytest.approx(1)


@pytest.mark.parametrize("size", [32, 56, 112, 128])
def test_a_draft_vocabulary_of_another_size_is_refused(size):
    module = models.build(tiny_models.config(vocab_size=112))
    with pytest.raises(ValueError, match=f"draft_vocab={size}: use a multiple of 16, at least 48"):
        models.with_draft_vocab(module, None, size, ENDS)


def test_a_second_draft_vocabulary_is_refused():
    module, _ = models.with_draft_vocab(
        models.build(tiny_models.config(vocab_size=112)), None, 32, ()
    )
    with pytest.raises(
        ValueError,
        match="draft_vocab=16: the model is a learned head, or has a draft vocabulary of its",
    ):
        models.with_draft_vocab(module, None, 16, ())
    with pytest.raises(ValueError, match="an output matrix of 32 tokens cannot be written"):
        models.save_checkpoint("unused", module, {})


def test_an_end_in_the_last_block_of_a_vocabulary_leaves_the_size(random_params):
    module = models.build(tiny_models.config(vocab_size=57))
    cut, params = models.with_draft_vocab(module, random_params(module), 32, (56, -1, 99))
    rows = Model(cut, params).draft_tokens(jnp.arange(31))
    assert cut.config.draft_vocab_size == 32
    assert rows.tolist() == [*range(48, 57), *range(16), *range(16, 22)]


@pytest.mark.slow
def test_a_path_is_loaded_with_the_draft_vocabulary(tmp_path, random_params):
    module = models.build(tiny_models.config(vocab_size=112, max_positions=64))
    models.save_checkpoint(tmp_path / "m", module, random_params(module), eos_token_ids=ENDS)
    target = magicjax.load(tmp_path / "m", "float32")
    text = f"small:{tmp_path / 'm'}:draft_vocab=48"
    drafter = spec.make_drafter(text, lambda path, **o: loading.abstract_model(path, **o))
    out = magicjax.generate(
        target, [[1, 2, 3]], magicjax.SamplingParams(max_tokens=8), drafter=drafter
    )
    plain = magicjax.generate(target, [[1, 2, 3]], magicjax.SamplingParams(max_tokens=8))
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert loading.with_weights(drafter).model.config.draft_vocab_size == 48
    with pytest.raises(TypeError, match="draft_vocab='48'"):
        magicjax.load(tmp_path / "m", "float32", draft_vocab="48")
    loaded = magicjax.SmallModel(target, draft_vocab=48)
    with pytest.raises(ValueError, match="draft_vocab=48 differs from the draft model's, None"):
        magicjax.generate(target, [[1]], magicjax.SamplingParams(max_tokens=8), drafter=loaded)
