"""Self-speculation: the target drafts for itself on a sparse cache (MagicDec)."""

import operator
from typing import Any

from flax import struct
from jaxtyping import Array, Int

from magicjax import cache as caches
from magicjax.cache import DraftCache, KVCache
from magicjax.drafters.base import Proposal, Round
from magicjax.drafters.levels import draft_tree
from magicjax.model import Model
from magicjax.policies import Policy, find
from magicjax.tree import TokenTree


@struct.dataclass
class SelfSpeculation:
    """The target itself, reading `budget` entries of its own cache instead of all.

    The entries are gathered from the target's prefill, and each commit brings in the *verified*
    keys and values, so they never drift. Source: MagicDec (arXiv 2408.11049), section 4.

    Attributes:
      policy: which tokens of the prompt are pinned: a name, or an object (`magicjax.policies`).
      budget: C, the slots of the draft cache for each layer and KV head.
    """

    policy: Policy | str = struct.field(pytree_node=False, default="streaming")
    budget: int = struct.field(pytree_node=False, default=256)

    def __post_init__(self):
        object.__setattr__(self, "policy", find(self.policy))
        object.__setattr__(self, "budget", operator.index(self.budget))

    @property
    def _policy(self) -> Policy:
        assert not isinstance(self.policy, str)  # `__post_init__` has looked it up
        return self.policy

    def check(self, target: Model, tree: TokenTree, context: int) -> None:
        """Raises ValueError if the budget leaves too small a ring for `tree`."""
        pinned = self._policy.num_pinned(self.budget)
        needed = pinned + tree.depth + 1
        if self.budget < needed:
            raise ValueError(
                f"budget={self.budget} leaves too small a ring: it must be at least "
                f"sinks ({pinned}) + tree depth ({tree.depth}) + 1 = {needed}"
            )

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, settings: Any
    ) -> DraftCache:
        return caches.gather(cache, self._policy.pins(cache, self.budget), self.budget)

    def propose(
        self, target: Model, state: DraftCache, root: Int[Array, "B"], cache: KVCache, settings: Any
    ) -> tuple[Proposal, None]:
        tree = settings.tree
        tokens, _ = draft_tree(target, state, tree, root, state.count, settings.backend)
        return Proposal(tokens, tree.array), None

    def commit(
        self, state: DraftCache, draft: None, proposal: Proposal, of_round: Round
    ) -> DraftCache:
        return caches.append_ring(state, of_round.new, of_round.path, of_round.kept)

    def cache_of(self, state: DraftCache) -> DraftCache:
        return state
