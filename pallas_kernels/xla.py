"""Tree attention from XLA's own operations: the fast path on a CPU, and the one for any device.

The committed prefix and the new tokens are attended to separately and joined by their log-sum-exp,
so the caches are read where they lie: never joined, transposed or copied.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.partials import (
    FLOOR,
    MASKED,
    Partial,
    accumulator_dtype,
    dot_precision,
    exponentials,
    finish,
    join,
)

# Up to this many query rows for a key/value head, one pass over the whole prefix; beyond, blocks,
# because the scores of all keys at once would outgrow the caches themselves.
FEW_ROWS = 32
BLOCK = 1024  # keys in a block of the loop for many rows


def attend(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"],
    v_prefix: Float[Array, "B K S D"],
    lengths: Int[Array, " B"],
    k_new: Float[Array, "B N K D"],
    v_new: Float[Array, "B N K D"],
    mask: Bool[Array, "#B T N"],
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Returns (out, lse) in float32, or in float64 for float64 inputs."""
    batch, length, heads, size = q.shape
    kv_heads = k_prefix.shape[1]
    group = heads // kv_heads
    # All queries of a key/value head become rows of one matrix: its keys are read once for them.
    rows = q.reshape(batch, length, kv_heads, group, size).swapaxes(1, 2)
    rows = rows.reshape(batch, kv_heads, length * group, size)

    part = _new(rows, k_new, v_new, jnp.repeat(mask, group, axis=1))
    if k_prefix.shape[2]:
        few = length * group <= FEW_ROWS
        prefix = _prefix_at_once if few else _prefix_in_blocks
        part = join(prefix(rows, k_prefix, v_prefix, lengths), part)
    out, lse = finish(part)

    def unpack(x):  # [B, K, T * G, ...] -> [B, T, H, ...]
        x = x.reshape(batch, kv_heads, length, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(batch, length, heads, *x.shape[4:])

    return unpack(out), unpack(lse)


def _dot(spec: str, a: Array, b: Array) -> Array:
    """Returns the einsum, accumulated in float32 at least."""
    dtype = accumulator_dtype(a.dtype)
    return jnp.einsum(spec, a, b, precision=dot_precision(a.dtype), preferred_element_type=dtype)


def _new(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    mask: Bool[Array, "#B R N"],
) -> Partial:
    """Returns attention to the new tokens, under the mask."""
    scores = _dot("bkrd,bnkd->bkrn", rows, k) * rows.shape[-1] ** -0.5
    p, peak, weight = exponentials(jnp.where(mask[:, None], scores, MASKED))
    return Partial(_dot("bkrn,bnkd->bkrd", p.astype(v.dtype), v), peak, weight)


def _prefix_at_once(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " B"],
) -> Partial:
    """Returns attention of a few rows to the live slots, in one pass over all slots."""
    if rows.shape[2] == 1:
        scores = _dot("bkrd,bksd->bkrs", rows, k)
    else:
        # A CPU multiplies faster with the long operand on the left. The barrier keeps XLA from
        # folding the transposition of the result back into the slow order.
        (scores,) = lax.optimization_barrier((_dot("bksd,bkrd->bksr", k, rows),))
        scores = scores.swapaxes(2, 3)
    live = jnp.arange(k.shape[2]) < lengths[:, None, None, None]
    scores = jnp.where(live, scores * rows.shape[-1] ** -0.5, MASKED)
    p, peak, weight = exponentials(scores)
    return Partial(_dot("bkrs,bksd->bkrd", p.astype(v.dtype), v), peak, weight)


def _prefix_in_blocks(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, " B"],
) -> Partial:
    """Returns attention of many rows to the live slots, block after block up to the longest."""
    slots = k.shape[2]
    block = min(BLOCK, slots)
    dtype = accumulator_dtype(rows.dtype)

    def step(i, part):
        # The last block is moved back to end with the cache; what it repeats is masked.
        start = jnp.minimum(i * block, slots - block)
        keys = lax.dynamic_slice_in_dim(k, start, block, axis=2)
        values = lax.dynamic_slice_in_dim(v, start, block, axis=2)
        slot = start + jnp.arange(block)
        live = (slot >= i * block) & (slot < lengths[:, None, None, None])
        scores = _dot("bkrd,bksd->bkrs", rows, keys) * rows.shape[-1] ** -0.5
        p, peak, weight = exponentials(jnp.where(live, scores, MASKED))
        total = _dot("bkrs,bksd->bkrd", p.astype(v.dtype), values)
        return join(part, Partial(total, peak, weight))

    nothing = Partial(
        jnp.zeros(rows.shape, dtype),
        jnp.full(rows.shape[:3], FLOOR, dtype),
        jnp.zeros(rows.shape[:3], dtype),
    )
    blocks = (jnp.clip(lengths.max(), 0, slots) + block - 1) // block
    return lax.fori_loop(0, blocks, step, nothing)
