"""Proposals: a tree of tokens for each row, and how its nodes were drawn."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.trees.token_tree import NO_NODE

# How children are drawn under sampling; top: the most likely tokens, without randomness.
DrawMethod = Literal["with_replacement", "without_replacement", "top"]
DRAW_METHODS = get_args(DrawMethod)
ONE_HOT = -1  # as the distribution of a token that was not drawn at random


@struct.dataclass
class Draws:
    """The draws of a tree, in the order in which the verifier must try them.

    Several draws can name one node, and the verifier tries each of them: dropping a repeated draw
    would change the distribution.

    Attributes:
      parent: int32 [B, J], the node below which the token was drawn; -1: no such draw.
      node: int32 [B, J], the child that has the token.
      q_index: int32 [B, J], the index in `q` of the distribution it was drawn from, or `ONE_HOT`.
      q: [B, Q, V], the draft distributions after warping, Q >= 1.
      replacement: static; whether draws from one distribution can repeat.
    """

    parent: Int[Array, "B J"]
    node: Int[Array, "B J"]
    q_index: Int[Array, "B J"]
    q: Float[Array, "B Q V"]
    replacement: bool = struct.field(pytree_node=False, default=False)


def deterministic_draws(parents: Int[Array, "B J"], vocab: int) -> Draws:
    """Returns the draws of a tree without randomness, one for each node but the root.

    Args:
      parents: parents of nodes 1, 2, …; -1 is padding.
      vocab: V, the size of the vocabulary.
    """
    count = parents.shape[1]
    node = jnp.broadcast_to(jnp.arange(1, count + 1, dtype=jnp.int32), parents.shape)
    q = jnp.zeros((parents.shape[0], 1, vocab))
    return Draws(parents, node, jnp.full_like(node, ONE_HOT), q)


@struct.dataclass
class Proposal:
    """What a drafter proposes for one round.

    Attributes:
      tokens: int32 [B, N]; node 0 is the row's pending token.
      parents: parents of the nodes, [N] if every row has the same tree, else [B, N]; another node
        than the root with parent -1 is padding.
      draws: how they were drawn; None in greedy decoding.
    """

    tokens: Int[Array, "B N"]
    parents: jax.Array | np.ndarray
    draws: Draws | None = None

    def in_vocabulary(self, root: Int[Array, "B"], vocab_size: int) -> "Proposal":
        """Returns the proposal with the pending token as root, and other tokens in range or -1.

        Otherwise a wrong drafter would change the text: both are read before anything is verified.
        """
        tokens = jnp.clip(self.tokens, -1, vocab_size - 1).at[:, 0].set(root)
        return dataclasses.replace(self, tokens=tokens)

    def root_only(self, rows: Bool[Array, "B"]) -> "Proposal":
        """Returns the proposal without drafted tokens, which become -1, and draws of some rows."""
        drafted = jnp.arange(self.tokens.shape[1]) > 0
        tokens = jnp.where(rows[:, None] & drafted, -1, self.tokens)
        if (draws := self.draws) is not None:
            parent = jnp.where(rows[:, None], NO_NODE, draws.parent)
            draws = dataclasses.replace(draws, parent=parent)
        return dataclasses.replace(self, tokens=tokens, draws=draws)
