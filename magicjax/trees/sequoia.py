"""The token tree with the highest expected number of tokens, given acceptance rates (Sequoia).

A node is reached when every token above it is accepted, so its value is the product of the
acceptance along its path. A tree's value is the sum over its nodes, and splits by subtree: the best
subtree of n nodes at one depth follows from the best smaller ones at the next depth.
"""

import collections
import operator

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from magicjax.trees.token_tree import MAX_NODES, NO_NODE, TokenTree

SUM_TOLERANCE = 1e-6  # measured and rounded rates can sum to slightly more than 1


def optimal(acceptance: npt.ArrayLike, nodes: int, depth: int) -> TokenTree:
    """Returns the tree of `nodes` nodes with the most expected tokens per round.

    The tree has exactly `nodes` nodes, even if the last ones add nothing, or as many as the ranks
    of `acceptance` and `depth` allow. Ties are broken deterministically. Nodes are numbered breadth
    first, siblings by rank.

    With acceptance [0.6, 0.3], four nodes and depth 3, the tree and the value of each node are::

        0       1
        ├─1     0.6
        │ └─3   0.36
        └─2     0.3

    so 2.26 tokens per round, where a chain of three gives 1 + 0.6 + 0.36 + 0.216 = 2.176.

    Args:
      acceptance: [ranks], or [depths, ranks] with the root's children at depth 0: how often the
        rank-th child, in the order of verification, of a reached node is accepted. Deeper nodes
        use the last row. Rates need not fall with rank.
      nodes: N, the root included.
      depth: the longest path, in edges.

    Raises:
      ValueError: fewer than 2 nodes or more than `MAX_NODES`, a depth below 1, or an invalid
        `acceptance`.

    Source: Sequoia (arXiv 2402.12374), section 3.1, where acceptance depends on the rank alone.
    """
    table = validated_acceptance(acceptance)
    nodes, depth = operator.index(nodes), operator.index(depth)
    if nodes < 2:
        raise ValueError(f"nodes={nodes} is too small: it includes the root, so give at least 2")
    if nodes > MAX_NODES:
        raise ValueError(f"nodes={nodes}: at most {MAX_NODES} are supported")
    if depth < 1:
        raise ValueError(f"depth={depth}: it must be at least 1")
    nodes = _full_tree_nodes(table.shape[1], depth, limit=nodes)
    table = table[np.minimum(np.arange(min(depth, nodes - 1)), len(table) - 1), : nodes - 1]
    sizes = _subtree_sizes(table, nodes)

    parents = [NO_NODE]
    waiting = collections.deque([(0, 0, nodes - 1)])  # node, its depth, nodes below it
    while waiting:
        node, node_depth, remaining = waiting.popleft()
        rank = 0
        while remaining > 0:
            size = int(sizes[node_depth, rank, remaining])
            waiting.append((len(parents), node_depth + 1, size - 1))
            parents.append(node)
            remaining -= size
            rank += 1
    return TokenTree(tuple(parents))


def expected_tokens(tree: TokenTree, acceptance: npt.ArrayLike) -> float:
    """Returns the expected tokens per round of `tree`, the bonus token included.

    It sums the product of `acceptance` along the path to each node, 1 for the root. A chain of two
    at 0.5 gives 1 + 0.5 + 0.25.

    Args:
      tree: any tree, also `ROOT_ONLY`.
      acceptance: [ranks] or [depths, ranks], see `optimal`.

    Raises:
      ValueError: a node has more children than `acceptance` has ranks, or an invalid `acceptance`.

    Source: Sequoia (arXiv 2402.12374), section 3.1.
    """
    table = validated_acceptance(acceptance)
    if tree.width > table.shape[1]:
        raise ValueError(
            f"a node of the tree has {tree.width} children, but acceptance has {table.shape[1]} "
            "ranks: add ranks, of 0 if such children are never accepted"
        )
    value = np.ones(tree.num_nodes)
    num_children = np.zeros(tree.num_nodes, np.int32)  # of each node so far
    for node, parent in enumerate(tree.parents[1:], 1):
        row = min(int(tree.node_depths[parent]), len(table) - 1)
        value[node] = value[parent] * table[row, num_children[parent]]
        num_children[parent] += 1
    return float(value.sum())


