"""Models with sliding windows, over texts that wrap the rings of their caches several times.

`test_exactness` compares the texts of all drafters.
"""

import dataclasses
import functools
import itertools
import types

import jax
import numpy as np
import pytest

import magicjax
import models
from magicjax.drafters.spec import resolve
from magicjax.engine.handle import Handle
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.prefill import prefill_cache
from magicjax.model import RING_SPARE, layer_slots
from magicjax.settings import StatsSpec
from tests.fuzz import checks
from tests.magicjax import keywords, recomputation, tiny
from tests.quick import quick

KINDS = ("mixed", "windowed", "heads", "shared")
NEW, WIDTH, WINDOW = 48, 512, 20
LENGTHS = (370, 230, 64, 3)  # the first text passes 384, where its rings of 192 slots wrap
OPTIONS = dict(max_tokens=NEW, eos_token_id=[])


@functools.cache
def model(kind: str = "mixed", noise: float = 0.0) -> magicjax.Model:
    """Returns a model: `windowed` has windows in all layers, `heads` other heads without one.

    The last two layers of `shared` read the keys and values of the first two.
    """
    full = {"windowed": (), "shared": (1, 3)}.get(kind, (1,))
    own: dict[str, dict] = {
        "heads": dict(full_head_dim=16, full_kv_heads=1, values_are_keys=True, value_norm=True),
        "shared": dict(num_layers=4, shared_kv_layers=2, layer_input_size=6),
    }
    config = tiny.config(
        max_positions=1024,
        sliding_window=WINDOW,
        full_layers=full,
        window_positions=models.Rope(theta=300.0),
        attention_sinks=kind == "mixed",
        **own.get(kind, {}),
    )
    params = tiny.loud(tiny.drawn(config, 1), np.random.default_rng(7), noise)
    return magicjax.Model(models.build(config), tiny.put(params))


@functools.cache
def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, tiny.VOCAB, n).astype(np.int32) for n in LENGTHS]


def logits(target: magicjax.Model, text, shift: int = 0) -> np.ndarray:
    """Returns the logits of a text without a cache; `shift` is added to the windows."""
    return recomputation.logits(target, text, WIDTH, shift)


def check(texts, rows, shift: int = 0, kind: str = "mixed") -> None:
    """Asserts that rows are the greedy text after each of the texts."""
    for text, row in zip(texts, rows, strict=True):
        assert checks.greedy(model(kind), text, row, functools.partial(logits, shift=shift)) == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_window_off_by_one_has_other_texts(shift):
    """Negative control."""
    rows = tiny.rows_of(keywords.generate(model(), prompts(), **OPTIONS))
    check(prompts(), rows)
    for text, row in zip(prompts()[:3], rows, strict=False):  # of more tokens than the window
        with pytest.raises(AssertionError, match="instead of"):
            check([text], [row], shift)


def test_a_ring_without_its_oldest_position_has_other_texts(changed):
    """Negative control: what a ring drops too early matters."""
    write = full_cache.write_ring

    def forgets(slots, entries, start, count):
        return write(slots, entries, start + 1, count)  # the ring begins one slot later

    changed.setattr(full_cache, "write_ring", forgets)
    output = keywords.generate(model(), prompts()[:2], **OPTIONS)
    with pytest.raises(AssertionError, match="instead of"):
        check(prompts()[:2], tiny.rows_of(output))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_rings(kind):
    (counted, _) = keywords.prepare(model(kind), prompts()[:1], **OPTIONS).kv_bytes
    target, capacity = model(kind), 448  # 370 + 48, and room for a round
    rings = sum(window is not None for window in target.windows[:2])  # others have no slots
    slots = rings * layer_slots(WINDOW, capacity) + (2 - rings) * capacity
    assert layer_slots(WINDOW, capacity) == 192 > WINDOW + RING_SPARE - 64
    assert counted == 2 * slots * 2 * 8 * 4  # also of one head of 16
    full = full_cache.empty(target, 1, capacity)
    assert sum(x.nbytes for x in jax.tree.leaves((full.k, full.v))) == counted


def test_options_that_windows_rule_out_are_errors():
    windowed, text = model("windowed"), [[1, 2, 3]]
    near = dict(policy="streaming", budget=64, sink_positions="in_cache")
    for drafter, message in (
        (magicjax.SelfSpeculation("snapkv", 64), "every layer of the model has a sliding window"),
        (magicjax.PageRetrieval(64), "every layer of the target that drafts has a sliding window"),
        (magicjax.SmallModel(model(), **near), "does not support a drafter with sliding windows"),
    ):
        with pytest.raises(ValueError, match=message):
            keywords.generate(windowed, text, **OPTIONS, drafter=drafter)


def test_a_tree_deeper_than_the_ring_of_a_draft_is_an_error():
    options = OPTIONS | dict(drafter=magicjax.SelfSpeculation(budget=200), tree=magicjax.chain(64))
    with pytest.raises(ValueError, match="have a ring of 64 slots in a draft cache, and it needs"):
        keywords.generate(model(), [[1, 2, 3]], **options)


