"""The best tree against every tree, against the largest worths, and against wrong rules."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.trees.sequoia import expected_tokens, optimal
from magicjax.trees.token_tree import MAX_NODES, TokenTree

SMALL = 7  # nodes up to which every tree is tried
EXACT = 1e-12


def by_rank(rng, ranks, rows=1):
    """Falls with rank, as a drafter's own order would have it; the same at every depth."""
    return -np.sort(-rng.dirichlet(np.ones(ranks + 1))[:ranks])


def by_depth(rng, ranks, rows):
    return -np.sort(-rng.dirichlet(np.ones(ranks + 1), rows)[:, :ranks], -1)


def not_falling(rng, ranks, rows):
    return rng.dirichlet(np.full(ranks + 1, 0.5), rows)[:, :ranks]


def with_zeros(rng, ranks, rows):
    table = not_falling(rng, ranks, rows)
    return table * (rng.random(table.shape) < 0.6)


TABLES = {f.__name__: f for f in (by_rank, by_depth, not_falling, with_zeros)}


@functools.cache
def every_tree(nodes) -> list[tuple[int, ...]]:
    """All parents of `nodes` nodes, in every numbering."""
    return [(-1, *up) for up in itertools.product(*(range(n) for n in range(1, nodes)))]


def outline(parents) -> list[tuple[int, int, int]]:
    """Returns parent, depth and rank of each node after the root, by following the parents."""
    depths, nodes = [0], []
    for node, parent in enumerate(parents[1:], 1):
        depths.append(depths[parent] + 1)
        nodes.append((parent, depths[node], parents[1:node].count(parent)))
    return nodes


def value(parents, table) -> float:
    """The definition: the root's 1, and each node's product of acceptance along its path."""
    worth = [1.0]
    for parent, depth, rank in outline(parents):
        worth.append(worth[parent] * table[min(depth, len(table)) - 1][rank])
    return sum(worth)


@functools.cache
def admitted(nodes, depth, ranks) -> list[tuple[int, ...]]:
    return [
        parents
        for parents in every_tree(nodes)
        if all(d <= depth and k < ranks for _, d, k in outline(parents))
    ]


def brute_force(table, nodes, depth) -> tuple[float, int]:
    """Returns the most expected tokens of any tree of at most `nodes`, and the most nodes."""
    table = np.atleast_2d(table)
    sizes = {n: admitted(n, depth, table.shape[1]) for n in range(1, nodes + 1)}
    best = max(value(parents, table.tolist()) for trees in sizes.values() for parents in trees)
    return best, max(n for n, trees in sizes.items() if trees)


