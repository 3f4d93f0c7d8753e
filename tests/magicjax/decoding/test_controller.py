"""The choice of the mode by simulation, and exact text while the mode changes between calls."""

import dataclasses
import itertools

import numpy as np
import pytest

import magicjax
from magicjax.decoding.controller import (
    HYSTERESIS,
    IDLE_ROUNDS,
    MAX_CORRECTION,
    PLAIN,
    POOLED_ROUNDS,
    PROBE_ROUNDS,
    PROBE_SHARE,
    Acceptance,
    Controller,
    Mode,
    RoundTimes,
    row_rates,
    row_tokens,
)
from magicjax.decoding.counts import tried_and_accepted
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.output import texts_of as empty_texts
from magicjax.decoding.rounds import run_adaptive
from magicjax.drafters.text_lookup import TextLookup
from magicjax.trees.token_tree import ROOT_ONLY, chain
from tests.magicjax import keywords, tiny
from tests.magicjax.decoding import test_joint
from tests.magicjax.kv_cache.test_loop_caches import fresh_prefill
from tests.quick import quick

DEPTHS = (0, 1, 2, 4)
SECONDS = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}
ROUNDS = 8


def at(depth: int, drafter: str = "one") -> Mode:
    """Returns the mode of a depth."""
    return Mode(drafter, depth) if depth else PLAIN


def chooser(slots: int, seconds=SECONDS, long=None) -> Controller:
    """Returns the first choice for rows of 1 token (`seconds`) and of 100 tokens (`long`)."""
    by_mode = {at(depth): (s, (long or seconds)[depth]) for depth, s in seconds.items()}
    return Controller.create(by_mode, slots, times=RoundTimes((1, 100), by_mode))


def simulate(
    choice: Controller, calls: int, rates, seconds=SECONDS, length=1, left=1000, speed=1.0
) -> tuple[list[int], Controller]:
    """Returns (the depths of calls, the choice after them).

    Args:
      choice: before the first call.
      calls: their number.
      rates: of each live row, the probability of each token given those before it.
      seconds: that rounds take.
      length: of all live rows.
      left: tokens that the rows, or each of them, may still emit; 0 if a row has ended.
      speed: a factor on all seconds.
    """
    depths, histogram = [], choice.histogram.astype(float)
    left = np.broadcast_to(left, len(rates))
    for _ in range(calls):
        live = {slot: (length, tokens) for slot, tokens in enumerate(left) if tokens}
        choice = choice.chosen(live)
        depth, rounds = choice.mode.depth, PROBE_ROUNDS if choice.is_probe else ROUNDS
        for slot, rate in enumerate(rates):
            if not left[slot]:
                continue
            reached = [rate**i for i in range(depth + 1)]
            for accepted, (a, b) in enumerate(itertools.pairwise([*reached, 0.0])):
                histogram[slot, accepted] += rounds * (a - b)
        choice = choice.counted(histogram, rounds, rounds * speed * seconds[depth])
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
    assert depths[-40:].count(best(rates)) >= 36  # others are probes, a quarter as long


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
    tried = np.full((2, 1), 1e3)
    known = {"one": Acceptance(tried, rate * tried)}
    first = dataclasses.replace(chooser(1, seconds), acceptance=known)
    assert (0 in simulate(first, 4, [rate], seconds)[0]) == changes


def test_speculation_resumes_when_new_requests_are_accepted():
    _, choice = simulate(chooser(1), 300, [0.0])
    assert choice.best == PLAIN
    depths, _ = simulate(choice.joined(0), 200, [0.95])
    assert depths[-1] == 4
    # The histogram of a new request begins at 0.
    assert not choice.joined(0).histogram[0].any()


def test_a_request_that_joins_has_the_rates_of_the_others():
    _, choice = simulate(chooser(2), 20, [0.9, 0.2])
    before = choice.tokens(at(4))
    after = choice.joined(1).tokens(at(4))
    assert before[1] < after[1] < before[0] and after[0] == pytest.approx(before[0])


