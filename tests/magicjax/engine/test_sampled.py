"""A sampled request gets the text that its seed gives alone, with others in the batch."""

import numpy as np
import pytest

from magicjax import SamplingParams
from magicjax.decoding import program_cache
from tests.magicjax import keywords, tiny
from tests.magicjax.engine import engines
from tests.quick import quick

NEW = 12
WARPED = dict(temperature=0.8, top_k=20, top_p=0.9)
# Sampled ones use the same filters, so that they share the programs of `generate`.
SAMPLINGS = (WARPED, dict(temperature=1.3, top_k=40, top_p=0.99), dict(temperature=0))


def prompts() -> list[np.ndarray]:
    """Returns prompts of one padded width, so that they share the programs of `generate`."""
    rng = np.random.default_rng(5)
    lengths = (17, 30, 23, 32, 20, 27)
    return [rng.integers(0, tiny.VOCAB - 1, n).astype(np.int32) for n in lengths]


def speculative(number: int) -> bool:
    return number % 4 != 3


def alone(name: str, prompt, number: int) -> np.ndarray:
    drafter, tree = engines.DRAFTERS[name]
    seed, sampling = number, SAMPLINGS[number % len(SAMPLINGS)]
    plain = drafter is not None and drafter.remembers  # verified by naive
    if plain or not speculative(number):
        drafter = tree = None
    if sampling["temperature"]:
        sampling = dict(seed=seed, **sampling)
    else:
        drafter = tree = None
        sampling = {}
    options = dict(max_tokens=NEW, eos_token_id=tiny.NEVER, drafter=drafter, tree=tree)
    output = keywords.generate(tiny.model(), [prompt], **options, **sampling)
    return tiny.rows_of(output)[0]


def submit(engine, number: int):
    options = dict(SAMPLINGS[number % len(SAMPLINGS)], speculative=speculative(number))
    options |= dict(seed=number) if options["temperature"] else {}
    prompt = prompts()[number % len(prompts())]
    return engine.submit(prompt, SamplingParams(max_tokens=NEW, **options))


@pytest.mark.parametrize(
    "name",
    quick(
        [name for name in engines.DRAFTERS if name not in ("full", "h2o", "int8")], "prompt lookup"
    ),
)
def test_the_same_seed_gives_the_same_text_alone_and_in_company(name):
    engine = engines.engine(name, sampling=True, slots=4)
    engine.warm_up()
    compiled, rng, handles = program_cache.totals(), np.random.default_rng(0), []
    while len(handles) < 8 or engine.unfinished:
        for _ in range(min(rng.poisson(1.5), 8 - len(handles))):
            handles.append(submit(engine, len(handles)))
        if rng.random() < 0.3:
            submit(engine, 100 + len(handles)).cancel()
        engine.step()
        engines.check_rows(engine)
    assert program_cache.totals() == compiled
    for number, handle in enumerate(handles):
        result = handle.result()
        text = alone(name, prompts()[number % len(prompts())], number)
        np.testing.assert_array_equal(result.tokens, text)
        if not speculative(number):
            assert (result.stats.rounds, result.stats.drafted) == (NEW - 1, 0)


def test_sampled_requests_are_errors_in_a_greedy_engine():
    engine = engines.engine()
    with pytest.raises(ValueError, match="temperature=0.5: decoding is greedy; use tem"):
        engine.submit([1, 2], SamplingParams(temperature=0.5))
    assert not engine.unfinished


SAMPLED = SamplingParams(temperature=1, max_tokens=NEW)
INVALID_SAMPLES = {
    "none": (0, SAMPLED, "n=0: it must be an integer of at least 1"),
    "the queue": (4, SAMPLED, "the queue has 0 requests, and with 4 more .* queue_limit=3"),
}


@pytest.mark.parametrize("what", INVALID_SAMPLES)
def test_invalid_samples_are_errors_and_none_is_queued(what):
    n, params, message = INVALID_SAMPLES[what]
    engine = engines.engine(sampling=True, queue_limit=3)
    with pytest.raises(ValueError, match=message):
        engine.submit_samples([1, 2], n, params)
    assert not engine.unfinished


def test_samples_may_be_greedy_and_types_are_checked():
    engine = engines.engine()
    for handle in engine.submit_samples(engines.prompts()[0], 2):
        np.testing.assert_array_equal(handle.result().tokens, engines.expected(0))
    with pytest.raises(TypeError, match="n=2.0: it must be an integer"):
        engine.submit_samples([1, 2], 2.0)
    with pytest.raises(TypeError, match="params has type dict: pass magicjax.SamplingParams"):
        engine.submit([1, 2], dict(temperature=0.5))
