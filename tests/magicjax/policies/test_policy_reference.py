"""The references of the policies, on cases with results computed by hand."""

import numpy as np
import pytest

from tests.magicjax import policy_reference as reference


def row(keys, q=None, values=None, recent=1) -> reference.Row:
    """Returns a row from nested lists: keys [n][K][D]; queries are zeros unless given."""
    keys = np.asarray(keys, np.float64)
    q = np.zeros_like(keys) if q is None else np.asarray(q, np.float64)
    values = np.ones_like(keys) if values is None else np.asarray(values, np.float64)
    return reference.Row(q, keys, values, recent)


def even(n, heads=1, kv_heads=1, recent=1):
    """Returns a row of zero queries: query p gives 1 / (p + 1) to each position it sees."""
    return row(np.ones((n, kv_heads, 2)), np.zeros((n, heads, 2)), recent=recent)


def test_pins_are_the_highest_in_order_and_the_earlier_of_equals():
    assert reference.pinned(np.array([[1.0, 3, 2, 3, 3], [0, 0, 0, 0, 0]]), 2) == [[1, 3], [0, 1]]


def test_zero_queries_attend_evenly_to_what_they_see():
    assert reference.mass(even(3), 3)[0] == pytest.approx([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])
    assert reference.h2o(even(3))[0] == pytest.approx([11 / 6, 5 / 6])
    assert reference.mass(even(3), 2)[0] == pytest.approx([5 / 6, 5 / 6, 1 / 3])
    # A window longer than the row has all queries; two heads count twice.
    assert reference.mass(even(3, heads=4, kv_heads=2), 9)[1] == pytest.approx(
        [22 / 6, 10 / 6, 4 / 6]
    )


def test_attention_divides_by_the_root_of_the_head_dimension_if_scaled():
    # D = 4: the scores of the last query are 0 and 4, or 0 and 2 when scaled.
    keys, q = [[[0, 0, 0, 0]], [[2, 0, 0, 0]]], [[[0, 0, 0, 0]], [[2, 0, 0, 0]]]
    last = reference.attention(row(keys, q))[1, 0]
    assert last == pytest.approx([1 / (1 + np.e**2), np.e**2 / (1 + np.e**2)])
    last = reference.attention(row(keys, q), scaled=False)[1, 0]
    assert last == pytest.approx([1 / (1 + np.e**4), np.e**4 / (1 + np.e**4)])