def _subtree_sizes(
    table: Float[np.ndarray, "depths ranks"], nodes: int
) -> Int[np.ndarray, "depths ranks nodes"]:
    """Returns how many of the remaining nodes a child's subtree gets, itself included.

    sizes[d, k, m] is for the k-th child of a node at depth d, with m nodes left for it and its
    later siblings. Depths are computed upwards, ranks backwards:
        subtree[n] = 1 + forest of all ranks [n - 1]
        forest from rank k [m] = max over s of table[d, k] * subtree one depth below [s]
                                               + forest from rank k + 1 [m - s]
    A size that ranks and depth do not allow has the value -inf. A child takes at least one node, so
    no rank is skipped.
    """
    depths, ranks = table.shape
    sizes = np.zeros((depths, ranks, nodes), np.int16)
    remaining = np.arange(nodes)[:, None] - np.arange(nodes)  # [m, s], m - s
    remaining = np.where(remaining < 0, nodes, remaining)  # the index of a forest's final -inf
    subtree = np.full(nodes, -np.inf)  # of depth `depths`: leaves only
    subtree[1] = 1.0
    for d in reversed(range(depths)):
        forest = np.full(nodes + 1, -np.inf)
        forest[0] = 0.0
        for k in reversed(range(ranks)):
            # The d nodes above, this node and its k earlier children are not available.
            available = nodes - d - k
            if available < 2:
                continue
            child = np.full(available, -np.inf)
            reachable = subtree[:available] > -np.inf
            np.multiply(subtree[:available], table[d, k], out=child, where=reachable)
            gains = child + forest[remaining[:available, :available]]  # [m, s]
            sizes[d, k, 1:available] = gains.argmax(1)[1:]
            forest[1:available] = gains.max(1)[1:]
        subtree[1:] = 1.0 + forest[: nodes - 1]
    return sizes


def _full_tree_nodes(ranks: int, depth: int, limit: int) -> int:
    """Returns the nodes of the full tree, or `limit` if it has more."""
    total = level = 1
    for _ in range(depth):
        level *= ranks
        total += level
        if total >= limit:
            return limit
    return total


def validated_acceptance(acceptance: npt.ArrayLike) -> Float[np.ndarray, "depths ranks"]:
    """Returns `acceptance` as float64 with a depth axis.

    Raises:
      ValueError: not one or two axes, empty, NaN, outside [0, 1], or a row sums to more than 1.
    """
    try:
        rates = np.asarray(acceptance, np.float64)
    except ValueError as error:
        raise ValueError(
            f"acceptance is not a table of numbers ({error}): give [ranks] or [depths, ranks], "
            "with short rows padded by 0"
        ) from error
    if rates.ndim not in (1, 2):
        raise ValueError(f"acceptance has {rates.ndim} axes: give [ranks] or [depths, ranks]")
    if rates.size == 0:
        raise ValueError(
            f"acceptance of shape {rates.shape} is empty: give at least one rank, and one depth"
        )
    for invalid, remedy in (
        (np.isnan(rates), "give 0 for a rank that was never tried"),
        ((rates < 0) | (rates > 1), "give probabilities, from 0 to 1"),
    ):
        if invalid.any():
            index = tuple(np.argwhere(invalid)[0].tolist())
            raise ValueError(f"acceptance{list(index)} is {rates[index]}: {remedy}")
    table = np.atleast_2d(rates)
    sums = table.sum(1)
    row = int(sums.argmax())
    if sums[row] > 1 + SUM_TOLERANCE:
        name = f"acceptance[{row}]" if rates.ndim == 2 else "acceptance"
        raise ValueError(
            f"{name} sums to {sums[row]:.7g} and must be at most 1, because at most one child is "
            "accepted: give rates of all reached nodes, also for later ranks"
        )
    return table
