"""The depth of a chain changes between calls of the loop, by rule, and the text stays exact."""

import itertools

import numpy as np
import pytest

import magicjax
from magicjax.autotune.auto import run_replanned
from magicjax.autotune.depth_controller import FIRST_PAUSE, HYSTERESIS, Controller
from magicjax.decoding import runner
from magicjax.decoding.request import prepare
from tests.magicjax import test_joint, tiny
from tests.magicjax.test_loop_caches import fresh_prefill
from tests.quick import quick

SECONDS = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}


def counts(rate: float, depth: int, rounds: int = 1000) -> list[float]:
    """Returns how many rounds accept 0, 1, ... tokens if each is accepted at a rate."""
    going = [rate**i for i in range(depth + 1)]
    return [rounds * (a - b) for a, b in itertools.pairwise([*going, 0.0])]


def follow(controller: Controller, rates: list, seconds=SECONDS, left=1000) -> list[int]:
    """Returns the depths of calls during which tokens are accepted at these rates, of all rows or
    of each; rows that have none left count no rounds.
    """
    depths = []
    for of_call in rates:
        depth = controller.depth
        depths.append(depth)
        of_rows = np.broadcast_to(of_call, np.shape(left) or np.shape(of_call) or (1,))
        still = np.broadcast_to(left, of_rows.shape)
        counted = [
            counts(rate, depth, 1000 * bool(some))
            for rate, some in zip(of_rows, still, strict=True)
        ]
        controller.learn(counted, still, 32 * seconds[depth], 32)
    return depths


def test_a_collapse_is_followed_by_plain_decoding_and_a_recovery_is_found():
    controller = Controller(SECONDS, [0.9], 4)
    depths = follow(controller, [0.9] * 3 + [0.0] * 12 + [0.9] * 40)
    assert depths[:4] == [4] * 4  # the fourth call meets the collapse
    assert 0 in depths[4:7]
    assert set(depths[7:15]) <= {0, 1} and sum(depths[7:15]) <= 2
    assert depths[-1] == 4


def test_at_depth_0_it_looks_again_after_longer_and_longer_pauses():
    controller = Controller(SECONDS, [0.0], 0)
    depths = follow(controller, [0.0] * 100)
    tries = np.flatnonzero(depths)
    assert tries[0] == FIRST_PAUSE
    np.testing.assert_array_equal(np.diff(tries)[:3], [2 * FIRST_PAUSE + 1, 9, 17])
    assert {depths[i] for i in tries} == {1}


@pytest.mark.parametrize("more, changes", [(0.5 * HYSTERESIS, False), (2 * HYSTERESIS, True)])
def test_a_depth_changes_only_for_more_than_noise(more, changes):
    """Rounds of depth 1 emit 1 + rate tokens; the time of a plain step decides."""
    rate = 0.5
    seconds = {0: 1.0, 1: (1 + more) * (1 + rate)}
    controller = Controller(seconds, [rate], 1)
    assert (0 in follow(controller, [rate] * 4, seconds)) == changes


FLAT = {0: 1.0, 1: 1.4, 2: 1.6, 4: 2.1}


def test_the_row_that_needs_most_rounds_decides():
    """On average rows gain by a deeper chain; the row for which all wait does not."""
    unlike, average = [0.95, 0.95, 0.95, 0.5], [0.84] * 4
    assert follow(Controller(FLAT, [0.84], 2), [average] * 4, FLAT)[1:] == [4] * 3
    assert follow(Controller(FLAT, [0.84], 2), [unlike] * 4, FLAT) == [2] * 4
    # Nothing is waited for that has little left.
    assert follow(Controller(FLAT, [0.84], 2), [unlike] * 4, FLAT, [99, 99, 99, 9])[1:] == [4] * 3


def test_what_ended_rows_accepted_says_little_about_those_that_go_on():
    unlike = [0.95, 0.95, 0.95, 0.5]
    for last, depth in ((0, 4), (3, 2)):
        controller = Controller(FLAT, [0.84], 2)
        follow(controller, [unlike] * 4, FLAT)
        alone = np.where(np.arange(4) == last, 99, 0)
        assert follow(controller, [unlike] * 12, FLAT, alone)[1:] == [depth] * 11


def over_best_fixed(rates, rng, merged=False) -> float:
    """Returns how much later rows of these rates end than at the depth that serves them best.

    With `merged`, the controller learns of every row what rows accept on average.
    """

    def time(controller):
        left, total = np.full(len(rates), 400), 0.0
        while left.any():
            depth, ran = controller.depth, 0
            histogram = np.zeros((len(rates), 1 + max(FLAT)))
            while ran < 32 and left.any():
                right = rng.random((len(rates), depth)) < np.array(rates)[:, None]
                accepted = np.cumprod(right, axis=1).sum(1)
                histogram[np.arange(len(rates)), accepted] += left > 0
                left, ran = np.maximum(left - 1 - accepted, 0), ran + 1
            total += ran * FLAT[depth]
            if merged:
                histogram = np.tile(histogram.mean(0), (len(rates), 1))
            controller.learn(histogram, left, ran * FLAT[depth], ran)
        return total

    fixed = min(np.mean([time(Cycle([depth])) for _ in range(8)]) for depth in FLAT)
    anew = np.mean([time(Controller(FLAT, [np.mean(rates)], 2)) for _ in range(8)])
    return anew / fixed - 1