def test_the_length_of_the_longest_row_decides():
    """With short rows a round of 5 nodes costs little more than one; with long rows, no less."""
    long = {0: 2.0, 1: 4.5, 2: 6.5, 4: 11.0}
    short = {0: 1.0, 1: 1.05, 2: 1.1, 4: 1.2}
    for length, seconds, wanted in ((1, short, 4), (100, long, 0)):
        depths, _ = simulate(chooser(1, short, long), 60, [0.9], seconds, length)
        assert depths[-20:].count(wanted) >= 19
    times = chooser(1, short, long).times
    assert times.of(PLAIN, 1, 1) == 1 and times.of(PLAIN, 1000, 1) == 2
    assert 1 < times.of(PLAIN, 50, 1) < 2


def test_the_number_of_live_rows_decides():
    """With one live row of 16, a round of 5 nodes costs little more than one; with all, no less."""
    times = RoundTimes((1,), {PLAIN: (1.0, 2.0), at(4): (1.2, 9.0)}, rows=(1, 16))
    controller = Controller.create(times.seconds, 16, times=times)
    assert times.of(PLAIN, 1, 1) == 1 and 1 < times.of(PLAIN, 1, 8) < 2 == times.of(PLAIN, 1, 16)
    assert controller.chosen({0: (50, 100)}).mode == at(4)
    assert controller.chosen({row: (50, 100) for row in range(16)}).mode == PLAIN


def test_a_row_with_one_token_left_drafts_nothing():
    _, choice = simulate(chooser(2), 20, [0.95, 0.95])
    assert choice.mode.depth == 4
    assert choice.chosen({0: (50, 1)}).mode == PLAIN
    assert choice.chosen({0: (50, 1), 1: (50, 100)}).mode.depth == 4


def test_a_slower_machine_does_not_change_the_depth():
    _, choice = simulate(chooser(1), 10, [0.95])
    assert simulate(choice, 10, [0.95], speed=3.0)[0] == [4] * 10


def test_changes_of_the_depth_correct_the_ratio_of_its_seconds():
    times, true = chooser(1).times, {0: 1.0, 1: 3.0}
    for call in range(30):
        times = times.corrected(at(call % 2), 1, 1, 5.0 * true[call % 2])
    assert times.of(at(1), 1, 1) / times.of(PLAIN, 1, 1) == pytest.approx(3.0, rel=0.02)
    assert times.of(at(4), 1, 1) == SECONDS[4]
    once = chooser(1).times.corrected(PLAIN, 1, 1, 1.0).corrected(at(1), 1, 1, 100.0)
    assert once.of(at(1), 1, 1) == pytest.approx(1.3 * MAX_CORRECTION**0.5)


def test_without_times_or_rows_the_depth_stays():
    first = Controller.create(map(at, DEPTHS), 2)
    assert first.chosen({0: (5, 1)}) is first and first.mode.depth == 4
    assert chooser(2).chosen({}).mode.depth == 4


FLAT = {0: 1.0, 1: 1.4, 2: 1.6, 4: 2.1}
UNEQUAL = [0.95, 0.95, 0.95, 0.5]


def batch(rows: int, rate: float, first: int, seconds=FLAT) -> Controller:
    """Returns the first choice for a batch that is done when its last row ends."""
    times = RoundTimes((1,), {at(depth): (s,) for depth, s in seconds.items()})
    options = dict(first=at(first), rates=[rate], rounds=16, times=times)
    return Controller.create(times.seconds, rows, until_last_row_ends=True, **options)


def test_in_a_batch_the_row_that_needs_the_most_rounds_decides():
    """On average rows gain by a deeper chain; the slowest row does not."""
    depths, _ = simulate(batch(4, 0.84, 2), 10, [0.84] * 4, FLAT)
    assert depths[-3:] == [4] * 3
    depths, _ = simulate(batch(4, 0.84, 2), 10, UNEQUAL, FLAT)
    assert depths[-3:] == [2] * 3
    # A slow row with few tokens left does not decide, and nor does one that has ended.
    for left in ([99, 99, 99, 9], [99, 99, 99, 0]):
        depths, _ = simulate(batch(4, 0.84, 2), 10, UNEQUAL, FLAT, left=left)
        assert depths[-3:] == [4] * 3


