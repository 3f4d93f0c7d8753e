"""The depth controller's rule, and exact text while the depth changes between calls."""

import itertools

import numpy as np
import pytest

import magicjax
from magicjax.decoding import runner
from magicjax.decoding.request import prepare
from magicjax.prediction.autotune.auto import run_adaptive
from magicjax.prediction.autotune.depth_controller import FIRST_PAUSE, HYSTERESIS, DepthController
from tests.magicjax import tiny
from tests.magicjax.decoding import test_joint
from tests.magicjax.kv_cache.test_loop_caches import fresh_prefill
from tests.quick import quick

SECONDS = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}
create = DepthController.create


def counts(rate: float, depth: int, rounds: int = 1000) -> list[float]:
    """Returns how many rounds accept 0, 1, ... tokens if each is accepted at a rate."""
    reached = [rate**i for i in range(depth + 1)]
    return [rounds * (a - b) for a, b in itertools.pairwise([*reached, 0.0])]


def follow(controller: DepthController, *arguments) -> list[int]:
    """Returns the depths of calls; see `run`."""
    return run(controller, *arguments)[0]


def run(
    controller: DepthController, rates: list, seconds=SECONDS, left=1000
) -> tuple[list[int], DepthController]:
    """Returns (the depths of calls during which tokens are accepted at these rates, the controller
    after them).

    Args:
      rates: of each call, one number or one per row.
      seconds: per round by depth.
      left: tokens that rows may still emit; rows with 0 run no rounds.
    """
    depths = []
    for call_rates in rates:
        depth = controller.depth
        depths.append(depth)
        per_row = np.broadcast_to(call_rates, np.shape(left) or np.shape(call_rates) or (1,))
        still = np.broadcast_to(left, per_row.shape)
        histogram = [
            counts(rate, depth, 1000 * bool(some))
            for rate, some in zip(per_row, still, strict=True)
        ]
        controller = controller.update(histogram, still, 32 * seconds[depth], 32)
    return depths, controller


def test_plain_decoding_follows_a_collapse_and_a_recovery_is_detected():
    controller = create(SECONDS, [0.9], 4)
    depths = follow(controller, [0.9] * 3 + [0.0] * 12 + [0.9] * 40)
    assert depths[:4] == [4] * 4  # acceptance collapses in the fourth call
    assert 0 in depths[4:7]
    assert set(depths[7:15]) <= {0, 1} and sum(depths[7:15]) <= 2
    assert depths[-1] == 4


def test_at_depth_0_the_pauses_between_probes_grow():
    depths = follow(create(SECONDS, [0.0], 0), [0.0] * 100)
    probes = np.flatnonzero(depths)
    assert probes[0] == FIRST_PAUSE
    np.testing.assert_array_equal(np.diff(probes)[:3], [2 * FIRST_PAUSE + 1, 9, 17])
    assert {depths[i] for i in probes} == {1}


@pytest.mark.parametrize("gain, changes", [(0.5 * HYSTERESIS, False), (2 * HYSTERESIS, True)])
def test_the_depth_changes_only_for_a_gain_above_the_hysteresis(gain, changes):
    """Rounds of depth 1 emit 1 + rate tokens; the time of a plain step decides."""
    rate = 0.5
    seconds = {0: 1.0, 1: (1 + gain) * (1 + rate)}
    assert (0 in follow(create(seconds, [rate], 1), [rate] * 4, seconds)) == changes


FLAT = {0: 1.0, 1: 1.4, 2: 1.6, 4: 2.1}


def test_the_row_that_needs_the_most_rounds_decides():
    """On average rows gain by a deeper chain; the slowest row does not."""
    unequal, average = [0.95, 0.95, 0.95, 0.5], [0.84] * 4
    assert follow(create(FLAT, [0.84], 2), [average] * 4, FLAT)[1:] == [4] * 3
    assert follow(create(FLAT, [0.84], 2), [unequal] * 4, FLAT) == [2] * 4
    # A slow row with few tokens left does not decide.
    assert follow(create(FLAT, [0.84], 2), [unequal] * 4, FLAT, [99, 99, 99, 9])[1:] == [4] * 3


def test_the_acceptance_of_ended_rows_counts_little():
    unequal = [0.95, 0.95, 0.95, 0.5]
    for last, depth in ((0, 4), (3, 2)):
        _, controller = run(create(FLAT, [0.84], 2), [unequal] * 4, FLAT)
        alone = np.where(np.arange(4) == last, 99, 0)
        assert follow(controller, [unequal] * 12, FLAT, alone)[1:] == [depth] * 11


