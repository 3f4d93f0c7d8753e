"""Rounds to come are like those that were counted, and the slowest row decides."""

import numpy as np

from magicjax.autotune.to_come import drawn, slowest_rounds, slowest_tokens


def test_tokens_of_the_slowest_row_are_those_of_long_runs():
    """Two rows that always accept 0 and 4 of 4: the first decides, whatever the depth."""
    histogram = np.array([[10_000, 0, 0, 0, 0], [0, 0, 0, 0, 10_000]])
    np.testing.assert_allclose(slowest_tokens(histogram, np.array([40, 40])), 1.0, rtol=0.01)
    alone = slowest_tokens(histogram[1:], np.array([60]))
    np.testing.assert_allclose(alone, [2, 3, 4, 5], rtol=0.01)
    # A slow row that wants little does not hold the others up.
    few = slowest_tokens(histogram, np.array([12, 60]))
    np.testing.assert_allclose(few, [2, 3, 4, 5], rtol=0.01)


def test_tokens_of_a_round_are_the_mean_of_many_in_one_row():
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 4, 5000)
    histogram = np.bincount(accepted, minlength=4)[None]
    wanted = [1 + np.minimum(accepted, depth).mean() for depth in (1, 2, 3)]
    np.testing.assert_allclose(slowest_tokens(histogram, np.array([3000])), wanted, rtol=0.02)


def test_eight_rounds_of_all_rows_stand_beside_a_rows_own():
    """One row accepted nothing in 8 rounds, one everything, so half did; one had no round."""
    found = drawn(np.array([[8, 0], [0, 8], [0, 0]]), 4000)
    np.testing.assert_allclose(found.mean((0, 2)), [4 / 16, 12 / 16, 1 / 2], atol=0.01)


def test_rounds_that_are_known_come_first():
    before, nothing = np.array([7, 9]), np.array([[0, 4], [0, 4]])
    assert slowest_rounds(before, np.array([0, 0]), nothing) == 9
    assert slowest_rounds(before, np.array([10, 0]), nothing) == 7 + 5
    assert slowest_rounds(before, np.array([2000, 0]), nothing) == 7 + 1000


def test_the_slowest_of_many_rows_is_slower_than_their_mean():
    """100 tokens in rounds of 1 or 2: 66.7 rounds, 2.7 more or less; the slowest of 64 some 73."""
    alike = np.full((64, 2), 1000)
    found = slowest_rounds(np.zeros(64, int), np.full(64, 100), alike)
    assert 71 < found < 76