BATCHES = ([0.5], [0.9], [0.8] * 8, [0.95] * 7 + [0.5], [0.95] * 15 + [0.4], [0.9, 0.7, 0.5, 0.3])


@pytest.mark.parametrize("merged", [False, True])
def test_rows_of_all_kinds_end_about_as_soon_as_at_the_best_fixed_depth(merged):
    rng = np.random.default_rng(0)
    over = [over_best_fixed(rates, rng, merged) for rates in BATCHES]
    assert (max(over) < 0.1) != merged, over  # by the average some batch waits for its slowest row


def test_what_the_trial_saw_is_no_news():
    controller = Controller(FLAT, [0.84], 2, known=64)
    assert follow(controller, [0.0] * 3 + [0.84] * 3, FLAT) == [2, 2, 2, 0, 0, 1]
    controller = Controller(FLAT, [0.84], 2, known=64)  # nor is it counted later
    assert follow(controller, [0.0] * 2 + [0.84] * 3, FLAT) == [2, 2, 2, 4, 4]


def test_a_trial_that_accepted_nothing_is_soon_forgotten():
    controller = Controller(SECONDS, [0.0], 0)
    assert follow(controller, [0.9] * 20)[-1] == 4


def test_measured_times_set_the_foretold_ones_right():
    """Rounds that take twice as long as was foretold, at every depth, do not pay any more."""
    controller = Controller(SECONDS, [0.7], 2)
    slow = {depth: (2.0 if depth else 1.0) * s for depth, s in SECONDS.items()}
    # The first call loads a program, so the second is the first that is believed.
    assert follow(controller, [0.7] * 4, slow)[2:] == [0, 0]


def test_a_machine_that_becomes_slow_changes_nothing():
    controller = Controller(SECONDS, [0.9], 4)
    follow(controller, [0.9] * 3)
    slow = {depth: 3 * seconds for depth, seconds in SECONDS.items()}
    assert follow(controller, [0.9] * 5, slow) == [4] * 5


@pytest.mark.parametrize("gain, stays", [(-0.04, False), (0.04, False), (0.08, True)])
def test_a_try_from_depth_0_goes_on_only_for_a_gain(gain, stays):
    rate = 0.5
    seconds = {0: 1.0, 1: (1 + rate) / (1 + gain)}
    controller = Controller(seconds, [0.0], 0)
    depths = follow(controller, [rate] * 60, seconds)
    assert (depths[-5:] == [1] * 5) == stays
    assert stays or sum(depths) < 8


def test_depths_that_no_round_reached_are_as_likely_as_the_rest():
    controller = Controller({0: 1.0, 8: 1.5}, [0.8], 8)
    controller.learn([[10, 0, 0, 0, 0, 0, 0, 0, 0]], [99], 32.0, 10)
    (tokens,) = controller.tokens(8)
    assert 1 < tokens < 3 < 1 + sum(0.8**i for i in range(1, 9))


class Cycle:
    """Goes through depths whatever happens."""

    def __init__(self, depths):
        self._depths = itertools.cycle(depths)
        self.depth = next(self._depths)
        self.learned = []

    def learn(self, accepted, left, seconds, rounds):
        self.learned.append((self.depth, np.array(accepted), np.array(left), rounds))
        self.depth = next(self._depths)


DRAFTERS = {
    "self": lambda: tiny.drafter("self"),
    "other": lambda: tiny.drafter("other"),
    "near": lambda: tiny.drafter("near"),
    "look-up": magicjax.LookUp,
    "small streaming": lambda: magicjax.SmallModel(
        tiny.model("near"), policy=magicjax.StreamingLLM(sinks=tiny.SINKS), budget=tiny.BUDGET
    ),
    "snapkv refreshed": lambda: magicjax.SelfSpeculation("snapkv", budget=16, refresh_every=2),
}
DEPTHS = (3, 0, 1, 0, 2)


def request_of(kind: str, **options):
    given = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return prepare(
        tiny.model(),
        tiny.prompts(8),
        drafter=DRAFTERS[kind](),
        tree=tiny.TREES["chain3"],
        **given,
    )


def replanned(kind: str, rounds: int = 2, depths=DEPTHS, **options):
    request = request_of(kind, **options)
    state = runner.start(request)[0]
    controller = Cycle(depths)
    state, calls, _, _ = run_replanned(request, sorted({*depths}), controller, state, rounds)
    return request, state, calls, controller