# Engines

ENGINE = magicjax.EngineConfig(slots=2, capacity=WIDTH, prefill_chunk=128, prefix_bytes=10**7)
# Name: (drafter, tree).
DRAFTINGS = {
    "plain": (None, None),
    "snapkv": ("self:snapkv:64:refresh_every=3", "chain:4"),
    "near": ("small:near", "parents:-1,0,0,1,0,1,3,5,7,6"),
    "cascade": ("small:near -> self:streaming:64", "chain:2 -> chain:4"),
    "wide window": ("self:snapkv:256:window=200", "chain:4"),
}


def engine(drafting: str, chunk: int = 128, kind: str = "mixed") -> magicjax.Engine:
    drafter, tree = resolve(*DRAFTINGS[drafting], lambda name: model(kind, 0.03))
    config = dataclasses.replace(ENGINE, prefill_chunk=chunk)
    return magicjax.Engine(model(kind), drafter, tree, config)


def served(
    running: magicjax.Engine, text: np.ndarray, new: int, kind: str = "mixed"
) -> tuple[np.ndarray, int]:
    """Returns the new tokens of a request, compared, and how many of its prompt were reused."""
    result = running.submit(text, magicjax.SamplingParams(max_tokens=new)).result()
    check([text], [result.tokens], kind=kind)
    return result.tokens, result.stats.reused_tokens


@pytest.mark.parametrize(
    ("drafting", "kind"),
    quick(
        itertools.product(("plain", "snapkv", "near"), ("mixed", "shared")), ("snapkv", "shared")
    ),
)
def test_an_engine_goes_on_from_the_end_of_a_text_only(drafting, kind):
    running, text = engine(drafting, kind=kind), prompts()[1]
    found, reused = served(running, text, 30, kind)
    assert reused == 0
    turn = np.concatenate([text, found, np.arange(17)])
    assert served(running, turn, 20, kind)[1] == len(text) + 29
    # Most of this text is stored, but the rings no longer have the end of what it shares.
    shared = np.concatenate([turn[: len(text) - RING_SPARE], np.arange(20)])
    assert served(running, shared, 20, kind)[1] == 0


@pytest.mark.slow
def test_a_text_that_fits_the_rings_serves_any_of_its_beginnings():
    running, text = engine("plain", chunk=32), prompts()[1][:180]
    assert served(running, text, 12)[1] == 0  # 191 tokens in rings of 192 slots
    shared = np.concatenate([text[:40], np.arange(20)])
    assert served(running, shared, 20)[1] == 40


def test_tokens_after_a_stop_string_have_left_the_ring(monkeypatch):
    """A text that a stop string ends has later tokens in its caches, beyond the ring here."""
    running, text = engine("plain", chunk=32), prompts()[1][:180]
    deliver = Handle.deliver

    def cut(handle, tokens, logprobs, ended, now):
        deliver(handle, tokens[:10], logprobs, False, now)
        if len(tokens) >= 10:
            handle.text.finish("stop")

    with monkeypatch.context() as patched:
        patched.setattr(Handle, "deliver", cut)
        running.submit(text, magicjax.SamplingParams(max_tokens=60))
        running.run()
    (entry,) = running._prefixes._entries
    assert len(entry.tokens) < 192 < entry.cache.lengths[0]
    shared = np.concatenate([text[:40], np.arange(20)])
    assert served(running, shared, 20)[1] == 0


@pytest.mark.parametrize("drafting", quick(DRAFTINGS, "snapkv"))
def test_caches_are_those_of_a_prefill(drafting):
    """After rounds of any length, every position that can be seen is in its slot."""
    running, text = engine(drafting), prompts()[0]
    found = running.submit(text, magicjax.SamplingParams(max_tokens=60)).result().tokens
    (entry,) = running._prefixes._entries
    whole = np.concatenate([text, found])[:-1]
    np.testing.assert_array_equal(entry.tokens, whole)
    tokens = np.zeros((1, WIDTH), np.int32)
    tokens[0, : len(whole)] = whole
    capacity = entry.cache.k[1].shape[2]
    settings = types.SimpleNamespace(chunk=128, capacity=capacity, backend=None)

    @jax.jit
    def prefill(tokens, length):
        return prefill_cache(model(), tokens, length, settings, StatsSpec())[0]

    fresh = prefill(tokens, np.array([len(whole)]))
    for layer, window in enumerate(model().windows):
        position = np.arange(len(whole) if window is None else WINDOW)
        slots = (len(whole) - 1 - position) % entry.cache.k[layer].shape[2]
        for mine, expected in zip((entry.cache.k, entry.cache.v), (fresh.k, fresh.v), strict=True):
            a, b = (np.asarray(x[layer])[:, :, slots] for x in (mine, expected))
            assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()
