"""A request's log-probabilities are those of a plain pass, with reused prefixes too."""

import numpy as np
import pytest

import magicjax
from magicjax import SamplingParams
from magicjax.decoding import program_cache
from tests.magicjax import tiny
from tests.magicjax.decoding.test_logprobs import check, check_prompt
from tests.magicjax.engine import engines
from tests.magicjax.engine.test_requests import PROMPT
from tests.magicjax.engine.test_speculation import forced
from tests.quick import quick

NAMES = ("plain", "streaming", "small", "ensemble", "dynamic")
CASES = [(name, sampled) for name in NAMES for sampled in (False, True)]


@pytest.mark.parametrize(("name", "sampled"), quick(CASES, ("streaming", False)))
def test_log_probabilities_are_those_of_a_plain_pass(name, sampled):
    engine = engines.engine(name, logprobs=4, sampling=sampled)
    engine.warm_up()
    compiled, handles = program_cache.totals(), []
    document = np.arange(40, dtype=np.int32) % 7
    asked = [*engines.prompts()[:4], document, np.append(document, [3, 1]), np.append(document, 9)]
    for number, prompt in enumerate(asked):
        sampling = dict(temperature=0.7, seed=number) if sampled else {}
        count = (4, 0, None, 2)[number % 4]
        params = SamplingParams(max_tokens=12, logprobs=count, prompt_logprobs=count, **sampling)
        handles.append((prompt, count, engine.submit(prompt, params)))
    engine.run()
    assert program_cache.totals() == compiled
    assert engine.stats.prefix_hits
    for prompt, count, handle in handles:
        result, pieces = handle.result(), handle.arrived()
        if count is None:
            assert result.logprobs is result.prompt_logprobs is pieces[0].logprobs is None
            continue
        check_prompt(tiny.model(), prompt, result.prompt_logprobs, count)
        check(tiny.model(), prompt, result.tokens, result.logprobs, count)
        arrived = np.concatenate([piece.logprobs.chosen for piece in pieces])
        np.testing.assert_array_equal(arrived, result.logprobs.chosen)


@pytest.mark.slow
def test_depths_that_change_between_calls_give_the_same():
    options = dict(sampling=True, slots=2, rounds_per_step=1, logprobs=2)
    engine, prompt = forced("prompt lookup", **options), engines.prompts()[1]
    compiled = program_cache.totals()
    params = SamplingParams(temperature=1, seed=1, max_tokens=16, logprobs=2)
    handles = engine.submit_samples(prompt, 3, params)
    engine.run()
    assert program_cache.totals() == compiled and len(engine.stats.rounds_by_arm) > 1
    for handle in handles:
        result = handle.result()
        check(tiny.model(), prompt, result.tokens, result.logprobs, 2)


@pytest.mark.slow
def test_a_stop_string_ends_them_with_the_tokens(directory):
    target = magicjax.load(directory, dtype="float32")
    config = magicjax.EngineConfig(
        slots=1, capacity=128, max_tokens=30, eos_token_id=[], logprobs=1
    )
    engine = magicjax.Engine(target, magicjax.PromptLookup(), magicjax.chain(4), config)
    whole = engine.submit(PROMPT, SamplingParams(logprobs=1, max_tokens=None)).result()
    params = SamplingParams(logprobs=1, stop=whole.text[4:6], max_tokens=None)
    cut = engine.submit(PROMPT, params).result()
    assert cut.finish_reason == "stop" and len(cut.tokens) < len(whole.tokens)
    assert cut.logprobs.top.shape == (len(cut.tokens), 1)
    np.testing.assert_allclose(
        cut.logprobs.chosen, whole.logprobs.chosen[: len(cut.tokens)], atol=1e-5
    )


@pytest.mark.parametrize("name", quick(("plain", "streaming", "suffix"), "streaming"))
def test_a_prompt_without_new_tokens_may_fill_the_capacity(name):
    engine, rng = engines.engine(name, logprobs=4), np.random.default_rng(2)
    longest = rng.integers(0, tiny.VOCAB, engines.CAPACITY).astype(np.int32)
    alone = SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=4)
    other = engine.submit(engines.prompts()[0])
    for prompt in (longest, longest[:7], longest):  # the last one finds a stored prefix
        result = engine.submit(prompt, alone).result()
        check_prompt(tiny.model(), prompt, result.prompt_logprobs, 4)
        assert len(result.tokens) == len(result.logprobs.chosen) == result.stats.new_tokens == 0
        assert result.finish_reason == "length" and result.stats.ttft_s is None
    np.testing.assert_array_equal(other.result().tokens, engines.expected(0))
    assert engine.stats.prefix_hits
    with pytest.raises(ValueError, match=f"has {len(longest) + 1} tokens, and the capacity of "):
        engine.submit(np.append(longest, 1), alone)


def test_a_request_without_tokens_has_no_log_probabilities():
    handle = engines.engine(logprobs=2).submit([1, 2], SamplingParams(logprobs=2, max_tokens=4))
    handle.cancel()
    assert handle.result().logprobs.top.shape == (0, 2)


@pytest.mark.parametrize(
    ("limit", "count", "message"),
    [
        (None, 0, "logprobs=0: it is not supported; omit it, or create .* with logprobs=0"),
        (2, 3, "logprobs=3: it must be at most 2; reduce it, or create .* with logprobs=3"),
    ],
)
def test_more_than_those_of_the_engine_are_an_error_at_submit(limit, count, message):
    engine = engines.engine(logprobs=limit)
    with pytest.raises(ValueError, match=message):
        engine.submit([1, 2], SamplingParams(logprobs=count))
    assert not engine.unfinished
