"""Engines of a target with states: texts are those of plain decoding, prefixes are used whole."""

import functools

import numpy as np
import pytest

import magicjax
from magicjax import SamplingParams
from magicjax.engine.handle import Handle
from tests.fuzz import checks
from tests.magicjax import recomputation, tiny
from tests.quick import quick

WIDTH, NEW = 128, 12
logits = functools.partial(recomputation.logits, width=WIDTH)
DRAFTERS = {
    "plain": (None, None),
    "hybrid near": (tiny.drafter("hybrid near"), tiny.TREES["2,2,1"]),
    "snapkv": (magicjax.SelfSpeculation("snapkv", 40, refresh_every=2), tiny.TREES["chain4"]),
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
    checks.greedy(tiny.model("hybrid"), prompt, result.tokens, logits)


def served(running: magicjax.Engine, prompt, new: int = NEW) -> tuple[np.ndarray, int]:
    """Returns the new tokens of a request, compared, and how many of its prompt were reused."""
    result = running.submit(prompt, SamplingParams(max_tokens=new)).result()
    check(prompt, result)
    return result.tokens, result.stats.reused_tokens


@pytest.mark.parametrize("name", quick(DRAFTERS, "plain"))
def test_requests_that_come_and_go_have_their_own_texts(name):
    running = engine(name, **dict(prefix_bytes=0) if name == "snapkv" else {})
    asked = [text(n, seed=n) for n in (90, 5, 40, 66, 17)]
    handles = []
    for number, prompt in enumerate(asked):  # rows of several lengths, some prefilled in pieces
        handles.append(running.submit(prompt, SamplingParams(max_tokens=6 + 3 * number)))
        running.step()
    running.run()
    for prompt, handle in zip(asked, handles, strict=True):
        check(prompt, handle.result())


@pytest.mark.parametrize("name", quick(["plain", "hybrid near"], "hybrid near"))
def test_a_text_goes_on_from_the_end_of_another_only(name):
    running, prompt = engine(name), text(66)
    found, reused = served(running, prompt)
    assert reused == 0
    turn = np.concatenate([prompt, found, text(9, seed=1)])
    assert served(running, turn)[1] == len(prompt) + NEW - 1  # all but the pending token
    longer = np.concatenate([prompt, text(5, seed=2)])
    # The prompt's own entry is covered by that of the turn, which has more tokens.
    assert served(running, longer)[1] == 0
    assert served(running, longer)[1] == 0  # not even a text itself: its last token is in the state
    other = np.concatenate([longer, text(3, seed=3)])
    assert served(running, other)[1] == 0


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
    prompts = [text(66, seed) for seed in range(2)]
    texts = [np.concatenate([prompt, served(running, prompt)[0]]) for prompt in prompts]
    for whole in texts:
        turn = np.concatenate([whole, text(4, seed=5)])
        assert served(running, turn)[1] == len(whole) - 1
    assert running.stats.prefix_host_hits


@pytest.mark.parametrize("kind", ["eagle", "snapkv"])
def test_prefixes_for_a_drafter_that_reads_their_last_tokens_are_an_error(kind):
    drafter = magicjax.SelfSpeculation("snapkv", 64)
    if kind == "eagle":
        drafter = magicjax.Eagle(tiny.head(tiny.model("hybrid")))
    config = magicjax.EngineConfig(slots=2, capacity=WIDTH, prefix_bytes=10**7)
    with pytest.raises(ValueError, match="prefix_bytes=10000000: the drafter reads hidden states"):
        magicjax.Engine(tiny.model("hybrid"), drafter, config=config)