class Fixed:
    """One depth."""

    is_probe = False

    def __init__(self, depth: int):
        self.mode = at(depth)

    def chosen(self, live):
        return self

    def counted(self, histogram, rounds, seconds):
        return self


def over_best_fixed(rates, rng, merged=False) -> float:
    """Returns how much later rows of these rates end than at the best fixed depth.

    With `merged`, every row counts the average acceptance.
    """

    def time(choice):
        left, total = np.full(len(rates), 400), 0.0
        histogram = np.zeros((len(rates), 1 + max(FLAT)))
        while left.any():
            choice = choice.chosen({int(row): (1, int(left[row])) for row in np.flatnonzero(left)})
            depth, rounds, new = choice.mode.depth, 0, np.zeros(histogram.shape)
            while rounds < (PROBE_ROUNDS if choice.is_probe else 32) and left.any():
                correct = rng.random((len(rates), depth)) < np.array(rates)[:, None]
                accepted = np.cumprod(correct, axis=1).sum(1)
                new[np.arange(len(rates)), accepted] += left > 0
                left, rounds = np.maximum(left - 1 - accepted, 0), rounds + 1
            total += rounds * FLAT[depth]
            histogram += np.tile(new.mean(0), (len(rates), 1)) if merged else new
            choice = choice.counted(histogram, rounds, rounds * FLAT[depth])
        return total

    fixed = min(np.mean([time(Fixed(depth)) for _ in range(8)]) for depth in FLAT)
    adaptive = np.mean([time(batch(len(rates), np.mean(rates), 2)) for _ in range(8)])
    return adaptive / fixed - 1


BATCHES = ([0.5], [0.9], [0.8] * 8, [0.95] * 7 + [0.5], [0.95] * 15 + [0.4], [0.9, 0.7, 0.5, 0.3])


@pytest.mark.parametrize("merged", [False, True])
def test_batches_end_within_10_percent_of_the_best_fixed_depth(merged):
    rng = np.random.default_rng(0)
    over = [over_best_fixed(rates, rng, merged) for rates in BATCHES]
    assert (max(over) < 0.1) != merged, over  # by the average some batch waits for its slowest row


def test_plain_decoding_follows_a_collapse_and_a_recovery_is_detected():
    depths, choice = simulate(batch(1, 0.9, 4, SECONDS), 4, [0.9])
    assert depths == [4] * 4
    depths, choice = simulate(choice, 30, [0.0])
    assert 0 in depths[:12] and depths[-10:].count(0) >= 8
    assert simulate(choice, 150, [0.9])[0][-1] == 4


def test_probes_are_a_small_share_of_the_rounds_and_cost_what_is_reported():
    depths, choice = simulate(batch(1, 0.0, 0, SECONDS), 1000, [0.0])
    probes = choice.probes
    assert {*depths} == {0, 1} and probes.probed == PROBE_ROUNDS * sum(depths) > 0
    assert 0.015 < probes.probed / probes.rounds < PROBE_SHARE + 0.001
    assert probes.lost_s == pytest.approx(probes.probed * (SECONDS[1] - SECONDS[0]), rel=0.05)


