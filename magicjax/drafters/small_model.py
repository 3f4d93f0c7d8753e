"""A small model with a cache of its own (SpecInfer's SSM, MagicDec's stand-alone draft)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from magicjax import cache as caches
from magicjax.cache import KVCache
from magicjax.drafters.base import Proposal, Round
from magicjax.drafters.levels import draft_tree
from magicjax.model import Model
from magicjax.prefill import prefill_cache
from magicjax.tree import TokenTree


@struct.dataclass
class SmallModelState:
    """A small model between two rounds.

    Attributes:
      cache: its own keys and values.
      leaf: int32 [B], the newest committed token where `lacks`.
      lacks: whether the cache lacks that token: a leaf that was accepted was never run here.
    """

    cache: KVCache
    leaf: Int[Array, "B"]
    lacks: Bool[Array, "B"]


@struct.dataclass
class SmallModel:
    """A smaller model of the same vocabulary that drafts with its full cache.

    Attributes:
      model: as `magicjax.load` returns it.
    """

    model: Model

    def check(self, target: Model, tree: TokenTree, context: int) -> None:
        """Raises if vocabularies or tokenizers differ, or the context is too long."""
        if not isinstance(self.model, Model):
            raise TypeError(f"SmallModel needs what magicjax.load returns, not {self.model!r}")
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise ValueError(
                f"the drafter's vocabulary has {ours} tokens and the target's {theirs}: "
                "they must be the same, so pick a drafter of the target's family"
            )
        if self.model.tokenizer is not None and target.tokenizer is not None:
            _check_tokenizers(self.model, target)
        limit = self.model.config.max_positions
        if context > limit:
            raise ValueError(
                f"prompt and new tokens need {context} positions and the drafter has {limit}: "
                "use a drafter with a longer context, or a shorter prompt"
            )

    def prefill(
        self, target: Model, tokens: Int[Array, "B T"], cache: KVCache, settings: Any
    ) -> SmallModelState:
        own, _ = prefill_cache(self.model, tokens, cache.lengths, settings)
        rows = cache.lengths.shape[0]
        return SmallModelState(own, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool))

    def propose(
        self,
        target: Model,
        state: SmallModelState,
        root: Int[Array, "B"],
        cache: KVCache,
        settings: Any,
    ) -> tuple[Proposal, Any]:
        tokens, drafted = draft_tree(
            self.model,
            state.cache,
            settings.tree,
            root,
            cache.lengths,
            settings.backend,
            lead=(state.leaf, state.lacks),
        )
        return Proposal(tokens, settings.tree.array), drafted

    def commit(
        self, state: SmallModelState, draft: Any, proposal: Proposal, of_round: Round
    ) -> SmallModelState:
        """Returns the state with the lead, where it was lacking, and the kept nodes that were run.

        Only nodes with children were run, so at most the last kept one is lacking now.
        """
        path, kept = of_round.path, of_round.kept
        n = proposal.tokens.shape[1]
        childless = jnp.asarray(~np.isin(np.arange(n), proposal.parents))
        last = jnp.take_along_axis(path, jnp.maximum(kept - 1, 0)[:, None], 1)
        lacks = childless[last[:, 0]]
        padded = jnp.concatenate([path, path[:, :1]], 1)
        led = jnp.concatenate([jnp.full_like(path[:, :1], n), path], 1)
        entries = jnp.where(state.lacks[:, None], led, padded)
        count = jnp.where(kept > 0, kept - lacks + state.lacks, 0)
        leaf = jnp.take_along_axis(proposal.tokens, last, 1)[:, 0]
        return SmallModelState(
            caches.append(state.cache, draft, entries, count),
            jnp.where(kept > 0, leaf, state.leaf),
            jnp.where(kept > 0, lacks, state.lacks),
        )

    def cache_of(self, state: SmallModelState) -> KVCache:
        return state.cache


def _check_tokenizers(drafter: Model, target: Model) -> None:
    ours, theirs = drafter.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    example = differing[0]
    raise ValueError(
        f"the drafter's tokenizer differs from the target's in {len(differing)} tokens, such as "
        f"{example!r} ({ours.get(example)} against {theirs.get(example)}): "
        "they must be the same, or a drafted token would mean another word"
    )
