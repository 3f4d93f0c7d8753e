"""Statistics from counts, by hand."""

import numpy as np

from magicjax.decoding.stats import acceptance


def test_statistics_follow_from_the_histogram_and_the_lengths():
    # Two rows, depth 2: rounds that accepted 0, 1, 2 tokens.
    histogram = np.array([[1, 0, 2], [0, 1, 0]])
    emitted = np.array([8, 3])  # the first token of each row is prefill's
    # The paths went on 2 times with the first try and once with the second, then with the second.
    ranks = np.array([[[2, 0], [0, 2], [0, 0]], [[0, 1], [0, 0], [0, 0]]])
    found = acceptance(emitted, histogram, ranks, np.array([12, 3]))
    assert found == {
        "tau": 9 / 4,
        "tau_by_request": (7 / 3 + 2 / 1) / 2,
        "acceptance_if_reached": (3 / 4, 2 / 3),
        "acceptance_by_rank": ((2 / 4, 1 / 4), (0 / 3, 2 / 3)),
        "histogram": (1, 1, 2),
        "histogram_by_request": ((1, 0, 2), (0, 1, 0)),
        "nodes_per_round": 1 + 15 / 4,
        "acceptance_rate": 5 / 8,
        "acceptance_by_depth": (3 / 4, 2 / 4),
        "target_passes": 4,
        "rounds": 3,
        "emitted": 9,
        "drafted": 15,
        "accepted": 5,
    }