def draws(kind, count, seed):
    """Yields a table, nodes and a depth, of every small size."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ranks, rows = (int(n) for n in rng.integers(1, 5, 2))
        table = TABLES[kind](rng, ranks, rows)
        yield table, int(rng.integers(2, SMALL + 1)), int(rng.integers(1, SMALL + 1))


def greedy(table, nodes, depth) -> TokenTree:
    """Adds the node of the largest worth that has a parent and all its earlier siblings.

    Where acceptance falls with rank, nodes follow each other in falling worth, so these are the
    largest worths of the full tree, and their sum cannot be beaten. Elsewhere it is short-sighted.
    """
    table = np.atleast_2d(table)
    parents, worth, depths, count = [-1], [1.0], [0], [0]
    while len(parents) < nodes:
        offers = [
            (worth[n] * table[min(depths[n], len(table) - 1), count[n]], -n)
            for n in range(len(parents))
            if depths[n] < depth and count[n] < table.shape[1]
        ]
        if not offers:
            break
        gain, parent = max(offers)
        parents.append(-parent)
        worth.append(gain)
        depths.append(depths[-parent] + 1)
        count.append(0)
        count[-parent] += 1
    return TokenTree(tuple(parents))


def blind_to_depth(table, nodes, depth) -> TokenTree:
    """The best tree if the root's children spoke for all: the paper's assumption."""
    return optimal(np.atleast_2d(table)[0], nodes, depth)


@pytest.mark.parametrize("kind", TABLES)
def test_no_tree_of_up_to_seven_nodes_is_expected_to_emit_more(kind):
    for table, nodes, depth in draws(kind, count=150, seed=1):
        tree = optimal(table, nodes, depth)
        best, most = brute_force(table, nodes, depth)
        assert value(tree.parents, np.atleast_2d(table).tolist()) == pytest.approx(best, abs=EXACT)
        assert tree.num_nodes == most


@pytest.mark.parametrize(("kind", "wrong"), [("not_falling", greedy), ("by_depth", blind_to_depth)])
def test_every_tree_finds_out_a_rule_that_is_wrong(kind, wrong):
    """The control of the test above: the same draws, and rules that only look right."""
    short = [
        brute_force(table, nodes, depth)[0] - expected_tokens(wrong(table, nodes, depth), table)
        for table, nodes, depth in draws(kind, count=150, seed=1)
    ]
    assert min(short) > -EXACT  # nothing beats the best of all
    assert max(short) > 0.01


@pytest.mark.parametrize("nodes", [2, 17, 64, MAX_NODES])
@pytest.mark.parametrize("kind", ["by_rank", "by_depth"])
def test_a_large_tree_holds_the_largest_worths_where_acceptance_falls_with_rank(kind, nodes):
    rng = np.random.default_rng(nodes)
    for depth in (3, 9, 32):
        table = TABLES[kind](rng, 16, 12)
        tree, largest = optimal(table, nodes, depth), greedy(table, nodes, depth)
        assert tree.num_nodes == largest.num_nodes == nodes
        assert tree.depth <= depth
        wanted = expected_tokens(largest, table)
        assert expected_tokens(tree, table) == pytest.approx(wanted, abs=1e-10)


@pytest.mark.parametrize("kind", TABLES)
def test_children_take_their_parents_ranks_in_order_and_nodes_come_breadth_first(kind):
    rng = np.random.default_rng(2)
    for nodes in (5, 40, 200):
        tree = optimal(TABLES[kind](rng, 6, 4), nodes, 8)
        assert list(tree.parents) == sorted(tree.parents)
        assert list(tree.node_depths) == sorted(tree.node_depths)


def test_a_child_that_is_always_accepted_makes_a_chain():
    assert optimal([0.98, 0.01, 0.01], 9, 32) == magicjax.chain(8)
    assert optimal([1.0], 5, 4) == magicjax.chain(4)


def test_ranks_that_are_rarely_accepted_but_alike_make_a_wide_tree():
    tree = optimal([0.05] * 16, 17, 16)
    assert tree == magicjax.expansion((16,))
    assert optimal([0.25] * 4, 21, 5) == magicjax.expansion((4, 4))


@pytest.mark.parametrize("nodes", [2, 5, 9])
def test_a_depth_of_one_is_a_star(nodes):
    assert optimal([0.9] + [0.01] * 7, nodes, 1) == magicjax.expansion((nodes - 1,))


def test_the_example_of_the_docstring():
    tree = optimal([0.6, 0.3], 4, 3)
    assert tree.parents == (-1, 0, 0, 1)
    assert expected_tokens(tree, [0.6, 0.3]) == pytest.approx(2.26, abs=EXACT)
    assert expected_tokens(magicjax.chain(3), [0.6, 0.3]) == pytest.approx(2.176, abs=EXACT)


def test_a_rank_is_added_for_the_sake_of_the_next():
    tree = optimal([0.1, 0.8], 3, 2)
    assert tree == magicjax.expansion((2,))
    assert expected_tokens(tree, [0.1, 0.8]) > expected_tokens(magicjax.chain(2), [0.1, 0.8])


def test_each_depth_follows_its_own_row_and_deeper_ones_the_last():
    table = [[0.3, 0.3, 0.3], [0.9, 0.05, 0.0]]
    tree = optimal(table, 10, 9)
    assert tree.parents == (-1, 0, 0, 0, 1, 2, 3, 4, 5, 6)  # wide at the root, then three chains
    assert expected_tokens(tree, table) == pytest.approx(1 + 3 * 0.3 * (1 + 0.9 + 0.9**2))
    assert optimal(table + [table[-1]] * 5, 10, 9) == tree


@pytest.mark.parametrize(("ranks", "depth", "most"), [(1, 4, 5), (2, 1, 3), (2, 3, 15), (3, 2, 13)])
def test_a_tree_is_smaller_only_where_ranks_and_depth_admit_no_more(ranks, depth, most):
    acceptance = np.full(ranks, 0.3)
    assert optimal(acceptance, most, depth) == magicjax.expansion((ranks,) * depth)
    assert optimal(acceptance, MAX_NODES, depth) == magicjax.expansion((ranks,) * depth)
    assert optimal(acceptance, most - 1, depth).num_nodes == most - 1


def test_nodes_that_gain_nothing_are_added_too():
    tree = optimal([[0.5, 0.0], [0.0, 0.0]], 7, 2)
    assert tree.num_nodes == 7
    assert expected_tokens(tree, [[0.5, 0.0], [0.0, 0.0]]) == 1.5
    assert optimal([0.0, 0.0, 0.0], 30, 4).num_nodes == 30


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    "rival",
    [
        magicjax.chain(4),
        magicjax.chain(24),
        magicjax.expansion((2, 2, 1)),
        magicjax.expansion((1, 1, 3, 1, 1, 1, 1, 1)),
        magicjax.expansion((4, 4, 4)),
    ],
    ids=lambda tree: f"{tree.num_nodes}_nodes_depth_{tree.depth}",
)
def test_no_chain_or_expansion_of_as_many_nodes_is_expected_to_emit_more(kind, rival):
    rng = np.random.default_rng(3)
    for _ in range(5):
        table = TABLES[kind](rng, 4, 5)
        tree = optimal(table, rival.num_nodes, rival.depth)
        assert tree.num_nodes == rival.num_nodes
        assert expected_tokens(tree, table) >= expected_tokens(rival, table) - EXACT


@pytest.mark.parametrize("kind", TABLES)
def test_more_nodes_or_more_depth_never_emit_less(kind):
    table = TABLES[kind](np.random.default_rng(4), 3, 3)
    tokens = np.array(
        [[expected_tokens(optimal(table, n, d), table) for d in range(1, 6)] for n in range(2, 15)]
    )
    assert (np.diff(tokens, axis=0) >= -EXACT).all()
    assert (np.diff(tokens, axis=1) >= -EXACT).all()


def test_expected_tokens_are_those_of_rounds_played_out():
    rng = np.random.default_rng(5)
    table = np.array([[0.5, 0.2, 0.1], [0.8, 0.1, 0.0], [0.3, 0.6, 0.1]])
    tree = TokenTree((-1, 0, 0, 1, 0, 1, 3, 3, 7, 8))
    rounds, emitted = 20_000, []
    for _ in range(rounds):
        node, count = 0, 1  # the bonus token
        while True:
            shares = table[min(tree.node_depths[node], 2)]
            rank = int(np.searchsorted(np.cumsum(shares), rng.random(), side="right"))
            node = tree.children[node, rank] if rank < tree.width else -1
            if node < 0:
                break
            count += 1
        emitted.append(count)
    error = np.std(emitted) / np.sqrt(rounds)
    assert abs(np.mean(emitted) - expected_tokens(tree, table)) < 4 * error
    assert abs(np.mean(emitted) - expected_tokens(tree, table[:1])) > 8 * error  # its control


def test_expected_tokens_of_trees_worked_out_by_hand():
    assert expected_tokens(magicjax.chain(2), [0.5]) == 1.75
    assert expected_tokens(magicjax.expansion((2,)), [0.5, 0.25]) == 1.75
    assert expected_tokens(magicjax.chain(3), [[0.5], [0.25]]) == 1 + 0.5 + 0.125 + 0.03125
    assert expected_tokens(TokenTree((-1,)), [0.5]) == 1.0
    siblings_apart = TokenTree((-1, 0, 1, 0))  # rank is the place among siblings
    assert expected_tokens(siblings_apart, [0.5, 0.25]) == 1 + 0.5 + 0.25 + 0.25


def test_any_array_is_taken_and_sums_that_rounding_lifts_above_one():
    tree = optimal([[0.5, 0.5], [0.75, 0.25]], 9, 4)
    for make in (np.float32, jnp.asarray):
        table = make([[0.5, 0.5], [0.75, 0.25]])
        assert optimal(table, np.int64(9), np.int32(4)) == tree
        assert expected_tokens(tree, table) == expected_tokens(tree, np.asarray(table).tolist())
    assert optimal([0.5, 0.5 + 5e-7], 5, 2).num_nodes == 5


GOOD = [0.5, 0.25]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((GOOD, 1, 4), "nodes=1 leaves nothing to speculate: it counts the root, .* at least 2"),
        ((GOOD, -3, 4), "nodes=-3 leaves nothing"),
        ((GOOD, MAX_NODES + 1, 4), "nodes=257: at most 256 are supported, so ask for fewer"),
        ((GOOD, 8, 0), "depth=0 leaves nothing to speculate: give at least 1"),
        ((0.5, 8, 4), r"acceptance has 0 axes: give \[ranks\] or \[depths, ranks\]"),
        (([[GOOD]], 8, 4), r"acceptance has 3 axes: give \[ranks\] or \[depths, ranks\]"),
        (([], 8, 4), r"shape \(0,\) is empty: give at least one rank, and one depth"),
        ((np.ones((0, 3)), 8, 4), r"shape \(0, 3\) is empty"),
        ((np.ones((3, 0)), 8, 4), r"shape \(3, 0\) is empty"),
        (([GOOD, [0.5]], 8, 4), "no table of numbers .* short rows filled up with 0"),
        (([0.5, float("nan")], 8, 4), r"acceptance\[1\] is nan: give 0 where .* never tried"),
        (([GOOD, [0.5, 1.5]], 8, 4), r"acceptance\[1, 1\] is 1.5: .* from 0 to 1"),
        (([0.5, -0.1], 8, 4), r"acceptance\[1\] is -0.1: .* from 0 to 1"),
        (([float("inf"), 0.0], 8, 4), r"acceptance\[0\] is inf: .* from 0 to 1"),
        (([0.8, 0.5], 8, 4), "acceptance sums to 1.3, which must be at most 1, .* give shares"),
        (([GOOD, [0.5, 0.50001]], 8, 4), r"acceptance\[1\] sums to 1.00001, .* at most 1"),
    ],
)
def test_bad_input_is_refused_with_the_value_and_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        optimal(*call)


@pytest.mark.parametrize(
    ("acceptance", "message"),
    [
        (GOOD, "has 3 children, but acceptance has 2 ranks: add ranks, of 0 if"),
        ([0.8, 0.5, 0.1], "acceptance sums to 1.4"),
        ([0.5, float("nan"), 0.0], r"acceptance\[1\] is nan"),
    ],
)
def test_expected_tokens_of_a_table_that_does_not_fit_are_refused(acceptance, message):
    with pytest.raises(ValueError, match=message):
        expected_tokens(magicjax.expansion((1, 3)), acceptance)
