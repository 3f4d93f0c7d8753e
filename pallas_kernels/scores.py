"""What a query sees of a cache, and the bound of its scores: rules that all backends share."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible_slots(
    slot: Int[Array, "X"],
    slots: int,
    lengths: Int[Array, "B"],
    seen_from: Int[Array, "B T"] | None,
) -> Bool[Array, "B #T X"]:
    """Returns which slots of a cache the queries see.

    Position p is in slot p mod S. With S = 4, a row of 6 tokens has the positions 4 5 2 3 in its
    slots; a query that sees positions from 3 on sees the slots 0, 1 and 3.

    Args:
      slot: indices of slots.
      slots: S.
      lengths: the committed tokens of each row; at most S without `seen_from`.
      seen_from: the first position that each query sees; None: 0.
    """
    if seen_from is None:
        return (slot < lengths[:, None])[:, None]
    newest = lengths[:, None] - 1
    position = newest - (newest - slot) % slots  # negative in a slot that is empty
    return position[:, None] >= jnp.maximum(seen_from, 0)[:, :, None]


def capped(scores: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    """Returns scores between -softcap and softcap: softcap * tanh(scores / softcap)."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