def test_rows_after_a_plain_round_do_not_draft():
    choice = dataclasses.replace(
        chooser(2), can_be_disabled=True, acceptance={"one": known(2, 0.95)}
    )
    live = {0: (10, 100), 1: (10, 100)}
    assert choice.chosen(live).mode.depth == 4
    slow = {mode: (9.0 if mode.depth else 1.0,) for mode in choice.modes}
    plain = dataclasses.replace(choice, times=RoundTimes((1,), slow)).chosen(live)
    assert plain.mode == PLAIN and plain.disabled == {0, 1}
    fast = dataclasses.replace(plain, times=choice.times)
    for mode in fast.modes:
        np.testing.assert_array_equal(fast.tokens(mode), 1)
    assert fast.chosen(live).mode == PLAIN
    idle = {"one": dataclasses.replace(fast.acceptance["one"], idle=10**6)}
    assert not dataclasses.replace(fast, acceptance=idle).chosen(live).is_probe
    assert plain.would_disable({}, live) and plain.would_disable({0: live[0]}, {1: live[1]})
    assert not fast.would_disable({}, live) and fast.joined(1, disabled=True).disabled == {0, 1}
    joined = fast.joined(1)
    assert joined.disabled == {0} and joined.tokens(at(4))[1] > 3
    histogram = np.array([[3, 0, 0, 0, 0], [0, 0, 0, 0, 3]])
    counted = joined.chosen(live).counted(histogram, 3, 3.0)
    np.testing.assert_array_equal(counted.acceptance["one"].tried[0], 0)


def test_a_draft_model_recovers_by_probes_of_requests_that_join():
    choice = dataclasses.replace(
        chooser(1), can_be_disabled=True, acceptance={"one": known(1, 0.9)}
    )
    live, depths = {0: (1, 1000)}, []
    for request in range(150):
        choice = choice.joined(0, choice.would_disable({}, live))
        rate = 0.0 if request < 15 else 0.9
        for _ in range(3):
            rates = [0.0 if choice.disabled else rate]
            depth, choice = simulate(choice, 1, rates)
            depths += depth
    assert depths[45 - 12 : 45].count(0) >= 8 and depths[-3:] == [4] * 3


def test_a_row_with_one_token_left_does_not_disable_its_neighbours():
    choice = dataclasses.replace(
        chooser(2), can_be_disabled=True, acceptance={"one": known(2, 0.9)}
    )
    assert choice.chosen({0: (10, 1), 1: (10, 500)}).mode.depth == 4


def test_a_request_that_joins_is_not_judged_by_the_one_before():
    seconds = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}
    choice = dataclasses.replace(chooser(2, seconds), can_be_disabled=True)
    acceptance = known(2, 0.9)
    acceptance.tried[0], acceptance.accepted[0] = 20, 0  # of the request before in slot 0
    acceptance.tried[1], acceptance.accepted[1] = 20, 18
    choice = dataclasses.replace(choice, acceptance={"one": acceptance})
    live = {0: (10, 100), 1: (10, 100)}
    assert choice.tokens(at(4))[0] < 2 and not choice.would_disable({1: live[1]}, {0: live[0]})


def known(rows: int, rate: float) -> Acceptance:
    return Acceptance.known(rows, 4, [rate], 100)


def test_what_cannot_gain_is_not_probed():
    slow = {0: 1.0, 1: 2.1, 2: 3.2, 4: 5.3}  # not even if all tokens are accepted
    depths, choice = simulate(batch(1, 0.0, 0, slow), 300, [0.0], slow)
    assert not any(depths) and not choice.probes.probed


@pytest.mark.parametrize(("gain", "stays"), [(-0.04, False), (0.04, False), (0.08, True)])
def test_a_probe_continues_only_for_a_gain(gain, stays):
    rate = 0.5
    seconds = {0: 1.0, 1: (1 + rate) / (1 + gain)}
    depths, _ = simulate(batch(1, 0.0, 0, seconds), 1000, [rate], seconds)
    assert (depths[-5:] == [1] * 5) == stays


def test_a_call_that_loads_its_program_corrects_no_times():
    choice = batch(1, 0.9, 4)
    counted = choice.counted([[0, 0, 0, 0, 8]], 8, None)
    assert counted.times == choice.times and counted.acceptance["one"].tried[0].sum() == 8 * 4
    assert choice.counted([[0, 0, 0, 0, 8]], 8, 80.0).times != counted.times


def test_the_state_may_be_deeper_than_the_depths():
    choice = batch(1, 0.9, 4).counted(np.full((1, 8), 1), 8, 16.8)
    counted = choice.counted(np.full((1, 8), 2), 8, 16.8)
    assert counted.acceptance["one"].tried.shape == (2, 4)


