"""Models with sliding windows, over texts that wrap the rings of their caches several times."""

import functools
import types

import jax
import numpy as np
import pytest

import magicjax
import models
from magicjax.engine.handle import Handle
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.prefill import prefill_cache
from magicjax.model import RING_SPARE, layer_slots
from magicjax.settings import StatsSpec
from tests.magicjax import keywords, tiny
from tests.magicjax.recomputation import forward_of, rerun
from tests.quick import quick

NEW, WIDTH, WINDOW = 48, 512, 20
LENGTHS = (370, 230, 64, 3)  # the first text passes 384, where its rings of 192 slots wrap
OPTIONS = dict(max_tokens=NEW, eos_token_id=[])


@functools.cache
def model(kind: str = "mixed", noise: float = 0.0) -> magicjax.Model:
    """Returns a model: `mixed` has layers with and without windows, `windowed` no others."""
    full = (1,) if kind == "mixed" else ()
    config = tiny.config(
        max_positions=1024,
        sliding_window=WINDOW,
        full_layers=full,
        window_positions=models.Rope(theta=300.0),
        attention_sinks=kind == "mixed",
    )
    params = tiny.loud(tiny.drawn(config, 1), np.random.default_rng(7), noise)
    return magicjax.Model(models.build(config), tiny.put(params))


@functools.cache
def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, tiny.VOCAB, n).astype(np.int32) for n in LENGTHS]


_expected: dict[str, list[np.ndarray]] = {}


def expected(kind: str, guess: list[np.ndarray] | None = None) -> list[np.ndarray]:
    """Returns the texts by recomputation, which a right guess saves most of."""
    if kind not in _expected:
        _expected[kind] = rerun(model(kind), prompts(), NEW, WIDTH, guess=guess)
    return _expected[kind]


def draftings(kind: str) -> dict[str, dict]:
    """Returns options of `generate` for each kind of drafter and tree."""
    near = magicjax.SmallModel(model(kind, 0.03))
    self = magicjax.SelfSpeculation(budget=64)
    found = {
        "plain": {},
        "streaming": dict(drafter=self, tree=tiny.TREES["2,2,1"]),
        "int8": dict(drafter=magicjax.SelfSpeculation(budget=64, kv_dtype="int8")),
        "near": dict(drafter=near, tree=tiny.TREES["irregular"]),
        "prompt-lookup": dict(drafter=tiny.drafter("prompt-lookup"), tree=tiny.TREES["chain4"]),
        "dynamic": dict(drafter=self, tree=tiny.SPECIAL["dynamic"]),
        "cascade": dict(drafter=magicjax.Cascade(near, self, tiny.TREES["chain2"])),
        "ensemble": dict(drafter=magicjax.Ensemble([near, self])),
        "quantized copy": dict(drafter=magicjax.FullCacheSpeculation("int8")),
    }
    if kind == "mixed":
        sparse = dict(policy="streaming", budget=64)
        found |= {
            "snapkv": dict(drafter=magicjax.SelfSpeculation("snapkv", 64, refresh_every=3)),
            "h2o": dict(drafter=magicjax.SelfSpeculation("h2o", 64), tree=tiny.TREES["2,2,1"]),
            "pyramid": dict(drafter=magicjax.SelfSpeculation("pyramidkv", 64)),
            "quest": dict(drafter=magicjax.PageRetrieval(64, page_size=4)),
            # More queries than a ring has spare slots: no token of a prompt may be prefilled twice.
            "wide window": dict(
                drafter=magicjax.SelfSpeculation(magicjax.policies.SnapKV(window=200), 256)
            ),
            "near sparse": dict(drafter=magicjax.SmallModel(model(kind, 0.03), **sparse)),
            "layers": dict(drafter=magicjax.SelfSpeculation(budget=64, layers="1")),
            "eagle": dict(drafter=magicjax.Eagle(tiny.head(model(kind)))),
        }
    return found


ALL = [(kind, name) for kind in ("mixed", "windowed") for name in draftings(kind)]
QUICK = [("mixed", "near sparse")]  # engines run "snapkv" below


@pytest.mark.parametrize(("kind", "drafting"), quick(ALL, *QUICK))
def test_texts_are_those_of_full_recomputation(kind, drafting):
    output = keywords.generate(model(kind), prompts(), **OPTIONS, **draftings(kind)[drafting])
    found = tiny.rows_of(output)
    for row, text in zip(found, expected(kind, found), strict=True):
        np.testing.assert_array_equal(row, text)
    if drafting in ("quantized copy", "streaming"):
        assert output.stats.acceptance_rate > 0.3  # a wrong window of the draft would lower it


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_window_off_by_one_has_other_texts(shift):
    """Negative control."""
    texts = np.zeros((4, WIDTH), np.int32)
    for row, prompt, text in zip(texts, prompts(), expected("mixed"), strict=True):
        row[: len(prompt) + NEW] = np.concatenate([prompt, text])
    for of_windows in (0, shift):
        chosen = np.asarray(forward_of(model().module, of_windows)(model().params, texts))
        for row, own, n in zip(texts[:3], chosen, LENGTHS):  # of more tokens than the window
            equal = (own[n - 1 : n + NEW - 1] == row[n : n + NEW]).all()
            assert equal == (of_windows == 0)


def test_a_ring_without_its_oldest_position_has_other_texts(changed):
    """Negative control: what a ring drops too early matters."""
    write = full_cache.write_ring

    def forgets(slots, entries, start, count):
        return write(slots, entries, start + 1, count)  # the ring begins one slot later

    changed.setattr(full_cache, "write_ring", forgets)
    output = keywords.generate(model(), prompts()[:2], **OPTIONS)
    rows = zip(tiny.rows_of(output), expected("mixed"))
    assert any((row != text).any() for row, text in rows)


