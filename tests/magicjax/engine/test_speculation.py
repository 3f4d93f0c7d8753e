"""The choice of the depth by simulation, and texts that do not depend on the depths."""

import dataclasses
import itertools

import numpy as np
import pytest
from flax import struct

import magicjax
from magicjax.decoding import program_cache
from magicjax.drafters.base import Drafter
from magicjax.engine.speculation import MAX_CORRECTION, DepthChooser, RoundTimes
from magicjax.prediction.autotune.depth_controller import HYSTERESIS, DepthRule
from tests.magicjax import tiny
from tests.magicjax.engine import engines, test_sampled, test_schedules
from tests.quick import quick

DEPTHS = (0, 1, 2, 4)
SECONDS = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}
ROUNDS = 8


def chooser(slots: int, seconds=SECONDS, long=None) -> DepthChooser:
    """Returns the first choice for rows of 1 token (`seconds`) and of 100 tokens (`long`)."""
    by_depth = {depth: (s, (long or seconds)[depth]) for depth, s in seconds.items()}
    return dataclasses.replace(
        DepthChooser.create(seconds, slots), times=RoundTimes((1, 100), by_depth)
    )


def simulate(
    choice: DepthChooser, calls: int, rates, seconds=SECONDS, length=1, left=1000, speed=1.0
) -> tuple[list[int], DepthChooser]:
    """Returns (the depths of calls, the choice after them).

    Args:
      choice: before the first call.
      calls: their number.
      rates: of each live row, the probability of each token given those before it.
      seconds: that rounds take.
      length, left: of all live rows.
      speed: a factor on all seconds.
    """
    depths, histogram = [], choice.histogram.astype(float)
    for _ in range(calls):
        choice = choice.chosen({slot: (length, left) for slot in range(len(rates))})
        depth = choice.depth
        for slot, rate in enumerate(rates):
            reached = [rate**i for i in range(depth + 1)]
            for accepted, (a, b) in enumerate(itertools.pairwise([*reached, 0.0])):
                histogram[slot, accepted] += ROUNDS * (a - b)
        choice = choice.counted(histogram, ROUNDS, ROUNDS * speed * seconds[depth])
        depths.append(depth)
    return depths, choice


def tokens_per_second(rates, depth: int, seconds=SECONDS) -> float:
    return sum(rate**i for rate in rates for i in range(depth + 1)) / seconds[depth]


def best(rates, seconds=SECONDS) -> int:
    """Returns the depth with the most tokens per second."""
    return max(seconds, key=lambda depth: tokens_per_second(rates, depth, seconds))


@pytest.mark.parametrize("rates", [[0.95], [0.7], [0.45], [0.1], [0.0], [0.9] * 3, [0.9, 0.1]])
def test_the_choice_is_the_depth_of_the_most_tokens_per_second(rates):
    depths, _ = simulate(chooser(4), 100, rates)
    assert depths[-40:].count(best(rates)) >= 38  # others are probes


def test_batches_of_unlike_rows_run_near_the_best_depth():
    """Depths that have not run lately have the rates of all rows, not each row's own."""
    rng, losses = np.random.default_rng(0), []
    for _ in range(30):
        rates = rng.random(4) ** 0.5
        depth = simulate(chooser(4), 100, rates)[0][-1]
        found = tokens_per_second(rates, depth)
        losses.append(tokens_per_second(rates, best(rates)) / found - 1)
    assert np.mean(losses) < 0.03 and max(losses) < 0.15


def test_the_rates_of_the_cases_have_different_best_depths():
    assert {best([rate]) for rate in (0.95, 0.45, 0.1)} == {4, 1, 0}


def test_decoding_is_plain_where_no_depth_pays():
    slow = {0: 1.0, 1: 2.1, 2: 3.2, 4: 5.3}  # not even if all tokens are accepted
    depths, _ = simulate(chooser(2, slow), 200, [1.0, 1.0], slow)
    assert depths.count(0) >= 190


