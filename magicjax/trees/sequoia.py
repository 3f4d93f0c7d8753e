"""The token tree that pays most: how many nodes go where, given how often children are accepted.

A node is reached when every token above it was accepted, so its worth is the product of the
acceptance along its path, and a tree's is the sum over its nodes. Such sums split by subtree: the
best subtree of n nodes at a depth follows from the best smaller ones a level down.
"""

import collections
import operator

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int

from magicjax.trees.token_tree import MAX_NODES, NO_NODE, TokenTree

SUM_TOLERANCE = 1e-6  # shares that were measured and rounded may sum to a little more than 1


def optimal(acceptance: npt.ArrayLike, nodes: int, depth: int) -> TokenTree:
    """Returns the tree of `nodes` nodes that is expected to emit the most tokens a round.

    The tree has exactly `nodes` nodes, also where the last of them gain nothing, or as many as the
    ranks of `acceptance` and `depth` admit, if that is fewer. Of trees worth the same, it is always
    the same one. Nodes are numbered breadth first, siblings by rank.

    With acceptance [0.6, 0.3], four nodes and depth 3 give, with the worth of each node,
        0       1
        ├─1     0.6
        │ └─3   0.36
        └─2     0.3
    so 2.26 tokens a round, where a chain of three gives 1 + 0.6 + 0.36 + 0.216 = 2.176.

    Args:
      acceptance: [ranks], or [depths, ranks] where the children of the root are depth 0: the share
        of reached nodes whose rank-th child, in the order of trying, is the accepted one. The last
        row holds for all deeper nodes. Rows need not fall with rank.
      nodes: N, the root included.
      depth: the most edges between the root and a leaf.

    Raises:
      ValueError: fewer than 2 nodes or more than `MAX_NODES`, no depth, or an `acceptance` that is
        no such table of probabilities.

    Source: Sequoia (arXiv 2402.12374), section 3.1, where acceptance depends on the rank alone.
    """
    table = checked_acceptance(acceptance)
    nodes, depth = operator.index(nodes), operator.index(depth)
    if nodes < 2:
        raise ValueError(
            f"nodes={nodes} leaves nothing to speculate: it counts the root, so give at least 2"
        )
    if nodes > MAX_NODES:
        raise ValueError(f"nodes={nodes}: at most {MAX_NODES} are supported, so ask for fewer")
    if depth < 1:
        raise ValueError(f"depth={depth} leaves nothing to speculate: give at least 1")
    nodes = min(nodes, _most_nodes(table.shape[1], depth, nodes))
    table = table[np.minimum(np.arange(min(depth, nodes - 1)), len(table) - 1), : nodes - 1]
    sizes = _subtree_sizes(table, nodes)

    parents = [NO_NODE]
    waiting = collections.deque([(0, 0, nodes - 1)])  # node, its depth, nodes below it
    while waiting:
        node, at, below = waiting.popleft()
        rank = 0
        while below > 0:
            size = int(sizes[at, rank, below])
            waiting.append((len(parents), at + 1, size - 1))
            parents.append(node)
            below -= size
            rank += 1
    return TokenTree(tuple(parents))


def expected_tokens(tree: TokenTree, acceptance: npt.ArrayLike) -> float:
    """Returns the tokens that a round of `tree` is expected to emit, the bonus token included.

    It is the sum over all nodes, the root's 1 included, of the product of `acceptance` along the
    path from the root. A chain of two at 0.5 gives 1 + 0.5 + 0.25.

    Args:
      tree: any tree, `ROOT_ONLY` too.
      acceptance: [ranks] or [depths, ranks], as `optimal` takes it.

    Raises:
      ValueError: a node has more children than `acceptance` has ranks, or `acceptance` is no such
        table of probabilities.

    Source: Sequoia (arXiv 2402.12374), section 3.1.
    """
    table = checked_acceptance(acceptance)
    if tree.width > table.shape[1]:
        raise ValueError(
            f"a node of the tree has {tree.width} children, but acceptance has {table.shape[1]} "
            "ranks: add ranks, of 0 if such children are never accepted"
        )
    worth = np.ones(tree.num_nodes)
    tried = np.zeros(tree.num_nodes, np.int32)  # children of each node so far
    for node, parent in enumerate(tree.parents[1:], 1):
        row = min(int(tree.node_depths[parent]), len(table) - 1)
        worth[node] = worth[parent] * table[row, tried[parent]]
        tried[parent] += 1
    return float(worth.sum())


