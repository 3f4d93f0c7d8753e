"""What a drafter proposes: a tree of tokens for each row, and how its nodes came about."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

ONE_HOT = -1  # as a draw's distribution: the token was not drawn, it was the drafter's only choice


# How children can be drawn under sampling -> the verifier that is exact for it.
DRAWINGS = {
    "with_replacement": "mss_with_replacement",
    "without_replacement": "mss_without_replacement",
    "top": "one_hot",  # the most likely tokens: nothing is drawn
}


@struct.dataclass
class Draws:
    """How the nodes came about, in the order in which the verifier must try them.

    A try is a fact about the draw, not about the node: several draws may name one node, and each
    of them counts.

    Attributes:
      parent: int32 [B, J], the node below which the token was drawn; -1: there was no such draw.
      node: int32 [B, J], the child that carries the token.
      q_of: int32 [B, J], which row of `q` it was drawn from; `ONE_HOT`: it was not drawn.
      q: [B, Q, V], the drafts' distributions after warping, Q >= 1.
      replacement: static; whether draws from one row of `q` could repeat.
    """

    parent: Int[Array, "B J"]
    node: Int[Array, "B J"]
    q_of: Int[Array, "B J"]
    q: Float[Array, "B Q V"]
    replacement: bool = struct.field(pytree_node=False, default=False)


def deterministic_draws(parents: Int[Array, "B J"], vocab: int) -> Draws:
    """Returns the draws of nodes 1, 2, … of a tree in which nothing was drawn.

    Args:
      parents: of those nodes; -1: padding.
      vocab: V.
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
      parents: of the nodes, [N] where every row has the same tree, else [B, N]; a node without a
        parent (-1, behind node 0) is padding and is never tried.
      draws: how they were drawn; None: nobody will ask (greedy decoding).
    """

    tokens: Int[Array, "B N"]
    parents: jax.Array | np.ndarray
    draws: Draws | None = None
