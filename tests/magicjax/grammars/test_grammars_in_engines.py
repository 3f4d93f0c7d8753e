"""Requests of an engine have grammars of their own."""

import functools

import llguidance
import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.grammars import matcher
from tests.magicjax import tiny
from tests.magicjax.engine import engines
from tests.magicjax.grammars import spelled
from tests.magicjax.grammars.test_constrained_texts import ENDING, PATTERN
from tests.quick import quick

LIMIT = 14
PATTERNS = (PATTERN, ENDING, None, "[a-m]{6}", "(xyz|n[o-z]){2,4}", "a*b*c*d*e*f*g*")


@functools.cache
def expected(index: int, pattern: str | None) -> np.ndarray:
    if pattern is None:
        return engines.expected(index)[:LIMIT]
    return spelled.greedy(pattern, engines.prompts()[index], LIMIT)


def make(name: str = "small", mesh=None, **options) -> magicjax.Engine:
    drafter, tree = engines.DRAFTERS[name]
    defaults = dict(slots=3, capacity=64, max_tokens=LIMIT, prefill_chunk=16)
    defaults |= dict(rounds_per_step=2, grammars=True)
    config = magicjax.EngineConfig(**defaults | options)
    return magicjax.Engine(spelled.target(), drafter, tree, config, mesh=mesh)


def submit(engine, index: int, pattern: str | None, **options):
    grammar = None if pattern is None else magicjax.Grammar.regex(pattern)
    params = magicjax.SamplingParams(grammar=grammar, max_tokens=None, **options)
    return engine.submit(engines.prompts()[index].tolist(), params)


@pytest.mark.parametrize("name", quick(["plain", "small", "dynamic", "snapkv"], "plain"))
@pytest.mark.slow
def test_requests_with_and_without_grammars_get_their_texts_alone(name):
    engine = make(name)
    engine.warm_up()
    compiled, rng, handles = program_cache.totals(), np.random.default_rng(2), []
    while len(handles) < 24 or engine.unfinished:
        for _ in range(min(rng.poisson(2.0), 24 - len(handles))):
            index = int(rng.integers(len(engines.prompts())))
            pattern = PATTERNS[rng.integers(len(PATTERNS))]
            handles.append((submit(engine, index, pattern), index, pattern))
        if rng.random() < 0.1:
            submit(engine, 0, PATTERN).cancel()
        if rng.random() < 0.1 and handles:
            handles[rng.integers(len(handles))][0].cancel()
        engine.step()
    assert program_cache.totals() == compiled
    for handle, index, pattern in handles:
        result, whole = handle.result(), expected(index, pattern)
        if result.finish_reason == "cancelled":
            whole = whole[: len(result.tokens)]
        np.testing.assert_array_equal(result.tokens, whole)
        assert handle.text.matcher is None  # not kept by those who keep handles
    reasons = [handle.result().finish_reason for handle, *_ in handles]
    assert {"eos", "length"} <= {*reasons}


def test_the_times_of_a_first_round_are_without_compilation(monkeypatch):
    monkeypatch.setattr(program_cache, "_compiled", {})
    engine = make()
    submit(engine, 0, PATTERN).result()
    assert engine.stats.host_s > 0  # the time of the steps, less that of programs and compilation


@pytest.mark.slow
def test_sampled_requests_have_the_text_of_their_seed_alone():
    engine = make(sampling=True, slots=2)
    handles = [
        (submit(engine, index, pattern, seed=index, temperature=1.2), index, pattern)
        for index, pattern in enumerate(PATTERNS)
    ]
    engine.run()
    for handle, index, pattern in handles:
        alone = make(sampling=True, slots=1)
        other = submit(alone, index, pattern, seed=index, temperature=1.2)
        np.testing.assert_array_equal(handle.result().tokens, other.result().tokens)
        if pattern and handle.result().finish_reason == "eos":
            assert spelled.regex.fullmatch(pattern, handle.result().text)


def on_a_mesh(mesh: list[int]) -> list[list[int]]:
    engine = make(slots=4, mesh=magicjax.make_mesh(*mesh))
    engine.warm_up()
    compiled = program_cache.totals()
    handles = [submit(engine, index, pattern) for index, pattern in enumerate(PATTERNS)]
    engine.run()
    assert program_cache.totals() == compiled
    return [handle.result().tokens.tolist() for handle in handles]


@pytest.mark.slow
def test_an_engine_on_a_mesh_gives_the_texts_of_one_device(eight):
    found = eight(on_a_mesh, mesh=[2, 2])
    for index, pattern in enumerate(PATTERNS):
        np.testing.assert_array_equal(found[index], expected(index, pattern))


def test_wrong_grammars_are_errors_at_submit():
    engine = make("plain")
    before = program_cache.totals()
    with pytest.raises(ValueError, match="create the engine with grammars=True"):
        submit(make("plain", grammars=False), 0, PATTERN)
    with pytest.raises(ValueError, match="has no EOS token"):
        submit(make("plain", eos_token_id=[]), 0, PATTERN)
    with pytest.raises(ValueError, match="has none"):
        params = magicjax.SamplingParams(grammar=magicjax.Grammar.regex("a"), max_tokens=None)
        engines.engine("plain", grammars=True).submit([1, 2], params)
    assert program_cache.totals() == before
    assert not engine.unfinished


@pytest.mark.parametrize("states, emitted", [(6, 0), (20, 3)])
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(monkeypatch, states, emitted):
    """At its first token, and later. The text that has no match does not end with "eos"."""
    limits = llguidance.LLParserLimits(max_lexer_states=states, verbose_errors=False)
    monkeypatch.setattr(matcher, "limits", lambda: limits)
    pattern, engine = "[a-m]{3}[n-z]{3}[a-m]{3}[n-z]{4}[a-z]{3}", make("plain")
    handles = [submit(engine, 0, pattern), submit(engine, 1, None)]
    engine.run()
    found = handles[0].result()
    assert (found.finish_reason, found.error_kind) == ("error", "grammar")
    assert len(found.text) <= emitted and handles[1].result().error_kind == ""
    np.testing.assert_array_equal(handles[1].result().tokens, expected(1, None))
    params = magicjax.SamplingParams(grammar=magicjax.Grammar.regex(pattern), max_tokens=20)
    with pytest.raises((ValueError, RuntimeError), match="too many states"):
        magicjax.generate(spelled.target(), [engines.prompts()[0].tolist()], params)


def test_an_error_at_a_drafted_node_is_one_of_the_text(monkeypatch):
    """The copy of the matcher has it, whose mask allows EOS alone."""
    limits = llguidance.LLParserLimits(max_lexer_states=20, verbose_errors=False)
    monkeypatch.setattr(matcher, "limits", lambda: limits)
    grammar = magicjax.Grammar.regex("[a-m]{3}[n-z]{3}[a-m]{3}[n-z]{4}[a-z]{3}")
    for text, error in (([0, 1, 2], ""), ([0, 1, 2, tiny.NEVER], "too many states")):
        found = matcher.Matcher(spelled.target(), grammar, (tiny.NEVER,))
        found.push(text)
        assert error in found.error and bool(error) == bool(found.error)
