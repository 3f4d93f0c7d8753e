"""Stop strings, deadlines, cancellation, priorities and limits; what is invalid is an error."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import magicjax
from magicjax import EngineConfig, SamplingParams
from magicjax.decoding import program_cache
from magicjax.drafters.base import Drafter
from magicjax.engine.scheduler import QueueFullError
from magicjax.trees.proposal import Proposal
from tests.magicjax import keywords, tiny
from tests.magicjax.engine import engines
from tests.magicjax.engine.test_schedules import Long

PROMPT = "def add(first, second):"


class Clock:
    """Time as the tests set it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture(scope="module")
def target(directory):
    return magicjax.load(directory, dtype="float32")


@functools.cache
def _whole(target) -> tuple[np.ndarray, str]:
    output = keywords.generate(target, [PROMPT], max_tokens=60, eos_token_id=[])
    return output.tokens[0], output.texts[0]


@functools.cache
def texts_engine(target) -> magicjax.Engine:
    drafter = magicjax.PromptLookup()
    config = EngineConfig(
        slots=3, capacity=128, max_tokens=60, eos_token_id=[], prefill_chunk=16, rounds_per_step=3
    )
    return magicjax.Engine(target, drafter, magicjax.chain(4), config)


def test_a_text_ends_before_its_stop_string(target):
    tokens, whole = _whole(target)
    rng, engine, handles = np.random.default_rng(0), texts_engine(target), []
    for _ in range(24):
        begin, length = int(rng.integers(len(whole) - 8)), int(rng.integers(1, 9))
        stops = [whole[begin : begin + length], "never said"]
        params = SamplingParams(stop=stops, max_tokens=None)
        handles.append((engine.submit(PROMPT, params), stops[0]))
    engine.run()
    for handle, stop in handles:
        result = handle.result()
        pieces = handle.arrived()
        assert "".join(new.text for new in pieces) == result.text
        np.testing.assert_array_equal(np.concatenate([new.tokens for new in pieces]), result.tokens)
        np.testing.assert_array_equal(result.tokens, tokens[: len(result.tokens)])
        if "\N{REPLACEMENT CHARACTER}" not in stop:  # part of a character that is not complete
            assert result.finish_reason == "stop"
            assert result.text == whole[: whole.index(stop)]
    stopped = [handle for handle, _ in handles if handle.result().finish_reason == "stop"]
    assert len(stopped) > 12
    assert any(len(handle.result().tokens) < 30 for handle in stopped)


def test_a_text_ends_at_its_stop_token(target):
    """Whatever stop tokens the other requests have."""
    tokens, _ = _whole(target)
    engine, compiled = texts_engine(target), None
    for last in (7, 20):
        stops = [int(tokens[last])], [int(token) for token in tokens[last : last + 12]], ()
        every = [SamplingParams(stop_token_ids=each, max_tokens=None) for each in stops]
        handles = [engine.submit(PROMPT, params) for params in every]
        engine.run()
        for handle, params in zip(handles, every, strict=True):
            result = handle.result()
            ends = [n for n, token in enumerate(tokens) if token in params.stop_token_ids]
            count = ends[0] + 1 if ends else len(tokens)
            np.testing.assert_array_equal(result.tokens, tokens[:count])
            assert result.finish_reason == ("stop" if ends else "length")
            assert result.text == target.tokenizer.decode(tokens[: count - bool(ends)])
            assert "".join(new.text for new in handle.arrived()) == result.text
        assert compiled in (None, program_cache.totals())
        compiled = program_cache.totals()


def test_a_text_without_a_stop_string_is_that_of_generate(target):
    tokens, whole = _whole(target)
    handle = texts_engine(target).submit(PROMPT)
    pieces = list(handle)
    assert "".join(new.text for new in pieces) == handle.result().text == whole
    np.testing.assert_array_equal(handle.result().tokens, tokens)


def test_a_cancelled_request_keeps_its_tokens_and_frees_its_slot():
    engine = engines.engine(rounds_per_step=1)
    handles = [engine.submit(prompt) for prompt in engines.prompts()[:5]]
    first, waiting, last = handles[0], handles[3], handles[4]
    waiting.cancel()  # in the queue
    while not first.text.emitted:
        engine.step()
    first.cancel()  # in its slot
    first.cancel()
    tokens = first.result().tokens
    assert 0 < len(tokens) < engines.NEW and len(waiting.result().tokens) == 0
    np.testing.assert_array_equal(tokens, engines.expected(0)[: len(tokens)])
    np.testing.assert_array_equal(last.result().tokens, engines.expected(4))
    assert {h.result().finish_reason for h in (first, waiting)} == {"cancelled"}


