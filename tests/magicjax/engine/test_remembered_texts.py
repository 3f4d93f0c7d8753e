"""An engine's drafter remembers finished requests: acceptance grows, and no text changes."""

import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.drafters import text_store
from magicjax.engine.setup import validated_row
from tests.magicjax import tiny
from tests.magicjax.engine import engines


def store_of(engine: magicjax.Engine) -> np.ndarray:
    return np.asarray(engine._setup.slots.drafter.store)


def test_finished_requests_are_remembered_and_nothing_is_compiled(tally):
    engine = engines.engine("suffix", slots=1)
    engine.warm_up()
    compiled, prompts = program_cache.totals(), engines.prompts()[:3]
    expected = text_store.empty(512)
    assert np.array_equal(store_of(engine), expected)  # warm-up is forgotten
    rounds = []
    for _ in range(2):
        handles = [engine.submit(prompt) for prompt in prompts]
        engine.run()
        results = [handle.result() for handle in handles]
        rows = [result.tokens for result in results]
        tally.compare(tiny.model(), prompts, map(engines.expected, range(3)), rows)
        rounds.append(sum(result.stats.rounds for result in results))
        for prompt, row in zip(prompts, rows, strict=True):
            expected = text_store.with_text(expected, [*prompt[-8:], *row])
        np.testing.assert_array_equal(store_of(engine), expected)
    assert rounds[1] < 0.6 * rounds[0]
    cancelled = engine.submit(prompts[0])
    engine.step()
    cancelled.cancel()
    np.testing.assert_array_equal(store_of(engine), expected)
    assert program_cache.totals() == compiled
    engine.forget_texts()
    np.testing.assert_array_equal(store_of(engine), text_store.empty(512))


def verifier(drafter, **options) -> str:
    """Returns the verifier of a sampled engine."""
    config = magicjax.EngineConfig(slots=2, capacity=64, max_tokens=24, sampling=True, **options)
    return validated_row(tiny.model(), drafter, magicjax.chain(2), config)[0].verifier


def test_sampled_requests_are_verified_by_naive_so_that_their_texts_do_not_depend_on_others():
    before = program_cache.totals()
    for drafter in ("suffix", magicjax.Ensemble([magicjax.SuffixLookup()])):
        assert verifier(drafter) == "naive"
        with pytest.raises(ValueError, match="verifier='mss' with a drafter that remembers texts"):
            verifier(drafter, verifier="mss")
    for drafter in ("suffix:store_tokens=0", "prompt-lookup"):
        assert verifier(drafter) == "mss"
    assert program_cache.totals() == before
