"""Several drafters, their trees merged into one (SpecInfer)."""

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters.base import Drafter, Round
from magicjax.drafters.draft_pass import NOT_RUN, Drafted
from magicjax.kv_cache.attention_stats import Seen, Watch
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.trees.merge import merge
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import DynamicTree, Shape, TokenTree, Tree
from magicjax.verification.sampling import MAX_DRAFTERS, Sampling


@struct.dataclass
class Ensemble:
    """Drafters that each propose a tree; the target scores the union.

    Under sampling every member's tries keep their own distributions and come in the members'
    order. Source: SpecInfer (arXiv 2305.09781), section 3.

    Attributes:
      drafters: the members.
      trees: each member's tree; None: the one that `generate` is asked for.

    Raises:
      ValueError: no or too many members, an ensemble among them, or not a tree for each member.
      TypeError: a tree that is none.
    """

    drafters: tuple[Drafter, ...]
    trees: tuple[Tree, ...] | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if self.trees is not None:
            object.__setattr__(self, "trees", tuple(self.trees))
        count = len(self.drafters)
        if not 1 <= count <= MAX_DRAFTERS:
            raise ValueError(f"an ensemble of {count} drafters: give 1 to {MAX_DRAFTERS}")
        if any(isinstance(drafter, Ensemble) for drafter in self.drafters):
            raise ValueError("an ensemble within an ensemble: list all drafters in one")
        for tree in self.trees or ():
            if not isinstance(tree, TokenTree | DynamicTree):
                raise TypeError(f"{tree!r} is no tree: magicjax.parse_tree reads one from a text")
        if self.trees is not None and len(self.trees) != count:
            raise ValueError(f"{len(self.trees)} trees for {count} drafters: give one for each")

    def _trees(self, tree: Tree) -> tuple[Tree, ...]:
        return (tree,) * len(self.drafters) if self.trees is None else self.trees

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        for drafter, own in zip(self.drafters, self._trees(tree), strict=True):
            if own.num_nodes < 2:
                raise ValueError(f"a member's tree speculates nothing: give it a child\n{own}")
            drafter.check(target, own, depth, context)

    def shape(self, tree: Tree) -> Shape:
        shapes = [d.shape(own) for d, own in zip(self.drafters, self._trees(tree), strict=True)]
        return Shape(
            1 + sum(shape.num_nodes - 1 for shape in shapes),
            max(shape.depth for shape in shapes),
            sum(shape.width for shape in shapes),
        )

    def drawings(self, tree: Tree) -> set[str]:
        pairs = zip(self.drafters, self._trees(tree), strict=True)
        return set().union(*(drafter.drawings(own) for drafter, own in pairs))

    def _members(self, settings: Any):
        """Returns (drafter, its settings) of every member."""
        depth = self.shape(settings.tree).depth
        return [
            (drafter, dataclasses.replace(settings, tree=tree, lead=depth, index=i))
            for i, (drafter, tree) in enumerate(
                zip(self.drafters, self._trees(settings.tree), strict=True)
            )
        ]

    def watch(self) -> Watch:
        return functools.reduce(operator.or_, (drafter.watch() for drafter in self.drafters))

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        return sum(drafter.cache_bytes(target, batch, capacity) for drafter in self.drafters)

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, seen: Seen, settings: Any
    ) -> tuple[Any, ...]:
        members = self._members(settings)
        return tuple(drafter.prefill(target, tokens, cache, seen, own) for drafter, own in members)

    def propose(
        self,
        target: Model,
        state: tuple[Any, ...],
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Any,
    ) -> tuple[Proposal, tuple[Any, ...]]:
        made = [
            drafter.propose(target, of_member, root, cache, sampling, own)
            for (drafter, own), of_member in zip(self._members(settings), state, strict=True)
        ]
        proposals, drafts = zip(*made, strict=True)
        merged, node_of = merge(proposals, self.shape(settings.tree).depth)
        nodes = merged.tokens.shape[1]
        return merged, tuple(_renumber(d, of, nodes) for d, of in zip(drafts, node_of, strict=True))

    def commit(
        self,
        target: Model,
        state: tuple[Any, ...],
        draft: tuple[Any, ...],
        proposal: Proposal,
        of_round: Round,
    ) -> tuple[Any, ...]:
        members = zip(self.drafters, state, draft, strict=True)
        return tuple(d.commit(target, own, of, proposal, of_round) for d, own, of in members)


def _renumber(draft: Any, node_of: Int[Array, "B N"], nodes: int) -> Any:
    """Returns a member's draft with slots by merged node; a folded node has any that was run."""
    if not isinstance(draft, Drafted):
        return draft
    rows = jnp.arange(node_of.shape[0])[:, None]
    slots = jnp.full((node_of.shape[0], nodes), NOT_RUN, jnp.int32)
    place = jnp.where(node_of < 0, nodes, node_of)
    return dataclasses.replace(draft, slots=slots.at[rows, place].max(draft.slots, mode="drop"))
