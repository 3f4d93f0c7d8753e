"""Engines of a target with states: texts are those of plain decoding, prefixes of kept states."""

import functools

import jax
import numpy as np
import pytest

import magicjax
from magicjax import SamplingParams
from magicjax.decoding import program_cache
from magicjax.engine import prefix_store
from magicjax.engine.handle import Handle
from tests.fuzz import checks
from tests.magicjax import recomputation, tiny
from tests.magicjax.engine import engines
from tests.magicjax.kv_cache import test_loop_caches
from tests.quick import quick

WIDTH, WIDE, NEW = 128, 336, 12
DRAFTERS = {
    "plain": (None, None),
    "hybrid near": (tiny.drafter("hybrid near"), tiny.TREES["2,2,1"]),
    "snapkv": (magicjax.SelfSpeculation("snapkv", 40, refresh_every=2), tiny.TREES["chain4"]),
    "eagle": (magicjax.Eagle(tiny.head(tiny.model("hybrid"))), tiny.TREES["chain4"]),
    "cascade": (
        magicjax.Cascade(tiny.drafter("near"), tiny.drafter("self"), tiny.TREES["chain2"]),
        tiny.TREES["chain4"],
    ),
    "ensemble": (
        magicjax.Ensemble([tiny.drafter("near"), magicjax.PromptLookup()]),
        tiny.TREES["chain2"],
    ),
}


def engine(name: str, **options) -> magicjax.Engine:
    drafter, tree = DRAFTERS[name]
    config = dict(slots=2, capacity=WIDTH, eos_token_id=tiny.NEVER, prefix_bytes=10**7)
    config = magicjax.EngineConfig(**config | dict(prefill_chunk=64, max_tokens=48) | options)
    return magicjax.Engine(tiny.model("hybrid"), drafter, tree, config)


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, length).astype(np.int32)


def check(prompt, result) -> None:
    width = WIDTH if len(prompt) + NEW <= WIDTH else WIDE
    logits = functools.partial(recomputation.logits, width=width)
    checks.greedy(tiny.model("hybrid"), prompt, result.tokens, logits)


def served(running: magicjax.Engine, prompt, checked: bool = False) -> tuple[np.ndarray, int]:
    """Returns the new tokens of a request, compared, and how many of its prompt were reused.

    With `checked`, all caches are compared with those of a fresh prefill.
    """
    handle = running.submit(prompt, SamplingParams(max_tokens=NEW))
    while checked and not handle.finished:
        running.step()
        state, texts = engines.rows_of(running)
        if texts:
            drafter = running._setup.row.drafter
            engines.check_state(state, texts, tiny.model("hybrid"), drafter)
    check(prompt, handle.result())
    return handle.result().tokens, handle.result().stats.reused_tokens


@pytest.mark.parametrize("name", quick(DRAFTERS, "plain"))
@pytest.mark.slow
def test_requests_that_come_and_go_have_their_own_texts(name):
    running = engine(name)
    asked = [text(n, seed=n) for n in (90, 5, 40, 66, 17)]
    handles = []
    for number, prompt in enumerate(asked):  # rows of several lengths, some prefilled in pieces
        handles.append(running.submit(prompt, SamplingParams(max_tokens=6 + 3 * number)))
        running.step()
    running.run()
    for prompt, handle in zip(asked, handles, strict=True):
        check(prompt, handle.result())


@pytest.mark.parametrize("name", quick(["plain", "hybrid near"], "hybrid near"))
@pytest.mark.slow
def test_a_text_goes_on_from_its_end_and_from_kept_states_only(name):
    running, prompt = engine(name), text(70)
    found, reused = served(running, prompt)
    assert reused == 0
    turn = np.concatenate([prompt, found, text(9, seed=1)])
    assert served(running, turn)[1] == len(prompt) + NEW - 1  # all but the pending token
    longer = np.concatenate([prompt, text(5, seed=2)])
    assert served(running, longer)[1] == len(prompt)  # of the entry that the turn's replaced
    assert served(running, longer)[1] == len(prompt)  # its own last token is in the state
    assert served(running, prompt)[1] == 64  # likewise: after the last whole step of prefill
    assert served(running, prompt[:67])[1] == 64
    assert served(running, prompt[:64])[1] == 0
    other = np.concatenate([prompt[:63], text(9, seed=3)])
    assert served(running, other)[1] == 0