def test_depths_that_no_round_reached_have_the_overall_rate():
    choice = batch(1, 0.8, 8, {0: 1.0, 8: 1.5})
    choice = choice.counted(np.array([[100, 0, 0, 0, 0, 0, 0, 0, 0]]), 100, 320.0)
    (tokens,) = choice.tokens(at(8))
    assert 1 < tokens < 3 < 1 + sum(0.8**i for i in range(1, 9))


def test_a_row_that_always_and_one_that_never_accepts_keep_their_rates():
    histogram = np.array([[10_000, 0, 0, 0, 0], [0, 0, 0, 0, 10_000]])
    rates = row_rates(*tried_and_accepted(histogram, 4, 4))
    np.testing.assert_allclose(row_tokens(rates, 4), [1, 5], rtol=0.01)
    np.testing.assert_allclose(row_tokens(rates, 2), [1, 3], rtol=0.01)


def test_a_row_with_few_rounds_gets_rates_close_to_the_batch():
    """The pooled rate is 1/2: one row accepts nothing in 8 rounds, one all, one runs none."""
    rates = row_rates(*tried_and_accepted([[8, 0], [0, 8], [0, 0]], 1, 1))
    few, many = POOLED_ROUNDS / 2, 8 + POOLED_ROUNDS
    np.testing.assert_allclose(rates[:, 0], [few / many, (8 + few) / many, 1 / 2])


COSTS = {PLAIN: 1.0, at(1): 1.3, at(4): 2.2, at(1, "two"): 1.1, at(4, "two"): 1.4}


def two(rows: int) -> Controller:
    """Returns the first choice between plain decoding and two drafters."""
    times = RoundTimes((1,), {mode: (s,) for mode, s in COSTS.items()})
    return Controller.create(COSTS, rows, times=times)


def simulate_two(choice: Controller, calls: int, rates, simulates=()) -> tuple[list, Controller]:
    """Returns (the modes of calls, the choice after them), of one row.

    Args:
      choice: before the first call.
      calls: their number.
      rates: by drafter, the probability of each token given those before it.
      simulates: the drafters whose rounds are simulated while they do not draft.
    """
    modes, histogram = [], choice.histogram.astype(float)
    simulated = {name: histogram.copy() for name in simulates}

    def add(to, rounds, rate, depth):
        reached = [rate**i for i in range(depth + 1)]
        for accepted, (a, b) in enumerate(itertools.pairwise([*reached, 0.0])):
            to[0, accepted] += rounds * (a - b)

    for _ in range(calls):
        choice = choice.chosen({0: (1, 1000)})
        mode, rounds = choice.mode, PROBE_ROUNDS if choice.is_probe else ROUNDS
        add(histogram, rounds, rates.get(mode.drafter, 0), mode.depth)
        for name in simulates:
            if name != mode.drafter:
                add(
                    simulated[name],
                    rounds * (1 - rates[name] + 1e-9) / (1 - rates[name] ** 5 + 1e-9),
                    rates[name],
                    4,
                )
        seconds = rounds * COSTS[mode]
        choice = choice.counted(histogram, rounds, seconds, simulated)
        modes.append(mode)
    return modes, choice


def best_of_two(rates) -> Mode:
    """Returns the mode of the most tokens per second."""

    def speed(mode):
        return sum(rates.get(mode.drafter, 0) ** i for i in range(mode.depth + 1)) / COSTS[mode]

    return max(COSTS, key=speed)


RATES = (dict(one=0.9, two=0.1), dict(one=0.9, two=0.8), dict(one=0, two=0), dict(one=0, two=0.4))


@pytest.mark.parametrize("rates", RATES)
def test_the_drafter_of_the_most_tokens_per_second_is_found(rates):
    modes, choice = simulate_two(two(1), 150, rates)
    assert choice.best == best_of_two(rates) and modes[-30:].count(choice.best) >= 25
    assert choice.probes.probed <= 4 + PROBE_SHARE * choice.probes.rounds