@pytest.mark.parametrize(("gain", "changes"), [(0.5 * HYSTERESIS, False), (2 * HYSTERESIS, True)])
def test_the_depth_changes_only_for_a_gain_above_the_hysteresis(gain, changes):
    rate = 0.5
    seconds = {0: 1.0, 1: (1 + gain) * (1 + rate)}
    first = dataclasses.replace(chooser(1, seconds), tried=np.full((2, 1), 1e3))
    first = dataclasses.replace(first, accepted=rate * first.tried)
    assert (0 in simulate(first, 4, [rate], seconds)[0]) == changes


def test_speculation_resumes_when_new_requests_are_accepted():
    _, choice = simulate(chooser(1), 300, [0.0])
    assert choice.depth == 0 and choice.rule.pause == 64
    depths, _ = simulate(choice.joined(0), 40, [0.95])
    assert depths[-1] == 4
    # The histogram of a new request begins at 0.
    assert not choice.joined(0).histogram[0].any()


def test_a_request_that_joins_has_the_rates_of_the_others():
    _, choice = simulate(chooser(2), 20, [0.9, 0.2])
    before = choice.tokens(4)
    after = choice.joined(1).tokens(4)
    assert before[1] < after[1] < before[0] and after[0] == pytest.approx(before[0])


def test_the_length_of_the_longest_row_decides():
    """With short rows a round of 5 nodes costs little more than one; with long rows, no less."""
    long = {0: 2.0, 1: 4.5, 2: 6.5, 4: 11.0}
    short = {0: 1.0, 1: 1.05, 2: 1.1, 4: 1.2}
    for length, seconds, wanted in ((1, short, 4), (100, long, 0)):
        depths, _ = simulate(chooser(1, short, long), 60, [0.9], seconds, length)
        assert depths[-20:].count(wanted) >= 19
    times = chooser(1, short, long).times
    assert times.of(0, 1) == 1 and times.of(0, 1000) == 2 and 1 < times.of(0, 50) < 2


def test_a_row_with_one_token_left_drafts_nothing():
    _, choice = simulate(chooser(2), 20, [0.95, 0.95])
    assert choice.depth == 4
    assert choice.chosen({0: (50, 1)}).depth == 0
    assert choice.chosen({0: (50, 1), 1: (50, 100)}).depth == 4


def test_a_slower_machine_does_not_change_the_depth():
    _, choice = simulate(chooser(1), 10, [0.95])
    assert simulate(choice, 10, [0.95], speed=3.0)[0] == [4] * 10


def test_changes_of_the_depth_correct_the_ratio_of_its_seconds():
    times, true = chooser(1).times, {0: 1.0, 1: 3.0}
    for call in range(30):
        times = times.corrected(call % 2, 1, 5.0 * true[call % 2])
    assert times.of(1, 1) / times.of(0, 1) == pytest.approx(3.0, rel=0.02)
    assert times.of(4, 1) == SECONDS[4]
    once = chooser(1).times.corrected(0, 1, 1.0).corrected(1, 1, 100.0)
    assert once.of(1, 1) == pytest.approx(1.3 * MAX_CORRECTION**0.5)


def test_without_times_or_rows_the_depth_stays():
    first = DepthChooser.create(DEPTHS, 2)
    assert first.chosen({0: (5, 1)}) is first and first.depth == 4
    assert chooser(2).chosen({}).depth == 4


@dataclasses.dataclass(frozen=True)
class Forced(DepthChooser):
    """Runs all depths, whatever they cost."""

    call: int = 0

    def chosen(self, live):
        order = (*self.depths[::-1], *self.depths)
        rule = DepthRule(order[self.call % len(order)])
        return dataclasses.replace(self, call=self.call + 1, rule=rule)


def forced(name: str, **options) -> magicjax.Engine:
    """Returns an engine that has compiled all depths and runs them in a fixed order."""
    engine = engines.engine(name, adaptive_depth=True, **options)
    engine.warm_up()
    engine._depths = Forced(**vars(engine._depths))
    return engine


SPECULATING = [name for name in engines.DRAFTERS if name != "plain"]


