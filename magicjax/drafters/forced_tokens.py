"""Drafts the tokens that a grammar forces, such as the names of a JSON object's properties."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters.base import Drafter, Previous, RoundOutcome
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.model import Model
from magicjax.settings import Settings
from magicjax.trees.proposal import Proposal, deterministic_draws
from magicjax.trees.token_tree import NO_NODE, TokenTree, Tree
from magicjax.verification.sampling import Sampling

NO_TOKEN = -1


@struct.dataclass
class ForcedTokens(Drafter):
    """Proposes the tokens of the text that a row's grammar forces, in the tokenizer's own tokens.

    The target still chooses among all tokens that spell the text, so that the distribution of texts
    is the masked target's. The state is int32 [B, D], which the host sets before each round
    (`with_forced`); a row without forced tokens or without a grammar proposes nothing.
    """

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError unless `tree` is a chain."""
        if not isinstance(tree, TokenTree) or tree.width > 1:
            raise ValueError(f"forced tokens are a chain: use a tree such as chain:4\n{tree}")

    @property
    def takes_partial_batch(self) -> bool:
        return True

    def draw_methods(self, tree: Tree) -> set[str]:
        return {"top"}

    def prefill(
        self,
        target: Model,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        stats: ModelStats,
        settings: Settings,
        previous: Previous | None = None,
    ) -> Int[Array, "B D"]:
        return jnp.full((tokens.shape[0], max(1, settings.tree.depth)), NO_TOKEN, jnp.int32)

    def propose(
        self,
        target: Model,
        state: Int[Array, "B D"],
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, None]:
        tree = settings.tree
        assert isinstance(tree, TokenTree)  # since `check`
        forced = state[:, : tree.depth]
        parents = jnp.where(forced == NO_TOKEN, NO_NODE, jnp.asarray(tree.array[1:]))
        draws = None
        if sampling is not None:
            draws = deterministic_draws(parents, target.local_vocab)
        tokens = jnp.concatenate([root[:, None], forced], 1)
        parents = jnp.concatenate([jnp.full_like(root, NO_NODE)[:, None], parents], 1)
        return Proposal(tokens, parents, draws), None

    def commit(
        self,
        target: Model,
        state: Int[Array, "B D"],
        draft: None,
        proposal: Proposal,
        outcome: RoundOutcome,
    ) -> Int[Array, "B D"]:
        return jnp.full_like(state, NO_TOKEN)

    def with_forced(
        self, state: Int[Array, "B D"], forced: Callable[[int], Int[Array, "B D"]]
    ) -> Int[Array, "B D"]:
        return forced(state.shape[1])
