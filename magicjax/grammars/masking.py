"""Masks of the target's logits by the tokens that a grammar allows; traced into the programs.

A mask is uint32 [..., W] with W = ceil(V / 32): bit i of word w is that of token 32 w + i. All bits
are set in rows without a grammar.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from sharding import collectives
from sharding.collectives import AxisNames

WORD = 32  # tokens of a word


def mask(
    logits: Float[Array, "*B V"],
    allowed: UInt32[Array, "*B W"],
    vocab_size: int,
    axis_names: AxisNames = (),
) -> Float[Array, "*B V"]:
    """Returns the logits with -inf for tokens that are not allowed.

    Args:
      logits: logits of all tokens, or of this device's shard.
      allowed: masks over all tokens.
      vocab_size: the number of tokens.
      axis_names: the mesh axes that shard the vocabulary.
    """
    bits = (allowed[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    bits = bits.reshape(*allowed.shape[:-1], -1)[..., :vocab_size]
    bits = collectives.local_slice(bits, (), axis_names)
    return jnp.where(bits == 1, logits, -jnp.inf)
