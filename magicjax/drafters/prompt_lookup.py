"""Prompt lookup: drafts the continuation of an n-gram match in the row's own text."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from magicjax.drafters.simulated_rounds import SimulatedRounds
from magicjax.drafters.text_lookup import TextLookup, TextState, match_lengths, newest_tokens
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from magicjax.options import option
from magicjax.settings import Settings
from magicjax.trees.merge import merge
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import NO_NODE, TokenTree, Tree
from magicjax.verification.sampling import Sampling

MAX_CHAINS = 64  # the shortest text buffer has as many slots


@struct.dataclass
class PromptLookup(TextLookup):
    """Drafts what followed earlier occurrences of the newest tokens.

    Matches of more tokens come first, then later ones; a tree of several chains below the root
    continues as many matches. A row without a match proposes nothing. A continuation that reaches
    the end of the text repeats its period. Source: prompt lookup decoding (Saxena, 2023).

    In the text 1 2 3 4 2 3 9 1 2 3 the newest tokens 1 2 3 occurred at the start, and 2 3 in the
    middle as well: a chain of two drafts 4 2, and a second one 9 1.

    Attributes:
      max_ngram: the longest n-gram, of the newest tokens, that is searched for.
      min_ngram: the shortest n-gram that counts as a match.

    Raises:
      ValueError: min_ngram is below 1 or above max_ngram.
      TypeError: a number is not an integer.
    """

    max_ngram: int = option(4, "most of the newest tokens to look for", positional=True)
    min_ngram: int = option(1, "fewest of the newest tokens to look for")

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} and max_ngram={self.max_ngram}: "
                "min_ngram must be at least 1 and at most max_ngram"
            )

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError unless `tree` is 1 to `MAX_CHAINS` chains below the root."""
        if not isinstance(tree, TokenTree) or any(
            tree.parents.count(n) > 1 for n in tree.inner[1:]
        ):
            raise ValueError(
                "prompt lookup proposes chains, and this tree branches below the root's children: "
                f"use a chain, or an expansion such as 2,1,1\n{tree}"
            )
        if tree.parents.count(0) > MAX_CHAINS:
            raise ValueError(
                f"prompt lookup of {tree.parents.count(0)} chains: at most {MAX_CHAINS} are "
                "supported"
            )

    def propose(
        self,
        target: Model,
        state: TextState,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, SimulatedRounds]:
        proposal, simulated = super().propose(target, state, root, cache, sampling, settings)
        tree = settings.tree
        assert isinstance(tree, TokenTree)  # `check` rejects dynamic trees
        if tree.parents.count(0) > 1:  # equal continuations become one branch
            proposal, _ = merge([proposal], tree.depth)
        return proposal, simulated

    def continuations(
        self, text: Int[Array, "B S"], newest: Int[Array, "B"], tree: Tree
    ) -> tuple[Int[Array, "B N-1"], Int[Array, "B N-1"]]:
        assert isinstance(tree, TokenTree)
        start, has_match = self._matches(text, newest, tree.parents.count(0))
        branch, depth = _branches(tree), tree.node_depths[1:]
        start = start[:, branch]
        period = newest[:, None] + 1 - start
        index = start + (depth - 1) % jnp.maximum(period, 1)
        parents = jnp.where(has_match[:, branch], jnp.asarray(tree.array[1:]), NO_NODE)
        return jnp.take_along_axis(text, index, 1), parents

    def _matches(
        self, text: Int[Array, "B S"], newest: Int[Array, "B"], count: int
    ) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
        """Returns the indices just after the `count` best matches, and which of them exist."""
        slots = jnp.arange(text.shape[1])
        length = match_lengths(text, newest_tokens(text, newest, self.max_ngram))
        exists = (slots <= newest[:, None]) & (length >= self.min_ngram)
        score = jnp.where(exists, length * text.shape[1] + slots, -1)
        best, start = jax.lax.top_k(score.astype(jnp.int32), count)
        return start, best >= 0


def _branches(tree: TokenTree) -> np.ndarray:
    """Returns which chain each node but the root belongs to, int [N - 1].

    Parents [-1, 0, 0, 1, 2] give [0, 1, 0, 1].
    """
    chain_of: dict[int, int] = {}
    for node, parent in enumerate(tree.parents[1:], 1):
        chain_of[node] = len(set(chain_of.values())) if parent == 0 else chain_of[parent]
    return np.array(list(chain_of.values()))
