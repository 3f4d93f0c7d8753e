"""The best tree against every small tree, a greedy construction, and wrong rules."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.trees.sequoia import expected_tokens, optimal
from magicjax.trees.token_tree import MAX_NODES, TokenTree

SMALL = 7  # brute force up to this many nodes
EXACT = 1e-12


def by_rank(rng, ranks, rows=1):
    """Rates that fall with rank, the same at every depth."""
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
    """Yields a table, a number of nodes and a depth."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ranks, rows = (int(n) for n in rng.integers(1, 5, 2))
        table = TABLES[kind](rng, ranks, rows)
        yield table, int(rng.integers(2, SMALL + 1)), int(rng.integers(1, SMALL + 1))


def greedy(table, nodes, depth) -> TokenTree:
    """Repeatedly adds the node of the largest value whose parent and earlier siblings exist.

    If acceptance falls with rank, these are the largest values of the full tree, so the result is
    optimal. Otherwise it can be worse.
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
    """The best tree if every depth had the root's rates, the paper's assumption."""
    return optimal(np.atleast_2d(table)[0], nodes, depth)


@pytest.mark.parametrize("kind", TABLES)
def test_no_small_tree_has_more_expected_tokens(kind):
    for table, nodes, depth in draws(kind, count=150, seed=1):
        tree = optimal(table, nodes, depth)
        best, most = brute_force(table, nodes, depth)
        assert value(tree.parents, np.atleast_2d(table).tolist()) == pytest.approx(best, abs=EXACT)
        assert tree.num_nodes == most


@pytest.mark.parametrize(("kind", "wrong"), [("not_falling", greedy), ("by_depth", blind_to_depth)])
def test_brute_force_detects_a_wrong_rule(kind, wrong):
    """The negative control of the test above."""
    short = [
        brute_force(table, nodes, depth)[0] - expected_tokens(wrong(table, nodes, depth), table)
        for table, nodes, depth in draws(kind, count=150, seed=1)
    ]
    assert min(short) > -EXACT  # nothing is better than brute force
    assert max(short) > 0.01


@pytest.mark.parametrize("nodes", [2, 17, 64, MAX_NODES])
@pytest.mark.parametrize("kind", ["by_rank", "by_depth"])
def test_a_large_tree_equals_the_greedy_one_if_acceptance_falls_with_rank(kind, nodes):
    rng = np.random.default_rng(nodes)
    for depth in (3, 9, 32):
        table = TABLES[kind](rng, 16, 12)
        tree, largest = optimal(table, nodes, depth), greedy(table, nodes, depth)
        assert tree.num_nodes == largest.num_nodes == nodes
        assert tree.depth <= depth
        wanted = expected_tokens(largest, table)
        assert expected_tokens(tree, table) == pytest.approx(wanted, abs=1e-10)


@pytest.mark.parametrize("kind", TABLES)
def test_nodes_are_numbered_breadth_first(kind):
    rng = np.random.default_rng(2)
    for nodes in (5, 40, 200):
        tree = optimal(TABLES[kind](rng, 6, 4), nodes, 8)
        assert list(tree.parents) == sorted(tree.parents)
        assert list(tree.node_depths) == sorted(tree.node_depths)


def test_a_child_that_is_always_accepted_makes_a_chain():
    assert optimal([0.98, 0.01, 0.01], 9, 32) == magicjax.chain(8)
    assert optimal([1.0], 5, 4) == magicjax.chain(4)


def test_equal_low_rates_make_a_wide_tree():
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


def test_a_rank_of_low_acceptance_is_added_for_a_better_next_one():
    tree = optimal([0.1, 0.8], 3, 2)
    assert tree == magicjax.expansion((2,))
    assert expected_tokens(tree, [0.1, 0.8]) > expected_tokens(magicjax.chain(2), [0.1, 0.8])


def test_each_depth_uses_its_row_and_deeper_ones_the_last():
    table = [[0.3, 0.3, 0.3], [0.9, 0.05, 0.0]]
    tree = optimal(table, 10, 9)
    assert tree.parents == (-1, 0, 0, 0, 1, 2, 3, 4, 5, 6)  # wide at the root, then three chains
    assert expected_tokens(tree, table) == pytest.approx(1 + 3 * 0.3 * (1 + 0.9 + 0.9**2))
    assert optimal(table + [table[-1]] * 5, 10, 9) == tree


@pytest.mark.parametrize(("ranks", "depth", "most"), [(1, 4, 5), (2, 1, 3), (2, 3, 15), (3, 2, 13)])
def test_a_tree_is_smaller_only_if_ranks_and_depth_allow_no_more_nodes(ranks, depth, most):
    acceptance = np.full(ranks, 0.3)
    assert optimal(acceptance, most, depth) == magicjax.expansion((ranks,) * depth)
    assert optimal(acceptance, MAX_NODES, depth) == magicjax.expansion((ranks,) * depth)
    assert optimal(acceptance, most - 1, depth).num_nodes == most - 1


def test_nodes_without_a_gain_are_added_too():
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
def test_no_chain_or_expansion_of_the_same_size_has_more_expected_tokens(kind, rival):
    rng = np.random.default_rng(3)
    for _ in range(5):
        table = TABLES[kind](rng, 4, 5)
        tree = optimal(table, rival.num_nodes, rival.depth)
        assert tree.num_nodes == rival.num_nodes
        assert expected_tokens(tree, table) >= expected_tokens(rival, table) - EXACT


@pytest.mark.parametrize("kind", TABLES)
def test_more_nodes_or_depth_never_lower_the_expected_tokens(kind):
    table = TABLES[kind](np.random.default_rng(4), 3, 3)
    tokens = np.array(
        [[expected_tokens(optimal(table, n, d), table) for d in range(1, 6)] for n in range(2, 15)]
    )
    assert (np.diff(tokens, axis=0) >= -EXACT).all()
    assert (np.diff(tokens, axis=1) >= -EXACT).all()


def test_expected_tokens_equal_the_mean_of_simulated_rounds():
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
    assert abs(np.mean(emitted) - expected_tokens(tree, table[:1])) > 8 * error  # negative control


def test_expected_tokens_of_trees_computed_by_hand():
    assert expected_tokens(magicjax.chain(2), [0.5]) == 1.75
    assert expected_tokens(magicjax.expansion((2,)), [0.5, 0.25]) == 1.75
    assert expected_tokens(magicjax.chain(3), [[0.5], [0.25]]) == 1 + 0.5 + 0.125 + 0.03125
    assert expected_tokens(TokenTree((-1,)), [0.5]) == 1.0
    siblings_apart = TokenTree((-1, 0, 1, 0))  # rank counts siblings
    assert expected_tokens(siblings_apart, [0.5, 0.25]) == 1 + 0.5 + 0.25 + 0.25


def test_any_array_is_accepted_and_sums_slightly_above_one():
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
        ((GOOD, 1, 4), "nodes=1 is too small: it includes the root, .* at least 2"),
        ((GOOD, -3, 4), "nodes=-3 is too small"),
        ((GOOD, MAX_NODES + 1, 4), "nodes=257: at most 256 are supported"),
        ((GOOD, 8, 0), "depth=0: it must be at least 1"),
        ((0.5, 8, 4), r"acceptance has 0 axes: give \[ranks\] or \[depths, ranks\]"),
        (([[GOOD]], 8, 4), r"acceptance has 3 axes: give \[ranks\] or \[depths, ranks\]"),
        (([], 8, 4), r"shape \(0,\) is empty: give at least one rank, and one depth"),
        ((np.ones((0, 3)), 8, 4), r"shape \(0, 3\) is empty"),
        ((np.ones((3, 0)), 8, 4), r"shape \(3, 0\) is empty"),
        (([GOOD, [0.5]], 8, 4), "not a table of numbers .* short rows padded by 0"),
        (([0.5, float("nan")], 8, 4), r"acceptance\[1\] is nan: give 0 for .* never tried"),
        (([GOOD, [0.5, 1.5]], 8, 4), r"acceptance\[1, 1\] is 1.5: .* from 0 to 1"),
        (([0.5, -0.1], 8, 4), r"acceptance\[1\] is -0.1: .* from 0 to 1"),
        (([float("inf"), 0.0], 8, 4), r"acceptance\[0\] is inf: .* from 0 to 1"),
        (([0.8, 0.5], 8, 4), "acceptance sums to 1.3 and must be at most 1, .* give rates"),
        (([GOOD, [0.5, 0.50001]], 8, 4), r"acceptance\[1\] sums to 1.00001 and must be at most 1"),
    ],
)
def test_invalid_input_is_rejected_with_value_and_remedy(call, message):
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
def test_expected_tokens_reject_a_table_with_too_few_ranks(acceptance, message):
    with pytest.raises(ValueError, match=message):
        expected_tokens(magicjax.expansion((1, 3)), acceptance)