def _subtree_sizes(
    table: Float[np.ndarray, "depths ranks"], nodes: int
) -> Int[np.ndarray, "depths ranks nodes"]:
    """Returns how many nodes a child gets, itself included, of those that are left.

    sizes[d, k, m] belongs to the k-th child of a node at depth d, where m nodes are left for it
    and its later siblings. Upwards over depths and, within one, backwards over ranks:
        subtree[n] = 1 + forest of all ranks [n - 1]
        forest from rank k [m] = max over s of table[d, k] * subtree a level down [s]
                                               + forest from rank k + 1 [m - s]
    A size that ranks and depth do not admit is worth -inf. A child takes at least one node, so no
    rank is skipped.
    """
    depths, ranks = table.shape
    sizes = np.zeros((depths, ranks, nodes), np.int16)
    rest = np.arange(nodes)[:, None] - np.arange(nodes)  # [m, s], m - s
    rest = np.where(rest < 0, nodes, rest)  # the place of the -inf behind each forest
    subtree = np.full(nodes, -np.inf)  # of depth `depths`: leaves only
    subtree[1] = 1.0
    for d in reversed(range(depths)):
        forest = np.full(nodes + 1, -np.inf)
        forest[0] = 0.0
        for k in reversed(range(ranks)):
            # The d nodes above, this node and its k earlier children are taken already.
            left = nodes - d - k
            if left < 2:
                continue
            child = np.full(left, -np.inf)
            np.multiply(subtree[:left], table[d, k], out=child, where=subtree[:left] > -np.inf)
            gains = child + forest[rest[:left, :left]]  # [m, s]
            sizes[d, k, 1:left] = gains.argmax(1)[1:]
            forest[1:left] = gains.max(1)[1:]
        subtree[1:] = 1.0 + forest[: nodes - 1]
    return sizes


def _most_nodes(ranks: int, depth: int, enough: int) -> int:
    """Returns the nodes of the full tree, or some number from `enough` on where it has more."""
    total = level = 1
    for _ in range(depth):
        level *= ranks
        total += level
        if total >= enough:
            break
    return total


def checked_acceptance(acceptance: npt.ArrayLike) -> Float[np.ndarray, "depths ranks"]:
    """Returns `acceptance` as float64 with a depth axis.

    Raises:
      ValueError: not one or two axes, empty, NaN, outside [0, 1], or a row sums to more than 1.
    """
    try:
        given = np.asarray(acceptance, np.float64)
    except ValueError as error:
        raise ValueError(
            f"acceptance is no table of numbers ({error}): give [ranks] or [depths, ranks], "
            "short rows filled up with 0"
        ) from error
    if given.ndim not in (1, 2):
        raise ValueError(f"acceptance has {given.ndim} axes: give [ranks] or [depths, ranks]")
    if given.size == 0:
        raise ValueError(
            f"acceptance of shape {given.shape} is empty: give at least one rank, and one depth"
        )
    for bad, remedy in (
        (np.isnan(given), "give 0 where a rank was never tried"),
        ((given < 0) | (given > 1), "give probabilities, from 0 to 1"),
    ):
        if bad.any():
            at = tuple(np.argwhere(bad)[0].tolist())
            raise ValueError(f"acceptance{list(at)} is {given[at]}: {remedy}")
    table = np.atleast_2d(given)
    sums = table.sum(1)
    row = int(sums.argmax())
    if sums[row] > 1 + SUM_TOLERANCE:
        name = f"acceptance[{row}]" if given.ndim == 2 else "acceptance"
        raise ValueError(
            f"{name} sums to {sums[row]:.7g}, which must be at most 1, as one child at most is "
            "accepted: give shares of all reached nodes, also for later ranks"
        )
    return table
