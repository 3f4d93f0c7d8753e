"""Self-speculation: the target drafts for itself on a sparse cache (MagicDec)."""

import operator
from typing import Any

from flax import struct
from jaxtyping import Array, Int

from magicjax import cache as caches
from magicjax.cache import DraftCache, KVCache
from magicjax.drafters.base import Round
from magicjax.drafters.dynamic import draft_tree
from magicjax.drafters.running import Source, check_width, drawing_of
from magicjax.model import Model
from magicjax.policies import Policy, find
from magicjax.proposal import Proposal
from magicjax.sampling import Sampling
from magicjax.tree import Shape, Tree


@struct.dataclass
class SelfSpeculation:
    """The target itself, reading `budget` entries of its own cache instead of all.

    The entries are gathered from the target's prefill, and each commit brings in the *verified*
    keys and values, so they never drift. Source: MagicDec (arXiv 2408.11049), section 4.

    Attributes:
      policy: which tokens of the prompt are pinned: a name, or an object (`magicjax.policies`).
      budget: C, the slots of the draft cache for each layer and KV head.
      draw: how children are drawn under sampling (`DRAWINGS`); None: without replacement, and in
        a dynamic tree the most likely.
    """

    policy: Policy | str = struct.field(pytree_node=False, default="streaming")
    budget: int = struct.field(pytree_node=False, default=256)
    draw: str | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "policy", find(self.policy))
        object.__setattr__(self, "budget", operator.index(self.budget))

    @property
    def _policy(self) -> Policy:
        assert not isinstance(self.policy, str)  # `__post_init__` has looked it up
        return self.policy

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError if paths of that depth overrun the ring, or `tree` is too wide."""
        drawing_of(self.draw, tree)
        check_width(tree, target.config.vocab_size)
        pinned = self._policy.num_pinned(self.budget)
        needed = pinned + depth + 1
        if self.budget < needed:
            raise ValueError(
                f"budget={self.budget} leaves too small a ring: it must be at least "
                f"sinks ({pinned}) + tree depth ({depth}) + 1 = {needed}"
            )

    def shape(self, tree: Tree) -> Shape:
        return tree.shape

    def drawings(self, tree: Tree) -> set[str]:
        return {drawing_of(self.draw, tree)}

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, settings: Any
    ) -> DraftCache:
        return caches.gather(cache, self._policy.pins(cache, self.budget), self.budget)

    def propose(
        self,
        target: Model,
        state: DraftCache,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Any,
    ) -> tuple[Proposal, None]:
        source = Source(
            model=target,
            cache=state,
            root=root,
            root_position=state.count,
            sampling=sampling,
            lead=None,
            drawing=drawing_of(self.draw, settings.tree),
            backend=settings.backend,
            index=settings.index,
        )
        return draft_tree(source, settings.tree)[0], None

    def commit(
        self, state: DraftCache, draft: None, proposal: Proposal, of_round: Round
    ) -> DraftCache:
        return caches.append_ring(state, of_round.new, of_round.path, of_round.kept)

    def caches(self, state: DraftCache) -> tuple[DraftCache]:
        return (state,)