def test_drafts_of_a_window_within_the_budget_are_the_targets_own():
    """Every layer is as in the target, so all drafts are accepted."""
    self = magicjax.SelfSpeculation(budget=64)
    output = keywords.generate(model("windowed"), prompts(), **OPTIONS, drafter=self)
    found = tiny.rows_of(output)
    for row, text in zip(found, expected("windowed", found), strict=True):
        np.testing.assert_array_equal(row, text)
    assert output.stats.acceptance_rate > 0.999


@pytest.mark.parametrize("kind", ["mixed", "windowed"])
def test_bytes_of_rings(kind):
    (counted, _) = keywords.prepare(model(kind), prompts()[:1], **OPTIONS).kv_bytes
    target, capacity = model(kind), 448  # 370 + 48, and room for a round
    rings = sum(window is not None for window in target.windows)
    slots = rings * layer_slots(WINDOW, capacity) + (2 - rings) * capacity
    assert layer_slots(WINDOW, capacity) == 192 > WINDOW + RING_SPARE - 64
    assert counted == 2 * slots * 2 * 8 * 4
    full = full_cache.empty(target, 1, capacity)
    assert sum(x.nbytes for x in (*full.k, *full.v)) == counted


@pytest.mark.slow
def test_offloaded_and_resident_texts_are_equal():
    output = keywords.generate(
        magicjax.offload(model()), prompts(), **OPTIONS, **draftings("mixed")["snapkv"]
    )
    for row, text in zip(tiny.rows_of(output), expected("mixed"), strict=True):
        np.testing.assert_array_equal(row, text)


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


def test_page_retrieval_by_an_offloaded_model_is_an_error():
    with pytest.raises(ValueError, match="page retrieval by an offloaded target with sliding"):
        drafter = magicjax.PageRetrieval(64, page_size=4)
        keywords.generate(magicjax.offload(model()), [[1, 2]], **OPTIONS, drafter=drafter)


def test_a_tree_deeper_than_the_ring_of_a_draft_is_an_error():
    options = OPTIONS | dict(drafter=magicjax.SelfSpeculation(budget=200), tree=magicjax.chain(64))
    with pytest.raises(ValueError, match="have a ring of 64 slots in a draft cache, and it needs"):
        keywords.generate(model(), [[1, 2, 3]], **options)


# Engines


def engine(drafting: str, chunk: int = 128) -> magicjax.Engine:
    config = magicjax.EngineConfig(slots=2, capacity=WIDTH, prefill_chunk=chunk, prefix_bytes=10**7)
    return magicjax.Engine(model(), config=config, **draftings("mixed")[drafting])


def checked(running: magicjax.Engine, texts: list[np.ndarray], new: int) -> list[int]:
    """Submits prompts at once, compares their texts, and returns the tokens that were reused."""
    handles = [running.submit(x, magicjax.SamplingParams(max_tokens=new)) for x in texts]
    running.run()
    found = [handle.result().tokens for handle in handles]
    for row, text in zip(found, rerun(model(), texts, new, WIDTH, guess=found), strict=True):
        np.testing.assert_array_equal(row, text)
    return [handle.result().stats.reused_tokens for handle in handles]


@pytest.mark.parametrize("drafting", quick(["plain", "snapkv", "near"], "snapkv"))
def test_requests_of_an_engine_have_their_own_texts(drafting):
    assert checked(engine(drafting), prompts(), 40) == [0] * 4


@pytest.mark.parametrize("drafting", quick(["plain", "snapkv", "near"], "snapkv"))
def test_an_engine_goes_on_from_the_end_of_a_text_only(drafting):
    running, text = engine(drafting), prompts()[1]
    assert checked(running, [text], 30) == [0]
    turn = np.concatenate([text, expected("mixed")[1][:30], np.arange(17)])
    assert checked(running, [turn], 20) == [len(text) + 29]
    # Most of this text is stored, but the rings no longer have the end of what it shares.
    shared = np.concatenate([turn[: len(text) - RING_SPARE], np.arange(20)])
    assert checked(running, [shared], 20) == [0]


def test_a_text_that_fits_the_rings_serves_any_of_its_beginnings():
    running, text = engine("plain", chunk=32), prompts()[1][:180]
    assert checked(running, [text], 12) == [0]  # 191 tokens in rings of 192 slots
    shared = np.concatenate([text[:40], np.arange(20)])
    assert checked(running, [shared], 20) == [40]


def test_tokens_after_a_stop_string_have_left_the_ring(monkeypatch):
    """A text that a stop string ends has later tokens in its caches, beyond the ring here."""
    running, text = engine("plain", chunk=32), prompts()[1][:180]
    deliver = Handle.deliver

    def cut(handle, tokens, logprobs, now):
        left = 10 - len(handle._tokens)
        deliver(handle, tokens[:left], logprobs, now)
        return len(tokens) >= left

    with monkeypatch.context() as patched:
        patched.setattr(Handle, "deliver", cut)
        running.submit(text, magicjax.SamplingParams(max_tokens=60))
        running.run()
    (entry,) = running._prefixes._entries
    assert len(entry.tokens) < 192 < entry.cache.lengths[0]
    shared = np.concatenate([text[:40], np.arange(20)])
    assert checked(running, [shared], 20) == [0]


CACHES = ["plain", "snapkv", "near", "cascade", "wide window"]


@pytest.mark.parametrize("drafting", quick(CACHES, "snapkv"))
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