@pytest.mark.parametrize("name", quick(SPECULATING, "snapkv"))
def test_greedy_texts_and_caches_do_not_depend_on_the_depths(name, tally):
    eos = int(engines.expected(4)[6])
    engine = forced(name, eos_token_id=eos, rounds_per_step=1)
    compiled = program_cache.totals()
    test_schedules.run_schedule(engine, eos, seed=0, requests=20, tally=tally)
    assert program_cache.totals() == compiled
    tree = engines.DRAFTERS[name][1]
    deepest = tree.shape.depth
    rounds = engine.stats.rounds_by_depth
    dynamic = isinstance(tree, magicjax.DynamicTree)
    assert set(rounds) == ({0, deepest} if dynamic else {0, 1, 2, deepest})
    assert all(rounds.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(["streaming", "prompt lookup", "small"], "prompt lookup"))
def test_sampled_texts_do_not_depend_on_the_depths(name):
    engine = forced(name, sampling=True, slots=2, rounds_per_step=1)
    handles = [test_sampled.submit(engine, number) for number in range(5)]
    engine.run()
    for number, handle in enumerate(handles):
        sampling = test_sampled.SAMPLINGS[number % 3]
        text = test_sampled.alone("plain", test_sampled.prompts()[number], number, sampling)
        np.testing.assert_array_equal(handle.result().tokens, text)
    assert all(engine.stats.rounds_by_depth.values())


def test_an_engine_chooses_by_its_own_times_and_acceptance(tally):
    """The drafter of another model is never right; times are set, because those of tests vary."""
    config = magicjax.EngineConfig(
        slots=2,
        capacity=engines.CAPACITY,
        max_tokens=engines.NEW,
        adaptive_depth=True,
        eos_token_id=tiny.NEVER,
        rounds_per_step=2,
    )
    engine = magicjax.Engine(tiny.model(), tiny.drafter("other"), tiny.TREES["chain1"], config)
    handles = [engine.submit(prompt) for prompt in engines.prompts()[:4]]
    engine.step()  # without warm-up, rounds are timed here
    times = engine._depths.times
    assert times.lengths == (1, 3 * engines.CAPACITY // 4)
    assert set(times.seconds) == {0, 1}
    assert all(0 < s < 60 for seconds in times.seconds.values() for s in seconds)
    costs = {0: (1.0,), 1: (9.0,)}
    engine._depths = dataclasses.replace(engine._depths, times=RoundTimes((1,), costs))
    engine.run()
    rows = [handle.result().tokens for handle in handles]
    tally.compare(tiny.model(), engines.prompts()[:4], map(engines.expected, range(4)), rows)
    stats = engine.stats
    assert stats.rounds_by_depth[0] > 0.7 * sum(stats.rounds_by_depth.values())


def test_one_tree_has_rounds_of_its_depth_only():
    engine = engines.engine("streaming")
    engine.submit(engines.prompts()[0])
    engine.run()
    assert list(engine.stats.rounds_by_depth) == [4]
    assert list(engines.engine("plain").stats.rounds_by_depth) == [0]


@struct.dataclass
class Untimed(magicjax.PromptLookup):
    """A drafter that defines no synthetic state."""

    synthetic_state = Drafter.synthetic_state


REFUSED = {
    "no drafter": (dict(drafter=None), "adaptive_depth=True has no effect without a drafter"),
    "trees of members": (
        dict(drafter=magicjax.Ensemble([magicjax.PromptLookup()], [magicjax.chain(2)])),
        "members have trees of their own: pass one tree",
    ),
    "a verifier": (
        dict(sampling=True, verifier="mss"),
        "verifier='mss' with adaptive_depth=True: .* use verifier='naive'",
    ),
    "a drafter that cannot be timed": (
        dict(drafter=Untimed()),
        "Untimed does not define synthetic_state: define it, or omit adaptive_depth",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_adapt_is_an_error_before_anything_is_compiled(what):
    options, message = dict(REFUSED[what][0]), REFUSED[what][1]
    compiled = program_cache.totals()
    drafter = options.pop("drafter", magicjax.PromptLookup())
    config = magicjax.EngineConfig(adaptive_depth=True, slots=2, capacity=64, **options)
    with pytest.raises(ValueError, match=message):
        magicjax.Engine(tiny.model(), drafter, config=config)
    assert program_cache.totals() == compiled
