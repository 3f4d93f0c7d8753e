"""Engines of tiny models, and checks of their rows against the texts so far."""

import dataclasses
import functools

import jax
import numpy as np

import magicjax
from magicjax.drafters.text_lookup import TextLookup
from magicjax.policies import SnapKV
from tests.magicjax import oracle, tiny
from tests.magicjax.kv_cache import test_loop_caches as caches
from tests.magicjax.kv_cache import test_pages

NEW = 24
CAPACITY = caches.WIDTH  # every text fits the fresh prefill that caches are compared with
SNAPKV = SnapKV(window=5, kernel=3, recent=7)
# Name: (drafter, tree).
DRAFTERS = {
    "plain": (None, None),
    "streaming": (tiny.drafter("self"), tiny.TREES["chain4"]),
    "full": (magicjax.FullCacheSpeculation(), tiny.TREES["2,2,1"]),
    "snapkv": (magicjax.SelfSpeculation(SNAPKV, 13, refresh_every=2), tiny.TREES["2,2,1"]),
    "h2o": (
        magicjax.SelfSpeculation(magicjax.policies.H2O(window=30, recent=7), 13, refresh_every=3),
        tiny.TREES["chain4"],
    ),
    "quest": (magicjax.PageRetrieval(12, refresh_every=2, page_size=4), tiny.TREES["2,2,1"]),
    "layers": (
        magicjax.SelfSpeculation(SNAPKV, 13, refresh_every=2, layers="1"),
        tiny.TREES["2,2,1"],
    ),
    "int8": (magicjax.SelfSpeculation(budget=24, kv_dtype="int8"), tiny.TREES["chain4"]),
    "small": (tiny.drafter("near"), tiny.TREES["irregular"]),
    "sparse small": (
        magicjax.SmallModel(
            tiny.model("near"), policy=SnapKV(window=5, kernel=3, recent=10), budget=20
        ),
        tiny.TREES["chain4"],
    ),
    "sinks in the cache": (
        magicjax.SmallModel(
            tiny.model("near"),
            policy=magicjax.StreamingLLM(sinks=4),
            budget=24,
            sink_positions="in_cache",
        ),
        tiny.TREES["chain4"],
    ),
    "prompt lookup": (magicjax.PromptLookup(), tiny.TREES["chain4"]),
    "suffix": (magicjax.SuffixLookup(store_tokens=512), tiny.SPECIAL["dynamic"]),
    "ensemble": (
        magicjax.Ensemble([tiny.drafter("near"), tiny.drafter("self"), magicjax.PromptLookup()]),
        tiny.TREES["chain2"],
    ),
    "dynamic": (tiny.drafter("near"), tiny.SPECIAL["dynamic"]),
    "eagle": (tiny.drafter("same and heads"), tiny.TREES["2,2,1"]),
    "cascade": (tiny.drafter("cascade"), tiny.TREES["chain4"]),
}


def engine(name: str = "streaming", tree=None, **options) -> magicjax.Engine:
    """Returns an engine with a drafter, and its own tree unless one is given."""
    drafter, default_tree = DRAFTERS[name]
    tree = default_tree if tree is None else tree
    defaults = dict(slots=3, capacity=CAPACITY, max_tokens=NEW, eos_token_id=tiny.NEVER)
    defaults |= dict(prefill_chunk=16, rounds_per_step=3)
    config = magicjax.EngineConfig(**defaults | options)
    return magicjax.Engine(tiny.model(), drafter, tree, config)


@functools.cache
def prompts() -> tuple[np.ndarray, ...]:
    """Returns ragged prompts of 1 to 40 tokens; 16 fill a step of prefill."""
    rng = np.random.default_rng(11)
    lengths = (5, 40, 1, 16, 17, 2, 33, 15, 32, 8, 24, 39)
    return tuple(rng.integers(0, tiny.VOCAB - 1, n).astype(np.int32) for n in lengths)


@functools.cache
def expected(index: int) -> np.ndarray:
    """Returns the oracle's text after a prompt."""
    return oracle.greedy(tiny.model(), prompts()[index], NEW)


def rows_of(engine: magicjax.Engine) -> tuple[object, list[np.ndarray]]:
    """Returns the state of the rows that are decoded, as numpy, and their texts so far."""
    slots = sorted(engine._scheduler.running)
    state = dataclasses.replace(engine._state, rows=None, rounds=None)
    state = jax.tree.map(lambda x: np.array(x)[slots], state)
    texts = [
        np.concatenate([engine._scheduler.running[slot].prompt, output[:emitted]])
        for slot, output, emitted in zip(slots, state.output, state.emitted, strict=True)
    ]
    return state, texts


def disabled_rows(engine: magicjax.Engine) -> list[bool]:
    """Returns for each row that is decoded whether speculation is disabled."""
    return [slot in engine._loops.controller.disabled for slot in sorted(engine._scheduler.running)]


def check_rows(engine: magicjax.Engine) -> int:
    """Asserts that the rows' caches are those of a fresh prefill; returns the number of rows."""
    state, texts = rows_of(engine)
    if texts:
        drafter = engine._setup.row.drafter
        check_state(state, texts, tiny.model(), drafter, disabled_rows(engine))
    return len(texts)


def check_state(state, texts, target, drafter, disabled=()) -> None:
    """Asserts that a state's caches, as numpy arrays, are those of a fresh prefill of the texts.

    Without speculation a drafter has only the first tokens.
    """
    np.testing.assert_array_equal(state.cache.lengths, [len(text) - 1 for text in texts])
    np.testing.assert_array_equal(state.pending, [text[-1] for text in texts])
    caches.check_cache(state.cache, target, texts, state.cache.lengths, 1e-5)
    if drafter is not None:
        for member, member_state in caches.states_of(drafter, state.drafter):
            drafted = texts
            if any(disabled) and member.can_be_disabled:
                known = np.asarray(member_state.tokens)
                rows = zip(texts, known, disabled, strict=True)
                drafted = [text[: n + 1] if disabled else text for text, n, disabled in rows]
            check_drafter(member, member_state, state.cache, drafted, target)


def check_drafter(drafter, state, cache, texts, target) -> None:
    """Asserts that a drafter's state is that of the texts, as far as it is determined."""
    if isinstance(drafter, TextLookup):
        caches.check_text(state, texts)
    elif isinstance(drafter, magicjax.PageRetrieval):
        test_pages.check_bounds(state.bounds, caches.of_layers(cache, drafter.layers))
    elif isinstance(drafter, magicjax.FullCacheSpeculation):
        assert not jax.tree.leaves(state)
    elif isinstance(drafter, magicjax.SelfSpeculation):
        if drafter.kv_dtype is None:
            caches.check_draft_cache(state.cache, caches.of_layers(cache, drafter.layers))
    elif isinstance(drafter, magicjax.Eagle):
        caches.check_head(state, drafter, target, texts, 1e-5)
    elif drafter.sparse is None:
        caches.check_small(state, drafter.model, texts, 1e-5)
    else:
        committed = state.cache.count + state.backlog.count
        np.testing.assert_array_equal(committed, [len(text) - 1 for text in texts])
