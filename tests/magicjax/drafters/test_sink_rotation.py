"""Sinks that move with the ring: a draft sees the same at any position of a long text."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from magicjax.decoding.decoder import Decoder
from magicjax.drafters import sink_rotation
from magicjax.drafters.draft_pass import DraftContext
from magicjax.drafters.static_tree import draft_static_tree
from tests.magicjax import keywords, tiny

SINKS, RING, SHORT = 3, 9, 40


def draft() -> magicjax.Model:
    """Returns a draft model of one layer, whose keys and values depend on one token only."""
    return tiny.model("other")


@jax.jit
def drafted(cache, length: int):
    """Returns the most likely tokens of a tree after the text."""
    context = DraftContext(
        model=draft(),
        target=draft(),
        cache=cache,
        root=jnp.array([7]),
        root_position=jnp.asarray(length)[None],
        sampling=None,
        backlog=None,
        draw_method="top",
        backend=None,
        drafter_index=0,
    )
    return draft_static_tree(context, magicjax.expansion((4, 2)))[0].tokens


def prefilled(text):
    """Returns the cache after a text, and the sinks' keys before rotation."""
    tokens = np.zeros((1, 256), np.int32)
    tokens[0, : len(text)] = text
    settings = types.SimpleNamespace(chunk=16, backend=None)
    length = jnp.array([len(text)])
    return sink_rotation.prefill_sliding_window(
        draft(), jnp.asarray(tokens), length, settings, SINKS, RING
    )


def scores(cache, length: int) -> np.ndarray:
    """Returns the products of the newest key with all keys, [K, C], the ring oldest first.

    They depend on distances alone.
    """
    keys = np.asarray(cache.k[0])[0]
    ring = SINKS + (np.arange(length, length + RING) - SINKS) % RING
    keys = np.concatenate([keys[:, :SINKS], keys[:, ring]], 1)
    return np.einsum("kd,kcd->kc", keys[:, -1], keys)


def test_a_draft_after_a_long_text_equals_one_without_the_middle():
    rng = np.random.default_rng(0)
    ends = rng.integers(0, tiny.VOCAB, SINKS), rng.integers(0, tiny.VOCAB, RING)
    short = np.concatenate(ends)
    wanted, _ = prefilled(short)
    for middle in (1, 50, 200):
        long = np.concatenate([ends[0], rng.integers(0, tiny.VOCAB, middle), ends[1]])
        cache, _ = prefilled(long)
        np.testing.assert_array_equal(drafted(cache, len(long)), drafted(wanted, len(short)))
        found = scores(cache, len(long))
        np.testing.assert_allclose(found, scores(wanted, len(short)), rtol=1e-4, atol=1e-4)


def test_sinks_that_do_not_move_are_detected(monkeypatch):
    monkeypatch.setattr(
        sink_rotation, "rotate_sinks", lambda model, cache, raw, before: (cache, raw)
    )
    with pytest.raises(AssertionError):
        test_a_draft_after_a_long_text_equals_one_without_the_middle()


def test_a_draft_of_short_context_needs_sinks_that_move():
    config = dataclasses.replace(draft().config, max_positions=SHORT)
    short = dataclasses.replace(draft(), module=models.build(config, "float32"))
    sparse = dict(policy=magicjax.StreamingLLM(SINKS), budget=SINKS + 16)
    prompts = [np.resize(p, 90 + n) for n, p in enumerate(tiny.prompts(3))]

    def kv_bytes(**options) -> int:
        drafter = magicjax.SmallModel(short, **options)
        request = keywords.prepare(tiny.model(), prompts, drafter=drafter, max_tokens=tiny.NEW)
        return request.kv_bytes[1]

    entries, positions = (2 * (SINKS + 16) + SINKS) * 8 * 4, SINKS * 4  # bytes of a KV head
    assert kv_bytes(**sparse, sink_positions="in_cache") == 3 * 4 * (entries + positions)
    with pytest.raises(ValueError, match="sink_positions='in_cache'"):
        kv_bytes()


def test_chunks_of_a_sliding_window_prefill_fit_ring_and_positions():
    assert sink_rotation.prefill_chunk(ring=9, spare=100) == 8
    assert sink_rotation.prefill_chunk(ring=240, spare=100) == 64
    assert sink_rotation.prefill_chunk(ring=240, spare=4) == 4
    assert sink_rotation.prefill_chunk(ring=4000, spare=9000) == sink_rotation.LARGEST_CHUNK


@pytest.mark.slow
def test_a_draft_cache_does_not_depend_on_other_rows():
    """What a token sees depends on the chunk, whose size must not depend on other rows."""
    drafter = magicjax.SmallModel(
        tiny.model("near"), policy="streaming", budget=64, sink_positions="in_cache"
    )
    prompt, longer = np.resize(tiny.prompts(1)[0], 128), np.resize(tiny.prompts(1)[0], 300)
    caches = []
    for prompts in ([prompt], [prompt, longer]):
        request = keywords.prepare(
            tiny.model(), prompts, drafter=drafter, max_tokens=4, eos_token_id=tiny.NEVER
        )
        caches.append(Decoder(request).start().drafter.cache)
    alone, beside = caches
    for one, other in zip((*alone.k, *alone.v), (*beside.k, *beside.v), strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-4, atol=1e-4)