@pytest.mark.parametrize("kind", quick(DRAFTERS, "look-up"))
def test_the_greedy_text_is_the_same_at_whatever_depths(kind, tally):
    request, state, calls, controller = replanned(kind)
    found = list(np.asarray(state.output)[:, : tiny.NEW])
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), found)
    assert [depth for depth, _ in calls][:5] == list(DEPTHS)[: len(calls)]
    emitted = 1  # by the prompts' pass
    for (depth, of_call), (_, accepted, left, rounds) in zip(
        calls, controller.learned, strict=True
    ):
        assert of_call.sum(1).max() == rounds <= 2
        np.testing.assert_array_equal(accepted, of_call)
        assert not accepted[:, depth + 1 :].any()
        emitted = emitted + of_call @ (1 + np.arange(of_call.shape[1]))
        np.testing.assert_array_equal(left, np.maximum(tiny.NEW - emitted, 0))


def test_rows_that_end_early_want_nothing_more():
    """The end of the text is a token of the first row's that some others never come to."""
    texts = tiny.expected(8)
    eos = int(texts[0][4])
    _, state, _, controller = replanned("look-up", eos_token_id=[eos])
    ended = [eos in row for row in np.array(texts).tolist()]
    assert ended[0] and not all(ended)
    *_, (_, _, left, _) = controller.learned
    assert not left.any() and np.asarray(state.ended).all()
    early = [left[0] for _, _, left, _ in controller.learned[4:]]
    assert early and not any(early)


@pytest.mark.parametrize(
    ("kind", "known", "second"), [("other", 0, 0), ("near", 0, 1), ("other", 4, 3)]
)
def test_in_the_loop_depths_follow_what_the_first_call_accepted(kind, known, second):
    """Its time is not believed. Nothing of one drafter's is accepted, of the other's a little."""
    request = request_of(kind)
    state = runner.start(request)[0]
    controller = Controller({0: 1.0, 1: 1.3, 3: 1.9}, [0.9], 3, known)
    _, calls, _, _ = run_replanned(request, (0, 1, 3), controller, state, 4)
    assert [depth for depth, _ in calls][:2] == [3, second]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["near", "look-up"])
def test_under_naive_verification_it_is_the_very_text_of_plain_sampling(kind):
    sampling = dict(do_sample=True, seed=3)
    _, state, _, _ = replanned(kind, verifier="naive", **sampling)
    given = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    plain = magicjax.generate(tiny.model(), tiny.prompts(8), **given, **sampling)
    found = np.where(np.arange(tiny.NEW) < plain.lengths[:, None], state.output[:, : tiny.NEW], 47)
    np.testing.assert_array_equal(found, plain.tokens)


@pytest.mark.parametrize("kind", quick(["self", "near"], "self"))
def test_caches_hold_what_a_fresh_prefill_would(kind):
    """The target's, behind rounds of all depths; a row's last round may end it in the middle."""
    request, state, _, _ = replanned(kind)
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
    for found, wanted in zip(state.cache.k + state.cache.v, fresh.k + fresh.v, strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(
                np.asarray(found)[row, :, :length], np.asarray(wanted)[row, :, :length], atol=1e-5
            )


class ByCount(Cycle):
    """Takes the next depth from what the last call accepted."""

    def learn(self, accepted, left, seconds, rounds):
        counted = np.asarray(accepted).sum(0)
        self.depth = int((counted * np.arange(len(counted))).sum()) % 4


def texts_of(drafter) -> dict[tuple[int, ...], int]:
    """Returns how often each text came out of a loop whose depth changes with what was accepted."""
    counted: dict[tuple[int, ...], int] = {}
    for seed in range(test_joint.FEW_CALLS):
        request = prepare(
            test_joint.model(0),
            [test_joint.PROMPT] * test_joint.ROWS,
            drafter=drafter,
            tree=test_joint.CHAIN,
            max_new_tokens=test_joint.LENGTH,
            do_sample=True,
            seed=seed,
            eos_token_id=test_joint.EOS,
        )
        state = runner.start(request)[0]
        state, *_ = run_replanned(request, (0, 1, 2, 3), ByCount((2,)), state, 1)
        lengths = np.asarray(state.emitted)
        for row, length in zip(np.asarray(state.output).tolist(), lengths, strict=True):
            counted[tuple(row[:length])] = counted.get(tuple(row[:length]), 0) + 1
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "self"])
def test_the_sampled_text_keeps_the_targets_joint_distribution(kind):
    drafter = test_joint.small(1) if kind == "small" else test_joint.self_speculation()
    wanted = test_joint.joint(tuple(test_joint.PLAIN.items()))
    assert test_joint.p_value(texts_of(drafter), wanted) > 1e-3
