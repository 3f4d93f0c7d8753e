"""Counts and rates, by hand and by simulated rounds."""

import numpy as np
import pytest

from magicjax.decoding.counts import Counts, by_row, tau_by_request, tried_and_accepted
from magicjax.decoding.stats import Stats, summed

# Two rows, depth 2: rounds that accepted 0, 1, 2 tokens.
HISTOGRAM = np.array([[1, 0, 2], [0, 1, 0]])
EMITTED = np.array([8, 3])  # the first token of each row is prefill's
# The paths went on 2 times with the first try and once with the second, then with the second.
RANKS = np.array([[[2, 0], [0, 2], [0, 0]], [[0, 1], [0, 0], [0, 0]]])


def test_statistics_follow_from_the_histogram_and_the_lengths():
    rows = by_row(EMITTED, HISTOGRAM, RANKS, np.array([12, 3]))
    times = dict(prefill_s=1.0, decode_s=2.0, compile_s=0.0, compilations=0)
    caches = dict(kv_bytes_target=1, kv_bytes_draft=1, attention_backend="xla")
    found = Stats(**summed(rows), rounds=3, **times, **caches)
    expected = {
        "tau": 9 / 4,
        "tau_by_request": (7 / 3 + 2 / 1) / 2,
        "acceptance_if_reached": (3 / 4, 2 / 3),
        "acceptance_by_rank": ((2 / 4, 1 / 4), (0 / 3, 2 / 3)),
        "histogram": (1, 1, 2),
        "histogram_by_request": ((1, 0, 2), (0, 1, 0)),
        "at_least": (4, 3, 2),
        "nodes_per_round": 1 + 15 / 4,
        "acceptance_rate": 5 / 8,
        "acceptance_by_depth": (3 / 4, 2 / 4),
        "target_passes": 4,
        "rounds": 3,
        "emitted": 9,
        "drafted": 15,
        "accepted": 5,
        "block_efficiency": 1 + 5 / 4,
        "tokens_per_s": 9 / 2,
    }
    assert {name: getattr(found, name) for name in expected} == expected


def test_adding_nothing_changes_nothing():
    row = by_row(EMITTED, HISTOGRAM, RANKS, np.array([12, 3]))[0]
    assert row + Counts() == Counts() + row == row


def test_rows_that_do_not_speculate_lower_no_acceptance():
    histogram = np.array([[1, 0, 2], [4, 0, 0]])
    arguments = np.array([8, 5]), histogram, RANKS[..., :0], np.array([12, 0])
    drafts, plain = by_row(*arguments, speculative=[True, False])
    assert plain.tried == (0, 0) and plain.perfect == 0 and plain.tau == 1
    assert (drafts + plain).acceptance_rate == drafts.acceptance_rate == 4 / 6
    assert (drafts + plain).acceptance_if_reached == drafts.acceptance_if_reached


def test_nothing_has_no_rounds_and_rates_of_0():
    none = Counts()
    assert (none.target_passes, none.accepted, none.tau, none.acceptance_rate) == (0, 0, 0.0, 0.0)
    assert none.acceptance_by_depth == none.acceptance_if_reached == none.at_least == ()
    assert none.block_efficiency == none.nodes_per_round == 1


def test_rows_without_rounds_have_no_tau():
    (row,) = by_row(np.array([4]), np.array([[1, 1]]), np.zeros((1, 2, 1), int), np.array([2]))
    assert tau_by_request([row, Counts()]) == row.tau == 1.5
    assert tau_by_request([Counts()]) == 0.0


def simulated(rng, depth: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (histogram, ranks) of rounds that accept each token with probability 0.6."""
    histogram, ranks = np.zeros(5, int), np.zeros((5, 2), int)
    for _ in range(rounds):
        tries = rng.choice(3, size=depth, p=[0.4, 0.2, 0.4])  # 2: none is accepted
        accepted = int(np.argmax(np.append(tries, 2) == 2))
        histogram[accepted] += 1
        for level in range(accepted):
            ranks[level, tries[level]] += 1
    return histogram, ranks


def test_the_counts_of_calls_with_different_trees_are_those_of_all_their_rounds():
    rng = np.random.default_rng(0)
    calls = [(depth, *simulated(rng, depth, 3000)) for depth in (4, 2, 0)]
    histogram, ranks = (sum(call[i] for call in calls) for i in (1, 2))
    histograms = [(depth, of_call[None]) for depth, of_call, _ in calls]
    (found,) = by_row([1], histogram[None], ranks[None], [0], histograms)
    assert found.perfect == (4 + 2) * 3000
    # Rounds that end with their tree have not failed.
    np.testing.assert_allclose(found.acceptance_if_reached, 0.6, atol=0.05)
    np.testing.assert_allclose(found.acceptance_by_rank, [[0.4, 0.2]] * 4, atol=0.05)
    assert found.acceptance_by_depth[2] < 0.6**3 / 2
    twice = found + found
    assert twice.histogram == tuple(2 * histogram) and twice.perfect == 2 * found.perfect
    for name in ("acceptance_by_rank", "acceptance_if_reached", "acceptance_rate"):
        assert getattr(twice, name) == getattr(found, name)


@pytest.mark.parametrize("histogram", [[1, 2, 3, 0], [[1, 2, 3, 0]] * 2])
def test_depths_beyond_the_tree_have_no_counts(histogram):
    tried, accepted = tried_and_accepted(histogram, 2, 3)
    rows = np.shape(histogram)[:-1]
    np.testing.assert_array_equal(tried, np.broadcast_to([6, 5, 0], (*rows, 3)))
    np.testing.assert_array_equal(accepted, np.broadcast_to([5, 3, 0], (*rows, 3)))