def over_best_fixed(rates, rng, merged=False) -> float:
    """Returns how much later rows of these rates end than at the best fixed depth.

    With `merged`, the controller gets the average histogram for every row.
    """

    def time(controller):
        left, total = np.full(len(rates), 400), 0.0
        while left.any():
            depth, rounds = controller.depth, 0
            histogram = np.zeros((len(rates), 1 + max(FLAT)))
            while rounds < 32 and left.any():
                correct = rng.random((len(rates), depth)) < np.array(rates)[:, None]
                accepted = np.cumprod(correct, axis=1).sum(1)
                histogram[np.arange(len(rates)), accepted] += left > 0
                left, rounds = np.maximum(left - 1 - accepted, 0), rounds + 1
            total += rounds * FLAT[depth]
            if merged:
                histogram = np.tile(histogram.mean(0), (len(rates), 1))
            controller = controller.update(histogram, left, rounds * FLAT[depth], rounds)
        return total

    fixed = min(np.mean([time(Cycle([depth])) for _ in range(8)]) for depth in FLAT)
    adaptive = np.mean([time(create(FLAT, [np.mean(rates)], 2)) for _ in range(8)])
    return adaptive / fixed - 1


BATCHES = ([0.5], [0.9], [0.8] * 8, [0.95] * 7 + [0.5], [0.95] * 15 + [0.4], [0.9, 0.7, 0.5, 0.3])


@pytest.mark.parametrize("merged", [False, True])
def test_batches_end_within_10_percent_of_the_best_fixed_depth(merged):
    rng = np.random.default_rng(0)
    over = [over_best_fixed(rates, rng, merged) for rates in BATCHES]
    assert (max(over) < 0.1) != merged, over  # by the average some batch waits for its slowest row


def test_rounds_that_the_trial_has_counted_are_ignored():
    controller = create(FLAT, [0.84], 2, known_rounds=64)
    assert follow(controller, [0.0] * 3 + [0.84] * 3, FLAT) == [2, 2, 2, 0, 0, 1]
    # They do not count later either.
    assert follow(controller, [0.0] * 2 + [0.84] * 3, FLAT) == [2, 2, 2, 4, 4]


def test_a_trial_without_acceptance_is_soon_forgotten():
    assert follow(create(SECONDS, [0.0], 0), [0.9] * 20)[-1] == 4


def test_measured_times_correct_the_predicted_ones():
    """Rounds that take twice as long as predicted, at every depth, are slower than plain steps."""
    slow = {depth: (2.0 if depth else 1.0) * s for depth, s in SECONDS.items()}
    # The first call loads the program, so the second one is the first that counts.
    assert follow(create(SECONDS, [0.7], 2), [0.7] * 4, slow)[2:] == [0, 0]


def test_a_slower_machine_does_not_change_the_depth():
    _, controller = run(create(SECONDS, [0.9], 4), [0.9] * 3)
    slow = {depth: 3 * seconds for depth, seconds in SECONDS.items()}
    assert follow(controller, [0.9] * 5, slow) == [4] * 5


@pytest.mark.parametrize("gain, stays", [(-0.04, False), (0.04, False), (0.08, True)])
def test_a_probe_continues_only_for_a_gain(gain, stays):
    rate = 0.5
    seconds = {0: 1.0, 1: (1 + rate) / (1 + gain)}
    depths = follow(create(seconds, [0.0], 0), [rate] * 60, seconds)
    assert (depths[-5:] == [1] * 5) == stays
    assert stays or sum(depths) < 8


def test_depths_that_no_round_reached_have_the_overall_rate():
    controller = create({0: 1.0, 8: 1.5}, [0.8], 8)
    controller = controller.update([[10, 0, 0, 0, 0, 0, 0, 0, 0]], [99], 32.0, 10)
    (tokens,) = controller.tokens(8)
    assert 1 < tokens < 3 < 1 + sum(0.8**i for i in range(1, 9))


class Cycle:
    """A controller that cycles through depths and records its updates."""

    def __init__(self, depths):
        self._depths = itertools.cycle(depths)
        self.depth = next(self._depths)
        self.updates = []

    def update(self, histogram, left, seconds, rounds):
        self.updates.append((self.depth, np.array(histogram), np.array(left), rounds))
        self.depth = next(self._depths)
        return self


