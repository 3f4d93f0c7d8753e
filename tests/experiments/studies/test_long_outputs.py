"""Acceptance by quarter of an output, counted by hand."""

import numpy as np

from experiments.studies import long_outputs


def test_a_round_counts_in_the_quarter_in_which_it_begins():
    # One row of 8 new tokens, 2 drafted a round: it emits 1 (prefill), then 3, 1, 2 and 1.
    emitted = [np.array([n]) for n in (1, 4, 5, 7, 8)]
    share, drafted = long_outputs.by_part(emitted, depth=2, new_tokens=8, parts=4)
    # Rounds begin at 1, 4, 5 and 7 tokens; the last, which the limit may cut, is not counted.
    assert drafted == [2, 0, 4, 0]
    np.testing.assert_array_equal(share, [2 / 2, np.nan, (0 + 1) / 4, np.nan])


def test_finished_rows_are_not_counted():
    emitted = [np.array([1, 1]), np.array([4, 2]), np.array([4, 3]), np.array([4, 4])]
    share, drafted = long_outputs.by_part(emitted, depth=3, new_tokens=4, parts=4)
    assert drafted == [0, 3, 3, 0]
    np.testing.assert_array_equal(share, [np.nan, 0, 0, np.nan])
