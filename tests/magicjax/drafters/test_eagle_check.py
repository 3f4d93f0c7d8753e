"""A head that is wired wrongly to its target is found, with the cause, once for a pair of them."""

import dataclasses
import functools
import re
import types

import jax
import numpy as np
import pytest

import magicjax
import models
from magicjax.drafters import eagle_check
from magicjax.kv_cache.prefill import prefill_cache
from tests.magicjax import oracle, tiny

TEXT = np.random.default_rng(5).integers(0, tiny.VOCAB - 1, 24).tolist()


class Tokenizer:
    """Every text is the same tokens."""

    def __call__(self, text):
        return {"input_ids": TEXT}

    def decode(self, tokens, **options):
        return ""


@functools.cache
def target() -> magicjax.Model:
    return dataclasses.replace(tiny.model(), tokenizer=Tokenizer())


def resolved(head, model) -> magicjax.Model:
    drafter = magicjax.Eagle(head, check_agreement=False)
    unloaded = dataclasses.replace(model, params=None)
    return drafter.for_target(unloaded).for_target(model).model  # as a request does


@functools.cache
def first_draft():
    """Returns a function of (target, drafter, tokens [1, 32], lengths [1]) to the drafted token."""
    settings = types.SimpleNamespace(
        chunk=32, capacity=64, backend=None, tree=magicjax.chain(1), drafter_index=0
    )

    @jax.jit
    def draft(target, drafter, tokens, lengths):
        spec = drafter.stats_spec()
        cache, _, stats = prefill_cache(target, tokens, lengths - 1, settings, spec)
        state = drafter.prefill(target, tokens, cache, stats, settings)
        root = tokens[:, lengths[0] - 1]
        proposal, _ = drafter.propose(target, state, root, cache, None, settings)
        return proposal.tokens[0, 1]

    return draft


def test_agreement_counts_the_first_drafts_that_the_target_would_choose():
    model = target()
    drafter = magicjax.Eagle(resolved(tiny.head(model), model), check_agreement=False)
    found = eagle_check.agreement(drafter.model, model, np.array([TEXT], np.int32))
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(TEXT)] = TEXT
    lengths = range(2, len(TEXT) + 1)
    drafts = [int(first_draft()(model, drafter, tokens, np.array([n]))) for n in lengths]
    best = oracle.logits(model, TEXT).argmax(-1)[1:]
    assert float(found) == pytest.approx((np.array(drafts) == best).mean())


CAUSES = {
    "inputs of the layers (1, 2, 3)": lambda c: c.layer_inputs == (1, 2, 3),
    "norm_before_residual=True": lambda c: c.norm_before_residual,
}


@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_the_error_names_the_wiring_that_agrees(cause, monkeypatch):
    deep = target().module.clone(config=tiny.config(num_layers=3))
    model = dataclasses.replace(target(), module=deep)
    head = tiny.head(model, layer_inputs=(0, 1, 2), acceptance=0.7)

    def agreement(head, target, tokens):
        return 0.6 if cause and CAUSES[cause](head.config) else 0.02

    monkeypatch.setattr(eagle_check, "agreement", agreement)
    expected = re.escape(f"with {cause} they" if cause else "was trained for another target")
    message = "at 2.0% of a text's positions, and 70% in training.*" + expected
    with pytest.raises(ValueError, match=message):
        eagle_check.check(resolved(head, model), model)


def copying_pair() -> tuple[magicjax.Model, magicjax.Model]:
    """Returns a target whose next token depends on the last one, and a head that knows how.

    Their layers add nothing. The head's `fc` has the embedding alone, and its two norms differ.
    """
    shape = tiny.config(norm="rms_plus_one")
    zeros = jax.tree.map(np.zeros_like, tiny.drawn(shape, 0))["params"]
    embedding = np.random.default_rng(0).standard_normal((tiny.VOCAB, 32))
    embedding /= np.sqrt((embedding**2).mean(1, keepdims=True))
    params = zeros | dict(embedding=embedding, unembedding=np.roll(embedding, 5, 0))
    model = magicjax.Model(models.build(shape), tiny.put({"params": params}), Tokenizer())
    head = models.MtpConfig.of_target(shape)
    zeros = jax.tree.map(np.zeros_like, tiny.drawn(head, 0))["params"]
    fc = {"weight": np.concatenate([np.eye(32), np.zeros((32, 32))], 1)}
    of_hidden = {"scale": -2.0 * np.random.default_rng(1).integers(0, 2, 32)}  # signs
    params = tiny.put({"params": zeros | dict(fc=fc, feature_norm=of_hidden)})
    return model, magicjax.Model(models.build(head), params, name="copying")


def miswired(head: magicjax.Model, how: str) -> magicjax.Model:
    """Returns a head as if its files, or who reads them, had a mistake."""
    inner, module = head.params["params"], head.module
    if how.endswith("inputs' norms"):
        names = "embedding_norm", "feature_norm"
        inner = inner | dict(zip(names, (inner[name] for name in names[::-1]), strict=True))
    if "fc" in how:
        inner = inner | dict(fc={"weight": np.roll(inner["fc"]["weight"], 32, 1)})
    if how == "norms without 1 +":
        module = module.clone(config=dataclasses.replace(module.config, norm="rms"))
    return dataclasses.replace(head, module=module, params=tiny.put({"params": inner}))


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("right", None),
        ("fc", "the columns of fc for the hidden state first"),
        ("inputs' norms", "pre_fc_norm_embedding and pre_fc_norm_hidden exchanged"),
        ("fc and inputs' norms", "both of these exchanged"),
        ("norms without 1 +", "norms that are scaled by 1 + the weight"),
    ],
)
def test_a_head_for_multi_token_prediction_is_wired_as_its_files_are(how, cause):
    model, head = copying_pair()
    head = miswired(head, how)
    drafter = magicjax.MTP(head, check_agreement=False)
    resolved = drafter.for_target(model).model
    if cause is None:
        tokens = np.array([TEXT], np.int32)
        assert eagle_check.agreement(resolved, model, tokens) == 1
        return eagle_check.check(resolved, model)
    with pytest.raises(ValueError, match=f"with {re.escape(cause)} they would at 100%"):
        eagle_check.check(resolved, model)


def test_a_pair_is_checked_once_and_only_with_weights(monkeypatch):
    model, calls = target(), []
    monkeypatch.setattr(eagle_check, "check", lambda head, target: calls.append(head))
    drafter = magicjax.Eagle(tiny.head(model, own_unembedding=False))
    params = magicjax.SamplingParams(max_tokens=2)
    for _ in range(2):
        options = dict(drafter=drafter, tree="chain:2", eos_token_id=[])
        out = magicjax.generate(model, [TEXT[:5]], params, **options)
    assert len(calls) == 1
    np.testing.assert_array_equal(out.tokens, [oracle.greedy(model, TEXT[:5], 2)])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (drafter, model))
    own = shapes[0].for_target(dataclasses.replace(shapes[1], tokenizer=model.tokenizer))
    assert own.model.params["params"]["unembedding"].shape == (40, 32) and len(calls) == 1
