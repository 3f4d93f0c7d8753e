"""Token trees: what a drafter proposes for one row, and what the target scores in one pass.

A tree is a list of parents: node 0 is the root (the pending token), and every other node comes
after its parent. The functions here take parents of one tree, `[N]`, or of one tree for each row,
`[B, N]`, as numpy arrays (known while tracing) or JAX arrays (traced).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from magicjax.checks import check_number
from magicjax.suggest import did_you_mean

MAX_NODES = 256
NO_NODE = -1  # the root's parent; as the parent of a later node it marks padding

Parents = Int[Array, "*B N"] | np.ndarray


def _xp(parents: Parents):
    return jnp if isinstance(parents, jax.Array) else np


def ancestor_mask(parents: Parents) -> Bool[Array, "*B N N"]:
    """Returns which nodes each node sees: itself and its ancestors.

    Parents [-1, 0, 0, 1] give::

        root   1 . . .
        1      1 1 . .
        2      1 . 1 .
        3      1 1 . 1

    The matrix of parents reaches one step up; each of log2(N) squarings doubles its reach.
    """
    xp, n = _xp(parents), parents.shape[-1]
    nodes = xp.arange(n)
    reach = ((parents[..., None] == nodes) | (nodes[:, None] == nodes)).astype(xp.float32)
    for _ in range(max(1, math.ceil(math.log2(n)))):
        reach = ((reach @ reach) > 0).astype(xp.float32)
    return reach > 0


def depths(parents: Parents) -> Int[Array, "*B N"]:
    """Returns the number of edges between each node and the root; 0 for padding."""
    return (ancestor_mask(parents).sum(-1) - 1).astype(_xp(parents).int32)


def padding(parents: Parents) -> Bool[Array, "*B N"]:
    """Returns which nodes are padding."""
    return (parents == NO_NODE) & (_xp(parents).arange(parents.shape[-1]) > 0)


def children(parents: Parents, width: int) -> Int[Array, "*B N W"]:
    """Returns each node's first `width` children in order, `NO_NODE` where it has fewer.

    Parents [-1, 0, 0, 1] with width 2 give [[1, 2], [3, -1], [-1, -1], [-1, -1]].
    """
    xp, n = _xp(parents), parents.shape[-1]
    nodes = xp.arange(n)
    is_child = (parents[..., None, :] == nodes[:, None]) & (nodes > 0)  # [..., parent, child]
    rank = xp.cumsum(is_child.astype(xp.int32), -1) - 1
    chosen = is_child[..., None, :] & (rank[..., None, :] == xp.arange(width)[:, None])
    return xp.where(chosen.any(-1), chosen.argmax(-1), NO_NODE).astype(xp.int32)


class TreeShape(NamedTuple):
    """Bounds of the trees that a drafter proposes.

    Attributes:
      num_nodes: N, the root and padding included.
      depth: the longest path, in edges.
      width: the most draws below a node, before trees are merged.
    """

    num_nodes: int
    depth: int
    width: int


@dataclasses.dataclass(frozen=True)
class TokenTree:
    """A static tree, the same for every row and round; hashable.

    Attributes:
      parents: the parent of each node; -1 for the root, which is node 0.

    Raises:
      ValueError: no root, a parent that does not come before its child, or too many nodes.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "parents", tuple(int(p) for p in self.parents))
        if not self.parents or self.parents[0] != NO_NODE:
            raise ValueError(
                f"parents={self.parents} has no root: the first parent must be -1, for node 0"
            )
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"node {node} has parent {parent}: it must be between 0 and {node - 1}; list "
                    "every parent before its children"
                )
        if len(self.parents) > MAX_NODES:
            raise ValueError(
                f"a tree of {len(self.parents)} nodes: at most {MAX_NODES} are supported"
            )

    @staticmethod
    def from_parents(parents: Sequence[int]) -> "TokenTree":
        """Returns the tree with the given parent of each node, -1 for the root."""
        return TokenTree(tuple(parents))

    @functools.cached_property
    def array(self) -> np.ndarray:
        return np.array(self.parents, np.int32)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.parents)

    @functools.cached_property
    def node_depths(self) -> np.ndarray:
        return np.asarray(depths(self.array))

    @functools.cached_property
    def mask(self) -> np.ndarray:
        return np.asarray(ancestor_mask(self.array))

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.num_nodes, self.depth, self.width)

    @property
    def depth(self) -> int:
        """The longest path in edges, which is the most tokens that one round can accept."""
        return int(self.node_depths.max())

    @property
    def width(self) -> int:
        """The most children that any node has."""
        return max((self.parents.count(n) for n in range(self.num_nodes)), default=0)

    @functools.cached_property
    def children(self) -> np.ndarray:
        """int32 [N, width], -1 where a node has fewer children."""
        return np.asarray(children(self.array, max(1, self.width)))

    @functools.cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children, in order."""
        return tuple(sorted(set(self.parents[1:])))

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """The nodes of each depth that have children, int32 [depth, W], padded with N.

        A draft model runs these nodes; the others are leaves.
        """
        inner = [
            [n for n in range(self.num_nodes) if self.node_depths[n] == d and n in self.parents]
            for d in range(self.depth)
        ]
        width = max((len(level) for level in inner), default=0)
        rows = [level + [self.num_nodes] * (width - len(level)) for level in inner]
        return np.array(rows, np.int32).reshape(self.depth, width)

    def __str__(self) -> str:
        lines = [f"{self.num_nodes} nodes, depth {self.depth}", "0"]

        def draw(node: int, indent: str):
            below = [c for c, p in enumerate(self.parents) if p == node]
            for child in below:
                last = child == below[-1]
                lines.append(f"{indent}{'└─' if last else '├─'}{child}")
                draw(child, indent + ("  " if last else "│ "))

        draw(0, "")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """A tree for each row and round, grown where the draft model is most confident.

    At each depth the `width` most probable nodes get `width` children each: the draft model's most
    likely tokens. The `nodes` - 1 tokens of the highest path probability are proposed. Nothing is
    drawn at random, because pruning random draws by their probability is not exact. Source: EAGLE-2
    (arXiv 2406.16858), section 4, which counts the root's children separately; also DySpec.

    Attributes:
      nodes: N, the nodes that the target scores, the root included.
      depth: the longest path, in edges; the draft model runs once for each depth.
      width: the nodes that run at each depth, and the children of each.
      min_prob: a row's draft ends before `depth` when the path probability of all of its newest
        nodes is lower; 0: it does not. The row then has fewer nodes, and padding.

    Raises:
      ValueError: a bound is too small, there are fewer candidates than nodes, or min_prob is not in
        [0, 1).
    """

    nodes: int
    depth: int
    width: int
    min_prob: float = 0.0

    def __post_init__(self):
        check_number("min_prob", self.min_prob, float)
        object.__setattr__(self, "min_prob", float(self.min_prob))
        if not 0 <= self.min_prob < 1:
            raise ValueError(f"min_prob={self.min_prob}: it must be at least 0 and below 1")
        for name, least in (("nodes", 2), ("depth", 1), ("width", 1)):
            check_number(name, getattr(self, name), ge=least)
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.nodes > MAX_NODES:
            raise ValueError(f"nodes={self.nodes}: at most {MAX_NODES} are supported")
        if self.nodes - 1 > self.candidates:
            raise ValueError(
                f"nodes={self.nodes} is too large: depth={self.depth} and width={self.width} draft "
                f"{self.candidates} nodes; use at most {self.candidates + 1}, or more depth or "
                "width"
            )

    @property
    def candidates(self) -> int:
        """The nodes that are drafted before the best are chosen."""
        return self.width + (self.depth - 1) * self.width**2

    @property
    def num_nodes(self) -> int:
        return self.nodes

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.nodes, self.depth, self.width)

    def __str__(self) -> str:
        end = f", ended below probability {self.min_prob:g}" if self.min_prob else ""
        return (
            f"{self.nodes} nodes, depth {self.depth}, grown where the draft is most confident{end}"
        )


Tree = TokenTree | DynamicTree
ROOT_ONLY = TokenTree((NO_NODE,))  # plain decoding
KINDS = ("chain", "expansion", "parents", "dynamic")  # of `parse_tree`


def check_tree(tree: Tree) -> None:
    """Raises TypeError unless the tree is one."""
    if not isinstance(tree, TokenTree | DynamicTree):
        raise TypeError(f"{tree!r} is not a tree: use magicjax.parse_tree for a text")


def chain(length: int) -> TokenTree:
    """Returns a chain of `length` drafted tokens: length + 1 nodes.

    Raises:
      ValueError, TypeError: the length is not an integer, or below 1.
    """
    check_number("length", length, ge=1, hint="chain(4) has 4 drafted tokens")
    return TokenTree(tuple(range(NO_NODE, length)))


def truncated(tree: TokenTree, depth: int) -> TokenTree:
    """Returns the nodes of a tree down to a depth; 0: only the root."""
    nodes = np.flatnonzero(tree.node_depths <= depth).tolist()
    number = {node: i for i, node in enumerate(nodes)} | {NO_NODE: NO_NODE}
    return TokenTree(tuple(number[tree.parents[node]] for node in nodes))


def expansion(branches: Sequence[int]) -> TokenTree:
    """Returns the tree in which every node at depth d has branches[d] children.

    expansion((1, 1, 3)) is a chain of two that ends in three leaves. Source: SpecInfer, section 3.

    Raises:
      ValueError, TypeError: no depths, or numbers of children that are not positive integers.
    """
    branches = tuple(branches)
    for count in branches:
        check_number("branches", count, ge=1, hint="expansion((2, 2, 1)) has 3 depths")
    if not branches:
        raise ValueError(f"expansion{branches}: give at least one depth")
    parents, level = [NO_NODE], [0]
    for count in branches:
        if len(parents) + len(level) * count > MAX_NODES:
            raise ValueError(
                f"expansion{branches} has more than {MAX_NODES} nodes: use fewer branches"
            )
        first = len(parents)
        parents += [node for node in level for _ in range(count)]
        level = list(range(first, len(parents)))
    return TokenTree(tuple(parents))


def parse_tree(text: str) -> Tree:
    """Returns the tree of a text: chain:4, expansion:2,2,1, parents:-1,0,0,1 or dynamic:16,6,4.

    A dynamic tree's numbers are its nodes, depth and width, and perhaps the probability below which
    its draft ends: dynamic:6,5,2,0.6.

    Raises:
      ValueError: the text has another form, or the tree is not valid.
    """
    if dynamic := re.fullmatch(r"dynamic:(-?\d+),(-?\d+),(-?\d+)(?:,(\d*\.?\d+))?", text):
        nodes, depth, width = map(int, dynamic.groups()[:3])
        return DynamicTree(nodes, depth, width, float(dynamic[4] or 0))
    match = re.fullmatch(r"(chain|expansion|parents):(-?\d+(?:,-?\d+)*)", text)
    numbers = [int(n) for n in match[2].split(",")] if match else []
    kind = match[1] if match else ""
    if kind == "expansion":
        return expansion(numbers)
    if kind == "parents":
        return TokenTree.from_parents(numbers)
    if kind == "chain" and len(numbers) == 1:
        return chain(numbers[0])
    kind = text.partition(":")[0]
    hint = "" if kind in KINDS else did_you_mean(kind, KINDS)
    raise ValueError(
        f"{text!r} is not a tree: use chain:4, expansion:2,2,1, parents:-1,0,0,1, dynamic:16,6,4 "
        f"(nodes, depth, width) or dynamic:6,5,2,0.6 (and min_prob){hint}"
    )
