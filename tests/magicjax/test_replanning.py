"""The depth of a chain changes between calls of the loop, by rule, and the text stays exact."""

import itertools

import numpy as np
import pytest

import magicjax
from magicjax import execution
from magicjax.auto import run_replanned
from magicjax.replanning import FIRST_PAUSE, HYSTERESIS, Controller
from magicjax.request import prepare
from tests.magicjax import test_joint, tiny
from tests.magicjax.test_loop_caches import fresh_prefill
from tests.quick import quick

SECONDS = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}


def counts(rate: float, depth: int, rounds: int = 1000) -> list[float]:
    """Returns how many rounds accept 0, 1, ... tokens if each is accepted at a rate."""
    going = [rate**i for i in range(depth + 1)]
    return [rounds * (a - b) for a, b in itertools.pairwise([*going, 0.0])]


def follow(controller: Controller, rates: list[float], seconds=SECONDS) -> list[int]:
    """Returns the depths of calls during which tokens are accepted at these rates."""
    depths = []
    for rate in rates:
        depths.append(controller.depth)
        controller.learn(counts(rate, controller.depth), 32 * seconds[controller.depth], 32)
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


def test_the_row_that_needs_most_rounds_decides():
    """On average rows gain by deeper chains; the row for which all wait does not."""
    seconds, rates = {0: 1.0, 1: 1.4, 2: 1.6, 4: 2.1}, [0.55, 0.8, 0.9, 0.9]
    tokens = [1.48, 1.83, 1.9, 2.16]  # the others have 1.55, 1.99, 2.39, 2.74
    alike, unlike = Controller(seconds, rates, 2), Controller(seconds, rates, 2, tokens)
    assert follow(alike, [0.75] * 4, seconds)[1:] == [4] * 3
    assert follow(unlike, [0.75] * 4, seconds) == [2] * 4
    # What all accept less of, it accepts less of: then nothing pays, but it looks again.
    assert follow(unlike, [0.1] * 12, seconds)[-1] == 0
    assert follow(unlike, [0.9] * 60, seconds)[-1] == 2


def test_a_trial_that_accepted_nothing_says_nothing_about_the_slowest_row():
    controller = Controller(SECONDS, [0.0], 0, [1.0, 1.0])
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
    controller.learn([10, 0, 0, 0, 0, 0, 0, 0, 0], 32.0, 10)
    tokens = controller.tokens_per_second(8) * 1.5
    assert 1 < tokens < 3 < 1 + sum(0.8**i for i in range(1, 9))


class Cycle:
    """Goes through depths whatever happens."""

    def __init__(self, depths):
        self._depths = itertools.cycle(depths)
        self.depth = next(self._depths)
        self.learned = []

    def learn(self, accepted, seconds, rounds):
        self.learned.append((self.depth, np.array(accepted), rounds))
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


def replanned(kind: str, rounds: int = 2, depths=DEPTHS, **options):
    request = prepare(
        tiny.model(),
        tiny.prompts(8),
        drafter=DRAFTERS[kind](),
        tree=tiny.TREES["chain3"],
        max_new_tokens=tiny.NEW,
        eos_token_id=tiny.NEVER,
        **options,
    )
    state = execution.start(request)[0]
    controller = Cycle(depths)
    state, calls, _, _ = run_replanned(request, sorted({*depths}), controller, state, rounds)
    return request, state, calls, controller


@pytest.mark.parametrize("kind", quick(DRAFTERS, "look-up"))
def test_the_greedy_text_is_the_same_at_whatever_depths(kind, tally):
    request, state, calls, controller = replanned(kind)
    found = list(np.asarray(state.output)[:, : tiny.NEW])
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), found)
    assert [depth for depth, _ in calls][:5] == list(DEPTHS)[: len(calls)]
    for (depth, of_call), (_, accepted, rounds) in zip(calls, controller.learned, strict=True):
        assert of_call.sum(1).max() == rounds <= 2
        assert not accepted[depth + 1 :].any()


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

    def learn(self, accepted, seconds, rounds):
        self.depth = int((np.asarray(accepted) * np.arange(len(accepted))).sum()) % 4


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
        state = execution.start(request)[0]
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