def test_a_request_cancelled_in_prefill_frees_its_slot():
    engine = Long.engine("plain", rounds_per_step=1)
    engine.submit(engines.prompts()[0])
    engine.step()
    long = engine.submit(np.ones(300, np.int32))
    engine.step()
    assert engine._scheduler.prefilling
    long.cancel()
    np.testing.assert_array_equal(
        engine.submit(engines.prompts()[1]).result().tokens, engines.expected(1)
    )
    assert long.result().finish_reason == "cancelled" and long.result().stats.ttft_s is None


def test_a_deadline_ends_requests_wherever_they_are(monkeypatch):
    clock = Clock(monkeypatch)
    engine = engines.engine(rounds_per_step=1)
    running, _, _, waiting, patient = (
        engine.submit(prompt, deadline_s=seconds)
        for prompt, seconds in zip(engines.prompts(), (5, None, None, 4, None), strict=False)
    )
    while not running.text.emitted:
        engine.step()
    clock.now = 5.0
    engine.step()
    assert running.finished and waiting.finished
    assert running.result().finish_reason == waiting.result().finish_reason == "deadline"
    assert len(running.result().tokens) and not len(waiting.result().tokens)
    assert waiting.result().stats.queue_s == 5
    np.testing.assert_array_equal(patient.result().tokens, engines.expected(4))


def test_statistics_of_requests_and_of_the_engine():
    engine = engines.engine()
    engine.warm_up()
    assert engine.stats.steps == 0 and not any(engine.stats.finished.values())
    handles = [engine.submit(prompt) for prompt in engines.prompts()[:4]]
    assert (engine.stats.waiting, engine.stats.running) == (4, 0)
    engine.run()
    stats = engine.stats
    assert stats.new_tokens == 4 * engines.NEW and stats.finished["length"] == 4
    assert [mode.depth for mode in stats.rounds_by_arm] == [4]  # its tree only
    assert stats.loop_s > 0 and stats.prefill_s > 0 and stats.host_s > 0
    seconds = stats.loop_s + stats.prefill_s + stats.host_s
    assert stats.tokens_per_s == pytest.approx(stats.new_tokens / seconds)
    for handle, prompt in zip(handles, engines.prompts(), strict=False):
        counts = handle.result().stats
        assert (counts.prompt_tokens, counts.new_tokens) == (len(prompt), engines.NEW)
        assert counts.prefilled_tokens == len(prompt) and counts.reused_tokens == 0
        assert counts.tau == pytest.approx((engines.NEW - 1) / counts.rounds)
        assert 0 <= counts.queue_s <= counts.ttft_s <= counts.total_s and counts.tpot_s > 0
        assert counts.itl_s and counts.ttft_s + sum(counts.itl_s) <= counts.total_s + 1e-6
    assert stats.ttft_s.p50 == np.median([handle.result().stats.ttft_s for handle in handles])
    assert stats.itl_s.p50 <= stats.itl_s.p99


@struct.dataclass
class Counting(Drafter):
    """Shares one number between the rows."""

    def check(self, target, tree, depth, context):
        pass

    def draw_methods(self, tree):
        return {"top"}

    def prefill(self, target, tokens, cache, stats, settings, previous=None):
        return {"rounds": jnp.zeros((), jnp.int32)}

    def propose(self, target, state, root, cache, sampling, settings):
        tokens = jnp.repeat(root[:, None], settings.tree.num_nodes, axis=1)
        return Proposal(tokens, settings.tree.array), None

    def commit(self, target, state, draft, proposal, outcome):
        return {"rounds": state["rounds"] + 1}


INVALID_CONFIGS = {
    "slots": (dict(slots=0), ValueError, "slots=0: it must be an integer from 1 to 65536"),
    "a text as slots": (dict(slots="2"), TypeError, "slots='2': it must be an integer"),
    "no capacity": (
        dict(capacity=1),
        ValueError,
        "capacity=1: it must be an integer of at least 2",
    ),
    "grammars": (dict(grammars=1), TypeError, "grammars=1: it must be true or false"),
    "logprobs": (dict(logprobs=21), ValueError, "logprobs=21: it must be an integer from 0 to 20"),
    "vLLM's capacity": (dict(max_model_len=64), TypeError, r"EngineConfig: use capacity=\.\.\.$"),
    "a number as a flag": (dict(sampling=1), TypeError, "sampling=1: it must be true or false"),
}


