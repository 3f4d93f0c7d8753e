"""Prompt lookup: drafts the continuation of an n-gram match in the row's own text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from magicjax.drafters.base import Drafter, RoundOutcome
from magicjax.drafters.simulated_rounds import SimulatedRounds
from magicjax.model import Model
from magicjax.options import option
from magicjax.settings import Settings
from magicjax.trees.merge import merge
from magicjax.trees.proposal import Proposal, deterministic_draws
from magicjax.trees.token_tree import NO_NODE, TokenTree, Tree, chain

MAX_CHAINS = 64  # the shortest text buffer has as many slots


@struct.dataclass
class PromptLookupState:
    """The committed text between two rounds.

    Attributes:
      text: int32 [B, S], prompt and emitted tokens without the pending one; undefined from `count`.
      count: int32 [B].
      simulated: rounds of a chain, as deep as the tree, while it does not draft.
    """

    text: Int[Array, "B S"]
    count: Int[Array, "B"]
    simulated: SimulatedRounds


@struct.dataclass
class PromptLookup(Drafter):
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

    def draw_methods(self, tree: Tree) -> set[str]:
        return {"top"}

    def prefill(
        self, target, tokens, cache, stats, settings: Settings, previous=None
    ) -> PromptLookupState:
        text = jnp.pad(tokens, ((0, 0), (0, settings.capacity - tokens.shape[1])))
        simulated = SimulatedRounds.create(tokens.shape[0], settings.tree.depth)
        return PromptLookupState(text, cache.lengths, simulated)

    def propose(
        self, target, state: PromptLookupState, root, cache, sampling, settings: Settings
    ) -> tuple[Proposal, SimulatedRounds]:
        tree = settings.tree
        assert isinstance(tree, TokenTree)  # `check` rejects dynamic trees
        text = state.text.at[jnp.arange(root.shape[0]), state.count].set(root)
        if tree.num_nodes == 1:
            simulated = state.simulated.continued(
                text, state.count, functools.partial(self._chain, text, state)
            )
            return Proposal(root[:, None], tree.array), simulated
        drafted, found = self.continuations(text, state.count, tree)
        tokens = jnp.concatenate([root[:, None], drafted], 1)
        parents = jnp.where(found, jnp.asarray(tree.array[1:]), NO_NODE)
        draws = None
        if sampling is not None:
            draws = deterministic_draws(parents, target.local_vocab)
        parents = jnp.concatenate([jnp.full_like(root, NO_NODE)[:, None], parents], 1)
        proposal = Proposal(tokens, parents, draws)
        if tree.parents.count(0) > 1:  # equal continuations become one branch
            proposal, _ = merge([proposal], tree.depth)
        return proposal, state.simulated.closed()

    def _chain(self, text: Int[Array, "B S"], state: PromptLookupState) -> Int[Array, "B D"]:
        """Returns the tokens of a chain as deep as those of the simulated rounds; -1: none."""
        depth = state.simulated.drafted.shape[1]
        drafted, found = self.continuations(text, state.count, chain(depth))
        return jnp.where(found, drafted, -1)

    def continuations(
        self, text: Int[Array, "B S"], newest: Int[Array, "B"], tree: TokenTree
    ) -> tuple[Int[Array, "B D"], Bool[Array, "B D"]]:
        """Returns the tokens of a tree's D = N - 1 drafted nodes, and which of them exist.

        Args:
          text: of each row; undefined after its newest token.
          newest: the index of that token, which is the root.
          tree: chains below the root.
        """
        start, found = self._matches(text, newest, tree.parents.count(0))
        branch, depth = _branches(tree), tree.node_depths[1:]
        start = start[:, branch]
        period = newest[:, None] + 1 - start
        index = start + (depth - 1) % jnp.maximum(period, 1)
        return jnp.take_along_axis(text, index, 1), found[:, branch]

    def _matches(
        self, text: Int[Array, "B S"], newest: Int[Array, "B"], count: int
    ) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
        """Returns the indices just after the `count` best matches, and which of them exist."""
        rows, slots = jnp.arange(text.shape[0]), jnp.arange(text.shape[1])
        length = jnp.zeros(text.shape, jnp.int32)  # of the match that ends before each slot
        matches = (slots >= 1) & (slots <= newest[:, None])
        for back in range(1, self.max_ngram + 1):
            token = text[rows, jnp.maximum(newest + 1 - back, 0)]
            matches &= (jnp.roll(text, back, 1) == token[:, None]) & (slots >= back)
            length += matches
        score = jnp.where(length >= self.min_ngram, length * text.shape[1] + slots, -1)
        best, start = jax.lax.top_k(score.astype(jnp.int32), count)
        return start, best >= 0

    def commit(
        self,
        target,
        state: PromptLookupState,
        draft: SimulatedRounds,
        proposal,
        outcome: RoundOutcome,
    ) -> PromptLookupState:
        tokens = jnp.take_along_axis(proposal.tokens, outcome.path, 1)
        write = jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (start,)))
        text = write(state.text, tokens, state.count)
        return PromptLookupState(text, state.count + outcome.committed, draft)

    def simulated(self, state: PromptLookupState) -> Int[Array, "B A"]:
        return state.simulated.histogram

    def synthetic_state(
        self, state: PromptLookupState, lengths: Int[Array, "B"]
    ) -> PromptLookupState:
        return dataclasses.replace(state, count=jnp.array(lengths))


def _branches(tree: TokenTree) -> np.ndarray:
    """Returns which chain each node but the root belongs to, int [N - 1].

    Parents [-1, 0, 0, 1, 2] give [0, 1, 0, 1].
    """
    chain_of: dict[int, int] = {}
    for node, parent in enumerate(tree.parents[1:], 1):
        chain_of[node] = len(set(chain_of.values())) if parent == 0 else chain_of[parent]
    return np.array(list(chain_of.values()))
