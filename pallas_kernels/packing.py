"""Layouts that kernels share: the queries of a KV head as rows, padded to whole tiles."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.lse_merge import MASKED


def grouped_rows(x: Float[Array, "B T H *D"], kv_heads: int) -> Float[Array, "B K R *D"]:
    """Returns the queries of each key/value head as rows of one matrix, R = T * G.

    The keys are then read once for all of them.
    """
    batch, length, heads, *rest = x.shape
    x = x.reshape(batch, length, kv_heads, heads // kv_heads, *rest).swapaxes(1, 2)
    return x.reshape(batch, kv_heads, length * heads // kv_heads, *rest)


def ungrouped(x: Float[Array, "B K R *D"], length: int, heads: int) -> Float[Array, "B T H *D"]:
    """Returns rows as `grouped_rows` takes them; rows from T * G on are padding."""
    batch, kv_heads, _, *rest = x.shape
    group = heads // kv_heads
    x = x[:, :, : length * group].reshape(batch, kv_heads, length, group, *rest).swapaxes(1, 2)
    return x.reshape(batch, length, heads, *rest)


def mask_bias(
    mask: Bool[Array, "X T N"], group: int, rows: int, new: int
) -> Float[Array, "X rows new"]:
    """Returns what is added to the scores of new tokens, 0 or MASKED, padded to rows and new."""
    bias = jnp.repeat(jnp.where(mask, 0.0, MASKED).astype(jnp.float32), group, axis=1)
    return pad(pad(bias, 1, rows, MASKED), 2, new, MASKED)


def pad(x: Array, axis: int, size: int, value: float = 0) -> Array:
    """Returns x with one axis padded to a size."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def round_up(n: int, multiple: int) -> int:
    """Returns the smallest multiple that is at least n and 1."""
    return -(-max(n, 1) // multiple) * multiple