def test_the_cases_have_different_best_modes():
    assert len({best_of_two(rates) for rates in RATES}) == len(RATES)


def test_the_other_drafter_is_probed_and_takes_over():
    """The second one begins without acceptance, and later has more than the first one."""
    _, choice = simulate_two(two(1), 50, dict(one=0.9, two=0.0))
    assert choice.best == at(4, "one")
    rates = dict(one=0.9, two=0.85)
    modes, _ = simulate_two(choice, 250, rates)
    assert modes[-1] == best_of_two(rates) == at(4, "two")
    first = next(i for i, mode in enumerate(modes) if mode.drafter == "two")
    assert modes[first].depth == 1  # the probe is of the smallest tree
    assert first * ROUNDS + choice.acceptance["two"].idle >= IDLE_ROUNDS


@pytest.mark.parametrize("simulates", [(), ("two",)])
def test_simulated_rounds_find_a_change_within_50_rounds(simulates):
    dead = dict(one=0.0, two=0.0)
    _, choice = simulate_two(two(1), 200, dead, simulates)
    assert choice.best == PLAIN
    modes, _ = simulate_two(choice, 50 // ROUNDS, dead | dict(two=0.9), simulates)
    assert (at(4, "two") in modes) == bool(simulates)


class Cycle:
    """Cycles through depths and records what is counted."""

    is_probe = False

    def __init__(self, depths):
        self._modes = map(at, itertools.cycle(depths))
        self.mode = next(self._modes)
        self.calls, self.lives = [], []

    def chosen(self, live):
        self.lives.append(live)
        self.mode = next(self._modes)
        return self

    def counted(self, histogram, rounds, seconds, simulated):
        self.simulated = simulated
        self.calls.append((self.mode.depth, np.array(histogram), rounds))
        return self


def decoders_of(request, depths):
    trees = {at(depth): chain(depth) if depth else ROOT_ONLY for depth in depths}
    return {
        mode: Decoder(request, request.settings.with_tree(tree)) for mode, tree in trees.items()
    }


DRAFTERS = {
    "self": lambda: tiny.drafter("self"),
    "other": lambda: tiny.drafter("other"),
    "near": lambda: tiny.drafter("near"),
    "prompt-lookup": magicjax.PromptLookup,
    "suffix": lambda: tiny.drafter("suffix"),
    "small streaming": lambda: magicjax.SmallModel(
        tiny.model("near"), policy=magicjax.StreamingLLM(sinks=tiny.SINKS), budget=tiny.BUDGET
    ),
    "snapkv refreshed": lambda: magicjax.SelfSpeculation("snapkv", budget=16, refresh_every=2),
}
ORDER = (3, 0, 1, 0, 2)


def request_of(kind: str, **options):
    arguments = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return keywords.prepare(
        tiny.model(),
        tiny.prompts(8),
        drafter=DRAFTERS[kind](),
        tree=tiny.TREES["chain3"],
        **arguments,
    )


def adaptive(kind: str, rounds: int = 2, depths=ORDER, **options):
    request = request_of(kind, **options)
    decoders, chooser = decoders_of(request, depths), Cycle(depths)
    state = Decoder(request).start()
    state, calls = run_adaptive(decoders, chooser, state, empty_texts(request), rounds)
    return request, state, calls, chooser


@pytest.mark.parametrize("kind", quick(DRAFTERS, "prompt-lookup"))
def test_greedy_text_does_not_depend_on_the_depths(kind, tally):
    request, state, calls, chooser = adaptive(kind)
    simulates = isinstance(request.drafter, TextLookup)
    assert [int(counted.sum()) > 0 for counted in chooser.simulated.values()] == [True] * simulates
    texts = list(np.asarray(state.output)[:, : tiny.NEW])
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), texts)
    assert [depth for depth, _ in calls][:5] == list(ORDER)[: len(calls)]
    total = 0
    for (depth, histogram), (chosen, counted, rounds), live in zip(
        calls, chooser.calls, [*chooser.lives, {}], strict=True
    ):
        assert depth == chosen and histogram.sum(1).max() == rounds <= 2
        assert not histogram[:, depth + 1 :].any()
        total = total + histogram
        np.testing.assert_array_equal(counted, total)
        emitted = 1 + total @ (1 + np.arange(total.shape[1]))  # one by prefill
        left = {row: tokens for row, (_, tokens) in live.items()}
        assert left == {row: tiny.NEW - n for row, n in enumerate(emitted) if n < tiny.NEW}


