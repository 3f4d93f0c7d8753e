"""The definition of tree attention and of the mass of slots: one softmax over all keys.

Every other backend is tested against this one, which is written for readability.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.lse_merge import EMPTY_LSE, accumulator_dtype
from pallas_kernels.quantized import Quantized, dequantize
from pallas_kernels.scores import capped, visible_slots


def attend(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"] | Quantized,
    v_prefix: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, " B"],
    k_new: Float[Array, "B N K D"],
    v_new: Float[Array, "B N K D"],
    mask: Bool[Array, "#B T N"],
    first_row: Int[Array, ""] | int | None = None,
    seen_from: Int[Array, "B T"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Returns (out, lse) in float32, or in float64 for float64 inputs."""
    dtype = accumulator_dtype(q.dtype)
    batch, length, heads, size = q.shape
    if first_row is not None:
        k_prefix, v_prefix = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, first_row, batch), (k_prefix, v_prefix)
        )
    kv_heads, slots = k_prefix.shape[1:3]

    def concatenated(prefix, new):  # [B, S + N, H, D]
        if isinstance(prefix, Quantized):
            prefix = dequantize(prefix, dtype)
        both = jnp.concatenate([prefix.swapaxes(1, 2), new], axis=1).astype(dtype)
        return jnp.repeat(both, heads // kv_heads, axis=2)

    visible = visible_slots(jnp.arange(slots), slots, lengths, seen_from)  # [B, 1 or T, S]
    seen = jnp.concatenate(
        [
            jnp.broadcast_to(visible, (batch, length, slots)),
            jnp.broadcast_to(mask, (batch, *mask.shape[1:])),
        ],
        axis=-1,
    )[:, None]  # [B, 1, T, S + N]

    highest = lax.Precision.HIGHEST
    keys, values = concatenated(k_prefix, k_new), concatenated(v_prefix, v_new)
    scores = jnp.einsum("bthd,bshd->bhts", q.astype(dtype), keys, precision=highest)
    scores = jnp.where(seen, capped(scores * size**-0.5, softcap), -jnp.inf)
    peak = scores.max(-1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0)  # a row that sees no key: exp(-inf - 0) = 0
    weights = jnp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    nonempty = total > 0
    probabilities = weights / jnp.where(nonempty, total, 1)
    out = jnp.einsum("bhts,bshd->bthd", probabilities, values, precision=highest)
    lse = jnp.where(nonempty, peak + jnp.log(jnp.where(nonempty, total, 1)), EMPTY_LSE)
    return out, lse[..., 0].swapaxes(1, 2)


def mass(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"],
    seen: Int[Array, "B T"],
    lse: Float[Array, "B T H"] | None,
    softcap: float | None = None,
) -> Float[Array, "B K S"]:
    """Returns the softmax weights of each slot, summed over queries and the heads of a group."""
    dtype = accumulator_dtype(q.dtype)
    batch, length, heads, size = q.shape
    kv_heads, slots = k_prefix.shape[1:3]
    group = heads // kv_heads

    keys = jnp.repeat(k_prefix.astype(dtype), group, axis=1)  # [B, H, S, D]
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("bthd,bhsd->bhts", q.astype(dtype), keys, precision=highest) * size**-0.5
    scores = capped(scores, softcap)
    visible = jnp.arange(slots) < seen[:, None, :, None]  # [B, 1, T, S]
    if lse is None:
        total = jax.nn.logsumexp(jnp.where(visible, scores, -jnp.inf), axis=-1)  # [B, H, T]
    else:
        total = lse.swapaxes(1, 2)
    weights = jnp.where(visible, jnp.exp(scores - total[..., None]), 0)
    return weights.reshape(batch, kv_heads, group, length, slots).sum((2, 3))
