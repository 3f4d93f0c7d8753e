"""Several drafters, their trees merged into one (SpecInfer)."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters.base import Drafter, Previous, RoundOutcome, commit_checked
from magicjax.drafters.cascade import Cascade
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.model import Model
from magicjax.settings import Settings, StatsSpec
from magicjax.trees.merge import merge
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import Tree, TreeShape, check_tree
from magicjax.verification.sampling import MAX_DRAFTERS, Sampling


@struct.dataclass
class Ensemble(Drafter):
    """Drafters that each propose a tree; the target scores the union of the trees.

    Under sampling the verifier tries all draws in the members' order, each with its own
    distribution. Source: SpecInfer (arXiv 2305.09781), section 3.

    Attributes:
      drafters: the members.
      trees: each member's tree; None: all members draft the tree passed to `generate`.

    Raises:
      ValueError: no or too many members, a nested ensemble, a cascade, or not one tree for each
        member.
      TypeError: a tree that is not a `TokenTree` or `DynamicTree`.
    """

    drafters: tuple[Drafter, ...]
    trees: tuple[Tree, ...] | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "drafters", tuple(self.drafters))
        if self.trees is not None:
            object.__setattr__(self, "trees", tuple(self.trees))
        count = len(self.drafters)
        if not 1 <= count <= MAX_DRAFTERS:
            raise ValueError(f"an ensemble of {count} drafters: give 1 to {MAX_DRAFTERS}")
        if any(isinstance(drafter, Ensemble) for drafter in self.drafters):
            raise ValueError("an ensemble within an ensemble: list all drafters in one")
        if any(isinstance(drafter, Cascade) for drafter in self.drafters):
            raise ValueError(
                "a cascade within an ensemble is not supported: use the other drafters in an "
                "ensemble that is the cascade's first drafter"
            )
        for tree in self.trees or ():
            check_tree(tree)
        if self.trees is not None and len(self.trees) != count:
            raise ValueError(f"{len(self.trees)} trees for {count} drafters: give one for each")

    def with_trees(
        self, tree: Tree, member_trees: tuple[Tree, ...] | None = None
    ) -> list[tuple[Drafter, Tree]]:
        """Returns each drafter and its tree.

        Args:
          tree: the tree of members without trees of their own.
          member_trees: trees of all members; None: their own.
        """
        trees = member_trees or self.trees or (tree,) * len(self.drafters)
        return list(zip(self.drafters, trees, strict=True))

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        for drafter, member_tree in self.with_trees(tree):
            if member_tree.num_nodes < 2:
                raise ValueError(f"a member's tree has only a root: give it a child\n{member_tree}")
            drafter.check(target, member_tree, depth, context)

    def for_target(self, target: Model) -> "Ensemble":
        members = tuple(drafter.for_target(target) for drafter in self.drafters)
        return dataclasses.replace(self, drafters=members)

    def shape(self, tree: Tree) -> TreeShape:
        return self.shape_of(self.with_trees(tree))

    def shape_of(self, members: Sequence[tuple[Drafter, Tree]]) -> TreeShape:
        """Returns the bounds of the union of the members' proposals for their trees."""
        shapes = [drafter.shape(tree) for drafter, tree in members]
        return TreeShape(
            1 + sum(shape.num_nodes - 1 for shape in shapes),
            max(shape.depth for shape in shapes),
            sum(shape.width for shape in shapes),
        )

    def draw_methods(self, tree: Tree) -> set[str]:
        members = self.with_trees(tree)
        return set().union(*(drafter.draw_methods(member_tree) for drafter, member_tree in members))

    def _with_settings(self, settings: Settings) -> list[tuple[Drafter, Settings]]:
        """Returns each drafter and its settings."""
        members = self.with_trees(settings.tree, settings.member_trees)
        backlog = max(self.shape_of(members).depth, settings.max_backlog)
        return [
            (
                drafter,
                dataclasses.replace(settings, tree=tree, max_backlog=backlog, drafter_index=index),
            )
            for index, (drafter, tree) in enumerate(members)
        ]

    def stats_spec(self) -> StatsSpec:
        specs = (drafter.stats_spec() for drafter in self.drafters)
        return functools.reduce(operator.or_, specs)

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        return sum(drafter.cache_bytes(target, batch, capacity) for drafter in self.drafters)

    def state_bytes(self, batch: int) -> int:
        return sum(drafter.state_bytes(batch) for drafter in self.drafters)

    def prefill(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        stats: ModelStats,
        settings: Settings,
        previous: Previous | None = None,
    ) -> tuple[Any, ...]:
        members = self._with_settings(settings)
        previous_states: list[Previous | None] = [None] * len(members)
        if previous is not None:
            previous_states = [Previous(state, previous.reused) for state in previous.state]
        return tuple(
            drafter.prefill(target, tokens, cache, stats, member_settings, member_previous)
            for (drafter, member_settings), member_previous in zip(
                members, previous_states, strict=True
            )
        )

    def propose(
        self,
        target: Model,
        state: tuple[Any, ...],
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, tuple[Any, ...]]:
        members = zip(self._with_settings(settings), state, strict=True)
        proposals, drafts = zip(
            *(
                drafter.propose(target, member_state, root, cache, sampling, member_settings)
                for (drafter, member_settings), member_state in members
            ),
            strict=True,
        )
        drafting = [i for i, proposal in enumerate(proposals) if proposal.tokens.shape[1] > 1]
        if not drafting:
            return proposals[0], drafts
        merged, node_of = merge([proposals[i] for i in drafting], settings.shape.depth)
        nodes, numbers = merged.tokens.shape[1], dict(zip(drafting, node_of, strict=True))
        root_only = jnp.zeros((len(root), 1), jnp.int32)
        return merged, tuple(
            drafter.renumber(draft, numbers.get(i, root_only), nodes)
            for i, (drafter, draft) in enumerate(zip(self.drafters, drafts, strict=True))
        )

    def commit(
        self,
        target: Model,
        state: tuple[Any, ...],
        draft: tuple[Any, ...],
        proposal: Proposal,
        outcome: RoundOutcome,
    ) -> tuple[Any, ...]:
        return tuple(
            commit_checked(drafter, target, member_state, member_draft, proposal, outcome)
            for drafter, member_state, member_draft in zip(self.drafters, state, draft, strict=True)
        )

    def renumber(
        self, draft: tuple[Any, ...], node_of: Int[Array, "B N"], num_nodes: int
    ) -> tuple[Any, ...]:
        members = zip(self.drafters, draft, strict=True)
        return tuple(
            drafter.renumber(member_draft, node_of, num_nodes) for drafter, member_draft in members
        )

    def rewind(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[Any, ...]:
        members = zip(self.drafters, before, after, strict=True)
        return tuple(drafter.rewind(old, new) for drafter, old, new in members)

    def insert(
        self, state: tuple[Any, ...], row: tuple[Any, ...], slot: Int[Array, ""]
    ) -> tuple[Any, ...]:
        members = zip(self.drafters, state, row, strict=True)
        return tuple(drafter.insert(old, new, slot) for drafter, old, new in members)

    def extract(self, state: tuple[Any, ...], slot: Int[Array, ""]) -> tuple[Any, ...]:
        members = zip(self.drafters, state, strict=True)
        return tuple(drafter.extract(member_state, slot) for drafter, member_state in members)

    def with_forced(
        self, state: tuple[Any, ...], forced: Callable[[int], Int[Array, "B D"]]
    ) -> tuple[Any, ...]:
        members = zip(self.drafters, state, strict=True)
        return tuple(drafter.with_forced(member_state, forced) for drafter, member_state in members)

    @property
    def takes_partial_batch(self) -> bool:
        return all(drafter.takes_partial_batch for drafter in self.drafters)

    @property
    def remembers(self) -> bool:
        return any(drafter.remembers for drafter in self.drafters)

    def remember(self, text: Any, prompt: int = 0) -> "Ensemble":
        members = tuple(drafter.remember(text, prompt) for drafter in self.drafters)
        return dataclasses.replace(self, drafters=members)

    def members(self) -> tuple[Drafter, ...]:
        return self.drafters