@pytest.mark.parametrize("what", INVALID_CONFIGS)
def test_invalid_configurations_are_errors(what):
    options, error, message = INVALID_CONFIGS[what]
    with pytest.raises(error, match=message):
        EngineConfig(**options)


INVALID_ENGINES = {
    "capacity": (dict(capacity=513), ValueError, "capacity=513: .* the 512 positions"),
    "bytes": (dict(prefix_bytes=5), ValueError, "prefix_bytes=5: one prefix has .* bytes"),
    "verifier": (dict(verifier="mss"), ValueError, "requires sampling"),
    "auto": (dict(drafter="auto"), ValueError, "drafter='auto' is not supported here"),
    "tree": (dict(drafter=None), ValueError, "tree has no effect without a drafter"),
    "shared state": (
        dict(drafter=Counting()),
        ValueError,
        r"the state\['rounds'\] has shapes \(\) .* define the drafter's `insert`",
    ),
    "sums": (
        dict(drafter=magicjax.SelfSpeculation("h2o", 64), prefix_bytes=10**9),
        ValueError,
        "prefix_bytes=1000000000: the drafter's policy reads the attention of all prompt tokens",
    ),
}


@pytest.mark.parametrize("what", INVALID_ENGINES)
def test_invalid_settings_are_errors_before_compilation(what):
    options, error, message = INVALID_ENGINES[what]
    options = dict(options)
    drafter = options.pop("drafter", tiny.drafter("self"))
    before = program_cache.totals()
    with pytest.raises(error, match=message):
        magicjax.Engine(tiny.model(), drafter, tiny.TREES["chain4"], EngineConfig(**options))
    assert program_cache.totals() == before


INVALID_REQUESTS = {
    "no tokens": ([], {}, "prompt 0 is empty"),
    "a token": ([tiny.VOCAB], {}, "outside the target's vocabulary"),
    "a text": ("text", {}, "has no tokenizer"),
    "a long prompt": ([1] * 64, {}, "the prompt has 64 tokens, and the capacity of 64 leaves no"),
    "a long text": (
        [1] * 60,
        dict(params=SamplingParams(max_tokens=5)),
        "use at most 4 new tokens",
    ),
    "a limit": ([1], dict(params=SamplingParams(max_tokens=25)), "max_tokens=25: .* at most 24"),
    "a deadline": ([1], dict(deadline_s=0), "deadline_s=0: it must be a number above 0"),
    "no tokenizer": (
        [1],
        dict(params=SamplingParams(stop="a", max_tokens=4)),
        "stop='a': the target 'target' has no tokenizer",
    ),
    "a priority": ([1], dict(priority=float("nan")), "priority=nan: its magnitude must be"),
    "a text as priority": ([1], dict(priority="high"), "priority='high': it must be a number"),
    "a text as deadline": ([1], dict(deadline_s="1"), "deadline_s='1': it must be a number"),
    "a list of texts": (["a"], {}, "prompt 0 is a list of texts: pass each text as one prompt"),
    "a number as prompt": (5, {}, r"prompt 0 has shape \(\) .* a list of token ids$"),
}


def test_an_invalid_request_is_an_error_at_submit_and_disturbs_no_other():
    engine = engines.engine()
    other = engine.submit(engines.prompts()[0])
    engine.step()
    for prompt, options, message in INVALID_REQUESTS.values():
        with pytest.raises((ValueError, TypeError), match=message):
            engine.submit(prompt, **options)
    with pytest.raises(TypeError, match="handle=None: pass the handle that submit returned"):
        engine.cancel(None)
    np.testing.assert_array_equal(other.result().tokens, engines.expected(0))


def test_a_full_queue_is_an_error_at_submit():
    engine = engines.engine(queue_limit=2)
    handles = [engine.submit([1, 2, 3]) for _ in range(2)]
    with pytest.raises(QueueFullError, match="the queue has 2 requests, .* exceeds queue_limit=2"):
        engine.submit([1, 2, 3])
    engine.step()
    handles.append(engine.submit([1, 2, 3]))
    engine.run()
    assert all(handle.result().finish_reason == "length" for handle in handles)


def test_warm_up_with_unfinished_requests_is_an_error():
    engine = engines.engine()
    engine.submit([1])
    with pytest.raises(RuntimeError, match="warm_up with unfinished requests"):
        engine.warm_up()
