"""A refresh pins the entries that the policy pins after a prefill of the whole text."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.kv_cache import prefill
from tests.magicjax import tiny
from tests.magicjax.kv_cache import test_loop_caches as loop

BUDGET, RING = 13, 7
POLICIES = {
    "snapkv": magicjax.policies.SnapKV(window=5, kernel=3, recent=RING),
    "pyramidkv": magicjax.policies.PyramidKV(window=9, kernel=3, pooling="avg", recent=RING),
    "tova": magicjax.policies.TOVA(recent=RING),
    "h2o": magicjax.policies.H2O(window=30, recent=RING),
    "keydiff": magicjax.policies.KeyDiff(recent=RING),
    "knorm": magicjax.policies.KNorm(recent=RING),
    "expected": magicjax.policies.ExpectedAttention(window=9, future=16, recent=RING),
    "random": magicjax.policies.Random(recent=RING),
}


@functools.cache
def picking(sparse, capacity: int):
    """Returns a compiled function that chooses pins after a prefill."""
    settings = types.SimpleNamespace(chunk=loop.WIDTH // 2, capacity=capacity, backend=None)

    @jax.jit
    def pick(model, tokens, lengths):
        cache, _, seen = prefill.prefill_cache(
            model, tokens, lengths, settings, sparse.stats_spec()
        )
        return sparse.choose_pins(model, cache, seen, None)

    return pick


def fresh_pins(request, texts, counts):
    """Returns the policy's pins after a prefill of each text's first tokens."""
    tokens = np.zeros((len(texts), loop.WIDTH), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    pick = picking(request.drafter.sparse, request.settings.capacity)
    return jax.tree.map(np.array, pick(request.target, jnp.asarray(tokens), jnp.asarray(counts)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("snapkv", "chain4"),
        *(
            pytest.param(name, tree, marks=pytest.mark.slow)
            for name, tree in (
                ("h2o", "irregular"),
                ("expected", "irregular"),
                ("keydiff", "chain4"),
                ("pyramidkv", "irregular"),
                ("tova", "chain4"),
                ("knorm", "irregular"),
                ("random", "irregular"),
            )
        ),
    ],
)
def test_refreshed_pins_are_those_of_a_fresh_prefill(name, tree, monkeypatch):
    every = 2
    drafter = magicjax.SelfSpeculation(POLICIES[name], BUDGET, refresh_every=every)
    monkeypatch.setattr(tiny, "drafter", lambda *_: drafter)
    prompts = loop.prompts_around_the_budget()
    at_first, changed, compared = None, 0, 0
    ended = np.zeros(len(prompts), bool)  # before the round
    for number, (request, state) in enumerate(loop.rounds("self", tree, prompts, "float64")):
        draft, counts = state.drafter.cache, state.cache.lengths
        loop.check_draft_cache(draft, state.cache)  # pins and ring hold verified entries
        at_first = draft.pinned if at_first is None else at_first
        active, ended = ~ended, state.ended
        if number % every:
            continue
        outputs = zip(prompts, state.output, state.emitted, strict=True)
        texts = [np.concatenate([p, out[:n]])[:-1] for p, out, n in outputs]
        wanted = fresh_pins(request, texts, counts)
        for layer, (found, chosen) in enumerate(zip(draft.pinned, wanted, strict=True)):
            long = (counts > draft.capacity(layer)) & active  # a row that has ended drafts no more
            np.testing.assert_array_equal(found[long], chosen[long])
            compared += long.sum()
            changed += (found[long] != at_first[layer][long]).any()
    assert compared > 50 and changed > 3


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_queries_missing_from_the_window_are_detected(monkeypatch):
    """A window shorter than two rounds emit gives other heavy hitters than a prefill."""
    monkeypatch.setitem(POLICIES, "h2o", magicjax.policies.H2O(window=1, recent=RING))
    with pytest.raises(AssertionError):
        test_refreshed_pins_are_those_of_a_fresh_prefill("h2o", "chain4", monkeypatch)


@pytest.mark.slow
def test_pins_do_not_change_between_refreshes(monkeypatch):
    drafter = magicjax.SelfSpeculation(POLICIES["snapkv"], BUDGET, refresh_every=3)
    monkeypatch.setattr(tiny, "drafter", lambda *_: drafter)
    seen = []
    for _, state in loop.rounds("self", "chain4", loop.prompts_around_the_budget(), "float32"):
        seen.append(state.drafter.cache.pinned[1][5])  # the row of 30 tokens
    moved = [not np.array_equal(a, b) for a, b in zip(seen, seen[1:], strict=False)]
    assert any(moved)
    assert all(not m for number, m in enumerate(moved, 1) if number % 3)
