"""The best tree against every small tree, a greedy construction, and wrong rules."""

import functools
import itertools

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


GOOD = [0.5, 0.25]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((GOOD, 1, 4), "nodes=1 is too small: it includes the root, .* at least 2"),
        ((GOOD, 8, 0), "depth=0: it must be at least 1"),
        ((0.5, 8, 4), r"acceptance has 0 axes: give \[ranks\] or \[depths, ranks\]"),
        (([0.5, float("nan")], 8, 4), r"acceptance\[1\] is nan: give 0 for .* never tried"),
        (([GOOD, [0.5, 1.5]], 8, 4), r"acceptance\[1, 1\] is 1.5: .* from 0 to 1"),
        (([0.8, 0.5], 8, 4), "acceptance sums to 1.3 and must be at most 1, .* give rates"),
    ],
)
def test_invalid_input_is_rejected_with_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        optimal(*call)
