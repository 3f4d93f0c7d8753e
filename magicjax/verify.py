"""Verifiers: given what the target says at every node, which path is the target's own."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax import tree as trees


@struct.dataclass
class Verdict:
    """What the target made of a proposal.

    Attributes:
      path: int32 [B, A], the accepted nodes, the root first; the last one repeats to the end.
      accepted: int32 [B], how many speculated tokens lie on the path: 0..A-1.
      bonus: int32 [B], the target's token behind the path.
    """

    path: Int[Array, "B A"]
    accepted: Int[Array, "B"]
    bonus: Int[Array, "B"]


def greedy(
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    parents: trees.Parents,
    depth: int,
    width: int,
) -> Verdict:
    """Returns the path that greedy decoding takes through the tree.

    From the root on, the child that carries the target's own choice is accepted (the first one,
    should siblings carry the same token); where no child does, the choice is the bonus.

    Args:
      logits: the target's, at every node.
      tokens: of the nodes.
      parents: of the nodes, [N] or [B, N].
      depth, width: the most edges of a path, and children of a node.
    """
    choice = logits.argmax(-1).astype(jnp.int32)  # [B,N]
    batch, n = tokens.shape
    below = jnp.broadcast_to(trees.children(parents, max(1, width)), (batch, n, max(1, width)))
    rows = jnp.arange(batch)
    node = jnp.zeros(batch, jnp.int32)
    accepted = jnp.zeros(batch, jnp.int32)
    path = [node]
    for step in range(depth):
        options = below[rows, node]  # [B,W]
        drafted = jnp.take_along_axis(tokens, jnp.maximum(options, 0), 1)
        matches = (drafted == choice[rows, node][:, None]) & (options != trees.NO_NODE)
        going = matches.any(-1) & (accepted == step)
        node = jnp.where(going, options[rows, matches.argmax(-1)], node)
        accepted = accepted + going
        path.append(node)
    return Verdict(jnp.stack(path, 1), accepted, choice[rows, node])
