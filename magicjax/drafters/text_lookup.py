"""What drafters have in common that continue earlier occurrences of the newest tokens."""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.drafters.base import Drafter, Previous, RoundOutcome
from magicjax.drafters.simulated_rounds import SimulatedRounds
from magicjax.drafters.text_store import NO_TOKEN
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.model import Model
from magicjax.settings import Settings
from magicjax.trees.proposal import Proposal, deterministic_draws
from magicjax.trees.token_tree import NO_NODE, ROOT_ONLY, Tree, chain
from magicjax.verification.sampling import Sampling

ABSENT = -2  # before the first token of a row; equals nothing in a text or a store


@struct.dataclass
class TextState:
    """The committed text between two rounds.

    Attributes:
      text: int32 [B, S], prompt and emitted tokens without the pending one; undefined from `count`.
      count: int32 [B].
      simulated: rounds of a chain, as deep as the tree, while it does not draft.
    """

    text: Int[Array, "B S"]
    count: Int[Array, "B"]
    simulated: SimulatedRounds

    def with_length(self, length: int) -> "TextState":
        """Returns the state with `length` tokens in every row."""
        return dataclasses.replace(self, count=jnp.full_like(self.count, length))


class TextLookup(Drafter):
    """A drafter that looks up the newest tokens in texts; it runs no model."""

    @abc.abstractmethod
    def continuations(
        self, text: Int[Array, "B S"], newest: Int[Array, "B"], tree: Tree
    ) -> tuple[Int[Array, "B N-1"], Int[Array, "B N-1"]]:
        """Returns the tokens of a tree's N - 1 drafted nodes, and their parents.

        The parent of a node that does not exist is `NO_NODE`.

        Args:
          text: the tokens of each row; undefined after its newest token.
          newest: the index of that token, which is the root.
          tree: what may be proposed.
        """

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
    ) -> TextState:
        text = jnp.pad(tokens, ((0, 0), (0, settings.capacity - tokens.shape[1])))
        simulated = SimulatedRounds.create(tokens.shape[0], settings.tree.depth)
        return TextState(text, cache.lengths, simulated)

    def propose(
        self,
        target: Model,
        state: TextState,
        root: Int[Array, "B"],
        cache: KVCache,
        sampling: Sampling | None,
        settings: Settings,
    ) -> tuple[Proposal, SimulatedRounds]:
        text = state.text.at[jnp.arange(root.shape[0]), state.count].set(root)
        if settings.tree.num_nodes == 1:
            draft = functools.partial(self._chain, text, state)
            simulated = state.simulated.continued(text, state.count, draft)
            return Proposal(root[:, None], ROOT_ONLY.array), simulated
        tokens, parents = self.continuations(text, state.count, settings.tree)
        draws = None
        if sampling is not None:
            draws = deterministic_draws(parents, target.local_vocab)
        tokens = jnp.concatenate([root[:, None], tokens], 1)
        parents = jnp.concatenate([jnp.full_like(root, NO_NODE)[:, None], parents], 1)
        return Proposal(tokens, parents, draws), state.simulated.closed()

    def _chain(self, text: Int[Array, "B S"], state: TextState) -> Int[Array, "B D"]:
        """Returns the tokens of a chain as deep as those of the simulated rounds; -1: none."""
        depth = state.simulated.drafted.shape[1]
        tokens, parents = self.continuations(text, state.count, chain(depth))
        return jnp.where(parents == NO_NODE, -1, tokens)

    def commit(
        self,
        target: Model,
        state: TextState,
        draft: SimulatedRounds,
        proposal: Proposal,
        outcome: RoundOutcome,
    ) -> TextState:
        tokens = jnp.take_along_axis(proposal.tokens, outcome.path, 1)
        write = jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (start,)))
        text = write(state.text, tokens, state.count)
        return TextState(text, state.count + outcome.committed, draft)

    def rewind(self, before: TextState, after: TextState) -> TextState:
        return dataclasses.replace(before, text=after.text)

    def simulated(self, state: TextState) -> Int[Array, "B A"]:
        return state.simulated.histogram


def newest_tokens(
    text: Int[Array, "B S"], newest: Int[Array, "B"], count: int
) -> Int[Array, "B L"]:
    """Returns the L = `count` newest tokens of each row, the newest first.

    Args:
      text: the tokens of each row; undefined after its newest token.
      newest: the index of that token.
      count: L; a row with fewer tokens has `ABSENT` in their place.
    """
    index = newest[:, None] - jnp.arange(count)
    tokens = jnp.take_along_axis(text, jnp.maximum(index, 0), 1)
    return jnp.where(index >= 0, tokens, ABSENT)


def match_lengths(text: Int[Array, "B S"], newest: Int[Array, "B L"]) -> Int[Array, "B S"]:
    """Returns how many of the newest tokens stand right before each slot, 0 to L.

    In the text 1 2 3 1 2 the newest tokens 2 1 (the newest first) give 0 0 2 0 0.

    Args:
      text: the tokens of each row.
      newest: the newest tokens of each row, the newest first.
    """
    slots, longest = text.shape[1], newest.shape[1]
    padded = jnp.pad(text, ((0, 0), (longest, 0)), constant_values=NO_TOKEN)
    length = jnp.zeros(text.shape, jnp.int32)
    matches = jnp.ones(text.shape, bool)
    for back in range(1, longest + 1):
        before = padded[:, longest - back : longest - back + slots]
        matches &= before == newest[:, back - 1 : back]
        length += matches
    return length