def test_ended_rows_are_not_live():
    """EOS is a token of the first row that some other rows never emit."""
    texts = tiny.expected(8)
    eos = int(texts[0][4])
    _, state, _, chooser = adaptive("prompt-lookup", eos_token_id=[eos])
    ended = [eos in row for row in np.array(texts).tolist()]
    assert ended[0] and not all(ended) and np.asarray(state.ended).all()
    assert chooser.lives[4:] and not any(0 in live for live in chooser.lives[4:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["near", "prompt-lookup"])
def test_naive_verification_gives_the_text_of_plain_sampling(kind):
    sampling = dict(temperature=1.0, seed=3)
    _, state, _, _ = adaptive(kind, verifier="naive", **sampling)
    arguments = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    plain = keywords.generate(tiny.model(), tiny.prompts(8), **arguments, **sampling)
    tokens = np.where(np.arange(tiny.NEW) < plain.lengths[:, None], state.output[:, : tiny.NEW], 47)
    np.testing.assert_array_equal(tokens, plain.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick(["self", "near"], "self"))
def test_caches_equal_those_of_a_fresh_prefill(kind):
    """The target's cache, after rounds of all depths; the last round may end a row halfway."""
    request, state, *_ = adaptive(kind)
    texts = [
        np.concatenate([prompt, row])[:length]
        for prompt, row, length in zip(
            request.prompts, np.asarray(state.output), np.asarray(state.cache.lengths), strict=True
        )
    ]
    tokens = np.zeros((8, 64), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    fresh = fresh_prefill(request.settings.capacity)(request.target, tokens, lengths)
    for cached, expected in zip(state.cache.k + state.cache.v, fresh.k + fresh.v, strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(
                np.asarray(cached)[row, :, :length],
                np.asarray(expected)[row, :, :length],
                atol=1e-5,
            )


class ByCount(Cycle):
    """The next depth depends on the acceptance so far."""

    def chosen(self, live):
        counted = self.calls[-1][1].sum(0)
        self.depth = int((counted * np.arange(len(counted))).sum()) % 4
        return self


def texts_of(drafter) -> dict[tuple[int, ...], int]:
    """Returns how often each text results from a loop whose depth depends on acceptance."""
    counted: dict[tuple[int, ...], int] = {}
    for seed in range(test_joint.FEW_CALLS):
        request = keywords.prepare(
            test_joint.model(0),
            [test_joint.PROMPT] * test_joint.ROWS,
            drafter=drafter,
            tree=test_joint.CHAIN,
            max_tokens=test_joint.LENGTH,
            temperature=1.0,
            seed=seed,
            eos_token_id=test_joint.EOS,
        )
        decoders, texts = decoders_of(request, range(4)), empty_texts(request)
        state, _ = run_adaptive(decoders, ByCount((2,)), Decoder(request).start(), texts, 1)
        lengths = np.asarray(state.emitted)
        for row, length in zip(np.asarray(state.output).tolist(), lengths, strict=True):
            counted[tuple(row[:length])] = counted.get(tuple(row[:length]), 0) + 1
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "self"])
def test_sampled_text_has_the_targets_joint_distribution(kind):
    drafter = test_joint.small(1) if kind == "small" else test_joint.self_speculation()
    expected = test_joint.joint(tuple(test_joint.PLAIN.items()))
    assert test_joint.p_value(texts_of(drafter), expected) > 1e-3