@pytest.mark.parametrize("name", quick(DRAFTERS, "eagle"))
def test_questions_about_a_document_and_samples_of_a_prompt_reuse_it(name, monkeypatch):
    monkeypatch.setattr(test_loop_caches, "WIDTH", WIDE)
    running = engine(name, capacity=WIDE, prefill_chunk=128, max_tokens=16)
    running.warm_up()
    compiled, overlap = program_cache.totals(), int(name == "eagle")
    document = text(210)
    asked = [np.concatenate([document, text(90 + n, seed=n)]) for n in range(3)]
    # The pieces of the first prompt end at 128 and 256. The second one leaves it at 210, before
    # which its steps of prefill end at 192.
    for number, (prompt, states) in enumerate(zip(asked, (0, 128, 192), strict=True)):
        found, reused = served(running, prompt, checked=number == 2)
        assert reused == states + (overlap if states else 0)
    samples = running.submit_samples(asked[2], 2, SamplingParams(max_tokens=NEW))
    running.run()
    for handle in samples:
        check(asked[2], handle.result())
        # Of 302 tokens, steps from 192 on end at 256; SnapKV reads the queries of the last 32.
        assert handle.result().stats.reused_tokens == 256 + overlap
    assert program_cache.totals() == compiled
    assert running.stats.reused_tokens == 128 + 192 + 2 * 256 + 4 * overlap
    # A learned head reads each token with the hidden state before it, also the first of an answer;
    # SnapKV reads more tokens than the new ones.
    turn, asked_length = np.concatenate([asked[2], found, text(5, seed=8)]), len(asked[2])
    known = {"eagle": asked_length + 1, "snapkv": 256}.get(name, asked_length + NEW - 1)
    assert served(running, turn, checked=True)[1] == known


def test_states_of_another_length_have_another_text(monkeypatch):
    """Negative control."""
    running, document = engine("plain"), text(70)
    served(running, document)
    monkeypatch.setattr(prefix_store.Prefix, "from_state", lambda prefix, length: prefix.row)
    with pytest.raises(AssertionError):
        served(running, document[:65])


def test_kept_states_count_as_bytes_of_their_entries():
    running = engine("plain", prefix_bytes=10**9 // 2, capacity=WIDE)
    row = sum(running._setup.row.kv_bytes)
    size = row + 4 * tiny.model("hybrid").state_bytes
    assert running._prefixes.max_entries == 10**9 // 2 // size
    with pytest.raises(ValueError, match=f"one prefix has {size} bytes, those of a slot and 4 sta"):
        engine("plain", prefix_bytes=size - 1, capacity=WIDE)
    served(running, text(300))
    (entry,) = running._prefixes._entries
    assert list(entry.snapshots) == [128, 192, 256, 300]  # 64 is the oldest
    arrays = jax.tree.leaves((entry.cache.k, entry.cache.v, entry.cache.states, entry.snapshots))
    assert sum(x.nbytes for x in arrays) <= size == running.stats.prefix_bytes


def test_a_text_that_a_stop_string_ends_is_not_stored(monkeypatch):
    """Its state has tokens after the end, from which no text goes on: the prompt's stays."""
    running, prompt = engine("plain"), text(66)
    deliver = Handle.deliver

    def cut(handle, tokens, logprobs, ended, now):
        deliver(handle, tokens[:4], logprobs, False, now)
        if len(tokens) >= 4:
            handle.text.finish("stop")

    with monkeypatch.context() as patched:
        patched.setattr(Handle, "deliver", cut)
        handle = running.submit(prompt, SamplingParams(max_tokens=30))
        running.run()
    (entry,) = running._prefixes._entries
    assert len(entry.tokens) == entry.cache.lengths[0] == len(prompt)
    turn = np.concatenate([prompt, handle.result().tokens, text(9, seed=1)])
    assert served(running, turn)[1] == len(prompt)


def test_prefixes_with_states_return_from_host_memory():
    running = engine("plain", host_prefix_bytes=10**7)
    running._prefixes.max_entries = 1
    prompts = [text(70, seed) for seed in range(2)]
    whole = [np.concatenate([prompt, served(running, prompt)[0]]) for prompt in prompts]
    assert served(running, prompts[0])[1] == 64  # the other one goes to host memory
    assert served(running, np.concatenate([whole[1], text(4)]))[1] == len(whole[1]) - 1
    assert running.stats.prefix_host_hits == 2
    (longest,) = (entry for entry in running._prefixes._entries if not entry.on_host)
    running._prefixes._entries[:] = [prefix_store.to_host(longest)]
    longer = np.concatenate([longest.tokens, text(9, seed=6)])
    assert served(running, longer)[1] == len(longest.tokens)
    shorter = len(longest.tokens) - NEW + 1  # the prompt of the entry that was replaced
    again = np.concatenate([longest.tokens[:shorter], text(9, seed=7)])
    assert served(running, again)[1] == shorter