def test_heads_of_a_kv_head_are_neighbours():
    given = even(2, heads=6, kv_heads=2)
    assert [list(given.heads_of(k)) for k in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_pooling_reaches_half_a_kernel_to_both_sides():
    scores = np.array([[0.0, 9, 0, 0, 3]])
    assert reference.pooled(scores, 3, "max").tolist() == [[9, 9, 9, 3, 3]]
    assert reference.pooled(scores, 3, "avg").tolist() == [[3, 3, 3, 1, 1]]
    assert reference.pooled(scores, 1, "max").tolist() == scores.tolist()
    assert reference.pooled(-scores - 1, 3, "max").tolist() == [[-1, -1, -1, -1, -1]]


def test_snapkv_pools_the_candidates_only():
    # Four tokens, two in the ring: the last query gives 1/4 to each of 0 and 1; their neighbour in
    # the ring does not count.
    given = even(4, recent=2)
    assert reference.snapkv(given, window=1, kernel=3, pooling="avg")[0] == pytest.approx(
        [1 / 6] * 2
    )
    assert reference.snapkv(given, window=1, kernel=3)[0] == pytest.approx([1 / 4] * 2)
    # A candidate inside the window gets attention from its own query on.
    scores = reference.snapkv(even(4, recent=1), window=2, kernel=1)[0]
    assert scores == pytest.approx([7 / 12, 7 / 12, 7 / 12])
    scores = reference.snapkv(even(4, recent=1), window=3, kernel=1)[0]
    assert scores == pytest.approx([13 / 12, 13 / 12, 7 / 12])


def test_tova_averages_the_last_query_over_all_heads():
    # D = 1, two KV heads: the last query of head 0 prefers position 0 by ln 3, that of head 1 none.
    keys = [[[np.log(3)], [0]], [[0], [0]], [[0], [0]]]
    q = [[[0], [0]], [[0], [0]], [[1], [1]]]
    scores = reference.tova(row(keys, q))
    assert scores[0] == pytest.approx([(3 / 5 + 1 / 3) / 2, (1 / 5 + 1 / 3) / 2])
    assert scores[1] == pytest.approx(scores[0])


def test_streaming_pins_the_first():
    assert reference.pinned(reference.streaming(even(9)), 3) == [[0, 1, 2]]


def test_the_pyramid_is_a_line_around_its_mean():
    assert reference.pyramid(20, 3).tolist() == [39, 20, 1]
    assert reference.pyramid(8, 4, beta=2).tolist() == pytest.approx([12, 28 / 3, 20 / 3, 4])
    assert reference.pyramid(8, 1).tolist() == [8]


def test_keydiff_prefers_the_key_that_points_elsewhere():
    # Unit keys (1, 0), (1, 0), (0, 1): their mean is (2, 1) / 3 for any key lengths.
    keys = [[[1, 0]], [[5, 0]], [[0, 7]], [[-9, -9]]]
    root = 5**0.5
    assert reference.keydiff(row(keys))[0] == pytest.approx([-2 / root, -2 / root, -1 / root])


def test_knorm_prefers_short_keys():
    assert reference.knorm(row([[[3, 4]], [[0, 1]], [[9, 9]]]))[0].tolist() == [-5, -1]


def test_a_rotation_rotates_each_half_with_its_pair():
    turned = reference.rotation(2, np.array([np.pi / 4, 0])) @ [1, 5, 2, 6]
    assert turned == pytest.approx([-2, 5, 1, 6])  # (1, 2) by a right angle, (5, 6) not at all


def test_expected_attention_of_equal_queries():
    # Without rotation and covariance: the attention of that one query, times the values' norms.
    keys = [[[1, 0]], [[0, 0]], [[0, 0]]]
    q = [[[2**0.5 * np.log(3), 0]]] * 3
    values = [[[1, 0]], [[6, 8]], [[1, 1]]]
    scores = reference.expected_attention(row(keys, q, values), None)
    assert scores[0] == pytest.approx([3 / 4, 10 / 4])
    scores = reference.expected_attention(row(keys, q, values), None, epsilon=0.5)
    assert scores[0] == pytest.approx([5 / 4, 10 * 3 / 4])


def test_expected_attention_uses_the_covariance_of_the_queries():
    # D = 2: queries (c, 0) and (-c, 0), mean zero, variance c^2 in x; k = (1, 0): c^2 / 4 = ln 3.
    c = 2 * np.log(3) ** 0.5
    keys, q = [[[1, 0]], [[0, 1]], [[0, 0]], [[0, 0]]], [[[c, 0]], [[-c, 0]]] * 2
    given = row(keys, q, recent=2)
    root = 2**0.5
    assert reference.expected_attention(given, None)[0] == pytest.approx(
        [3 / 4 * root, 1 / 4 * root]
    )
    scores = reference.expected_attention(given, None, covariance=False)
    assert scores[0] == pytest.approx([root / 2, root / 2])
    # A window of one query has a mean, but no covariance.
    scores = reference.expected_attention(given, None, window=1)[0]
    assert scores[0] / scores[1] == pytest.approx(np.exp(-c / root))


def test_expected_attention_undoes_and_reapplies_the_rotation():
    # Every query is (s, 0) at position 0; the next position is n = 2, a right angle per position,
    # so it will be (-s, 0) there, and nothing on average over a full turn.
    inverse = np.array([np.pi / 2])
    s = 2**0.5 * np.log(3)
    q = [[reference.rotation(p, inverse) @ [s, 0]] for p in range(2)]
    for future, odds in ((1, 1 / 3), (2, 3**-0.5), (4, 1)):
        given = row([[[1, 0]], [[0, 0]]], q, recent=0)
        scores = reference.expected_attention(given, inverse, future=future)[0]
        assert scores[0] / scores[1] == pytest.approx(odds)
