"""Token trees: what a drafter proposes for one row, and what the target scores in one pass.

A tree is its parents: node 0 is the root (the pending token), and every other node comes after its
parent. The functions here take parents as `[N]` or, one tree for each row, as `[B, N]`, as numpy
(known when tracing) or as JAX arrays (traced): static, merged and dynamic trees share them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

MAX_NODES = 256
NO_NODE = -1  # the root's parent; as the parent of a later node it marks padding

Parents = Int[Array, "*B N"] | np.ndarray


def _xp(parents: Parents):
    return jnp if isinstance(parents, jax.Array) else np


def ancestor_mask(parents: Parents) -> Bool[Array, "*B N N"]:
    """Returns which nodes each node sees: itself and its ancestors.

    Parents [-1, 0, 0, 1] give
        root   1 . . .
        1      1 1 . .
        2      1 . 1 .
        3      1 1 . 1
    Reaching one step up is a matrix; squaring it doubles the reach, so log2(N) products do.
    """
    xp, n = _xp(parents), parents.shape[-1]
    nodes = xp.arange(n)
    reach = ((parents[..., None] == nodes) | (nodes[:, None] == nodes)).astype(xp.float32)
    for _ in range(max(1, math.ceil(math.log2(n)))):
        reach = ((reach @ reach) > 0).astype(xp.float32)
    return reach > 0


def depths(parents: Parents) -> Int[Array, "*B N"]:
    """Returns how many edges lie between each node and the root (padding: 0)."""
    return (ancestor_mask(parents).sum(-1) - 1).astype(_xp(parents).int32)


def padding(parents: Parents) -> Bool[Array, "*B N"]:
    """Returns which nodes stand for nothing and must never be tried."""
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


@dataclasses.dataclass(frozen=True)
class TokenTree:
    """A static tree shape, the same for every row and round. Hashable: programs specialise on it.

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
                f"parents={self.parents} has no root: node 0 must come first, with parent -1"
            )
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"node {node} has parent {parent}: it must lie between 0 and {node - 1}, "
                    "so list every parent before its children"
                )
        if len(self.parents) > MAX_NODES:
            raise ValueError(
                f"a tree of {len(self.parents)} nodes: at most {MAX_NODES} are supported"
            )

    @staticmethod
    def from_parents(parents: Sequence[int]) -> "TokenTree":
        """Returns the tree with these parents, node by node, -1 for the root."""
        return TokenTree(tuple(parents))

    @staticmethod
    def parse(text: str) -> "TokenTree":
        """Returns the tree written as `chain:4`, `expansion:2,2,1` or `parents:-1,0,0,1`.

        Raises:
          ValueError: the text is none of these, or the tree is not valid.
        """
        match = re.fullmatch(r"(chain|expansion|parents):(-?\d+(?:,-?\d+)*)", text)
        if match is None or (match[1] == "chain" and "," in match[2]):
            raise ValueError(
                f"{text!r} is no tree: write chain:4, expansion:2,2,1 or parents:-1,0,0,1"
            )
        numbers = [int(n) for n in match[2].split(",")]
        if match[1] == "chain":
            return chain(numbers[0])
        return expansion(numbers) if match[1] == "expansion" else TokenTree.from_parents(numbers)

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
    def depth(self) -> int:
        """The most tokens that one round can accept."""
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
    def levels(self) -> np.ndarray:
        """int32 [depth, W]: the nodes of each depth that have children, padded with N.

        These are the nodes a drafter must run; the others are leaves.
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


ROOT_ONLY = TokenTree((NO_NODE,))  # plain decoding


def chain(length: int) -> TokenTree:
    """Returns `length` speculated tokens in a line, so length + 1 nodes.

    Raises:
      ValueError: length < 1.
    """
    if length < 1:
        raise ValueError(f"chain({length}): a chain speculates at least 1 token")
    return TokenTree(tuple(range(NO_NODE, length)))


def expansion(branches: Sequence[int]) -> TokenTree:
    """Returns SpecInfer's static tree: each node of level i - 1 gets branches[i - 1] children.

    expansion((1, 1, 3)) is a line of two that ends in three leaves. Source: SpecInfer, section 3.

    Raises:
      ValueError: no level, or a level without children.
    """
    branches = tuple(branches)
    if not branches or min(branches) < 1:
        raise ValueError(f"expansion{branches}: give at least one level, each with 1 child or more")
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