DRAFTERS = {
    "self": lambda: tiny.drafter("self"),
    "other": lambda: tiny.drafter("other"),
    "near": lambda: tiny.drafter("near"),
    "prompt-lookup": magicjax.PromptLookup,
    "small streaming": lambda: magicjax.SmallModel(
        tiny.model("near"), policy=magicjax.StreamingLLM(sinks=tiny.SINKS), budget=tiny.BUDGET
    ),
    "snapkv refreshed": lambda: magicjax.SelfSpeculation("snapkv", budget=16, refresh_every=2),
}
DEPTHS = (3, 0, 1, 0, 2)


def request_of(kind: str, **options):
    arguments = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return prepare(
        tiny.model(),
        tiny.prompts(8),
        drafter=DRAFTERS[kind](),
        tree=tiny.TREES["chain3"],
        **arguments,
    )


def adaptive(kind: str, rounds: int = 2, depths=DEPTHS, **options):
    request = request_of(kind, **options)
    state = runner.prefill_and_init(request)[0]
    controller = Cycle(depths)
    state, calls, _ = run_adaptive(request, sorted({*depths}), controller, state, rounds)
    return request, state, calls, controller


@pytest.mark.parametrize("kind", quick(DRAFTERS, "prompt-lookup"))
def test_greedy_text_does_not_depend_on_the_depths(kind, tally):
    request, state, calls, controller = adaptive(kind)
    texts = list(np.asarray(state.output)[:, : tiny.NEW])
    tally.compare(tiny.model(), tiny.prompts(8), tiny.expected(8), texts)
    assert [depth for depth, _ in calls][:5] == list(DEPTHS)[: len(calls)]
    emitted = 1  # by prefill
    for (depth, counted), (_, histogram, left, rounds) in zip(
        calls, controller.updates, strict=True
    ):
        assert counted.sum(1).max() == rounds <= 2
        np.testing.assert_array_equal(histogram, counted)
        assert not histogram[:, depth + 1 :].any()
        emitted = emitted + counted @ (1 + np.arange(counted.shape[1]))
        np.testing.assert_array_equal(left, np.maximum(tiny.NEW - emitted, 0))


def test_ended_rows_have_no_tokens_left():
    """EOS is a token of the first row that some other rows never emit."""
    texts = tiny.expected(8)
    eos = int(texts[0][4])
    _, state, _, controller = adaptive("prompt-lookup", eos_token_id=[eos])
    ended = [eos in row for row in np.array(texts).tolist()]
    assert ended[0] and not all(ended)
    *_, (_, _, left, _) = controller.updates
    assert not left.any() and np.asarray(state.ended).all()
    early = [left[0] for _, _, left, _ in controller.updates[4:]]
    assert early and not any(early)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "known", "second"),
    quick([("other", 0, 0), ("near", 0, 1), ("other", 4, 3)], ("near", 0, 1)),
)
def test_in_the_loop_depths_follow_the_acceptance_of_the_first_call(kind, known, second):
    """Its time does not count. One drafter has no acceptance, the other one a little."""
    request = request_of(kind)
    state = runner.prefill_and_init(request)[0]
    controller = create({0: 1.0, 1: 1.3, 3: 1.9}, [0.9], 3, known)
    _, calls, _ = run_adaptive(request, (0, 1, 3), controller, state, 4)
    assert [depth for depth, _ in calls][:2] == [3, second]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["near", "prompt-lookup"])
def test_naive_verification_gives_the_text_of_plain_sampling(kind):
    sampling = dict(do_sample=True, seed=3)
    _, state, _, _ = adaptive(kind, verifier="naive", **sampling)
    arguments = dict(max_new_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    plain = magicjax.generate(tiny.model(), tiny.prompts(8), **arguments, **sampling)
    tokens = np.where(np.arange(tiny.NEW) < plain.lengths[:, None], state.output[:, : tiny.NEW], 47)
    np.testing.assert_array_equal(tokens, plain.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick(["self", "near"], "self"))
def test_caches_equal_those_of_a_fresh_prefill(kind):
    """The target's cache, after rounds of all depths; the last round may end a row halfway."""
    request, state, _, _ = adaptive(kind)
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
    """The next depth depends on the acceptance of the last call."""

    def update(self, histogram, left, seconds, rounds):
        counted = np.asarray(histogram).sum(0)
        self.depth = int((counted * np.arange(len(counted))).sum()) % 4
        return self


def texts_of(drafter) -> dict[tuple[int, ...], int]:
    """Returns how often each text results from a loop whose depth depends on acceptance."""
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
        state = runner.prefill_and_init(request)[0]
        state, *_ = run_adaptive(request, (0, 1, 2, 3), ByCount((2,)), state, 1)
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
