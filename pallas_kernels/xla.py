"""Tree attention in XLA operations, for any device.

Attention to the committed prefix and to the new tokens is computed separately and merged by
log-sum-exp, so the caches are read in place: never concatenated, transposed or copied. The mass of
each slot uses the same scores.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.lse_merge import (
    EMPTY_LSE,
    MASKED,
    Partial,
    accumulator_dtype,
    dot_precision,
    exponentials,
    finish,
    join,
)
from pallas_kernels.packing import grouped_rows, ungrouped
from pallas_kernels.quantized import Quantized, dequantize
from pallas_kernels.scores import capped, visible_slots

BLOCK = 1024  # slots of a block, if the prefix is read in blocks
LARGE = 4  # blocks of a cache for which a branch that reads only some of them is faster
# With at most this many query rows per key/value head, a CPU takes one pass over the whole prefix.
# With more rows the scores of all slots would be larger than the caches, so it takes blocks.
FEW_ROWS = 48
# Up to this many rows and this head size, float32 scores are faster with the keys as left operand.
KEYS_LEFT_ROWS, KEYS_LEFT_SIZE = 8, 64
PIECE_BYTES = 2 << 20  # XLA runs a longer matrix-vector product of one head on one core


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
    length, heads = q.shape[1:3]
    kv_heads = k_prefix.shape[1]
    group = heads // kv_heads
    rows = grouped_rows(q, kv_heads)
    partial = _attend_new(rows, k_new, v_new, jnp.repeat(mask, group, axis=1), softcap)
    if k_prefix.shape[2]:
        if seen_from is not None:
            seen_from = jnp.repeat(seen_from, group, axis=1)
        partial = _attend_prefix(
            rows, k_prefix, v_prefix, lengths, partial, first_row, seen_from, softcap
        )
    out, lse = finish(partial)
    return ungrouped(out, length, heads), ungrouped(lse, length, heads)


def mass(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"],
    seen: Int[Array, "B T"],
    lse: Float[Array, "B T H"] | None,
    softcap: float | None = None,
) -> Float[Array, "B K S"]:
    """Returns the softmax weights of each slot, summed over queries and the heads of a group."""
    kv_heads = k_prefix.shape[1]
    rows = grouped_rows(q, kv_heads)
    seen = jnp.repeat(seen, q.shape[2] // kv_heads, axis=1)  # [B, R]
    if lse is not None:
        # A row that sees no slot may have any log-sum-exp, including -inf.
        lse = jnp.where(seen[:, None] > 0, grouped_rows(lse, kv_heads), 0)  # [B, K, R]
    if _needs_two_rows(rows):  # the second sees no slot
        rows = jnp.concatenate([rows, rows], axis=2)
        seen = jnp.concatenate([seen, jnp.zeros_like(seen)], axis=1)
        lse = lse if lse is None else jnp.concatenate([lse, jnp.zeros_like(lse)], axis=2)
    return _mass(rows, k_prefix, seen, lse, softcap)


def _needs_two_rows(rows: Float[Array, "B K R D"]) -> bool:
    """Returns whether a second row, whose result is dropped, makes products with a cache faster.

    On a CPU XLA converts the operands of a 16-bit matrix-vector product to float32 first. With two
    rows it is a matrix product, which reads 16 bits.
    """
    return rows.shape[2] == 1 and rows.dtype.itemsize < 4


def _dot(spec: str, a: Array, b: Array) -> Array:
    """Returns the einsum, accumulated at least in float32."""
    dtype = accumulator_dtype(a.dtype)
    return jnp.einsum(spec, a, b, precision=dot_precision(a.dtype), preferred_element_type=dtype)


def _attend_new(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    mask: Bool[Array, "#B R N"],
    softcap: float | None,
) -> Partial:
    """Returns the attention to the new tokens under the mask."""
    scores = capped(_dot("bkrd,bnkd->bkrn", rows, k) * rows.shape[-1] ** -0.5, softcap)
    p, peak, weight = exponentials(jnp.where(mask[:, None], scores, MASKED))
    return Partial(_dot("bkrn,bnkd->bkrd", p.astype(v.dtype), v), peak, weight)


def _attend_slots(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"] | Quantized,
    v: Float[Array, "B K S D"] | Quantized,
    visible: Bool[Array, "B #R S"],
    softcap: float | None,
) -> Partial:
    """Returns the attention of the rows to the slots of k and v that they see."""
    count = rows.shape[2]
    k, v = (dequantize(x, rows.dtype) if isinstance(x, Quantized) else x for x in (k, v))
    if _needs_two_rows(rows):
        rows = jnp.concatenate([rows, rows], axis=2)
    scores = capped(_scores(rows, k) * rows.shape[-1] ** -0.5, softcap)
    p, peak, weight = exponentials(jnp.where(visible[:, None], scores, MASKED))
    total = _weighted_sum(p.astype(v.dtype), v)
    return Partial(total[:, :, :count], peak[:, :, :count], weight[:, :, :count])


def _scores(rows: Float[Array, "B K R D"], k: Float[Array, "B K S D"]) -> Float[Array, "B K R S"]:
    """Returns rows times keys, in the operand order that is fastest."""
    count = rows.shape[2]
    if count == 1:
        scores = _dot("bkrd,bkpsd->bkprs", rows, _in_pieces(k))
        return scores.reshape(*rows.shape[:3], k.shape[2])
    if rows.dtype == jnp.float32 and count <= KEYS_LEFT_ROWS and rows.shape[3] <= KEYS_LEFT_SIZE:
        # The product is faster with the long operand on the left. The barrier prevents XLA from
        # folding the transposition of the result back into the slow order.
        (scores,) = lax.optimization_barrier((_dot("bksd,bkrd->bksr", k, rows),))
        return scores.swapaxes(2, 3)
    return _dot("bkrd,bksd->bkrs", rows, k)


def _weighted_sum(
    p: Float[Array, "B K R S"], v: Float[Array, "B K S D"]
) -> Float[Array, "B K R D"]:
    """Returns the sum of the values weighted by p."""
    if p.shape[2] == 1:
        v = _in_pieces(v)
        return _dot("bkprs,bkpsd->bkprd", p.reshape(*v.shape[:3], 1, v.shape[3]), v).sum(2)
    return _dot("bkrs,bksd->bkrd", p, v)


def _in_pieces(x: Float[Array, "B K S D"]) -> Float[Array, "B K P S/P D"]:
    """Returns a view in P equal pieces along S, of at most PIECE_BYTES if S is divisible.

    The cache is not copied. The pieces are items of a batch, over which XLA parallelizes:
    S = 8448 and D = 64 in float32 (2.2 MB a head), in two pieces, takes 8.1 instead of 15.5 ms.
    """
    batch, heads, slots, size = x.shape
    pieces = 1
    while slots * size * x.dtype.itemsize > pieces * PIECE_BYTES and slots % (2 * pieces) == 0:
        pieces *= 2
    return x.reshape(batch, heads, pieces, slots // pieces, size)


def _attend_prefix(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"] | Quantized,
    v: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, " B"],
    partial: Partial,
    first_row: Int[Array, ""] | int | None,
    seen_from: Int[Array, "B R"] | None,
    softcap: float | None,
) -> Partial:
    """Returns `partial` merged with the attention to the slots that the rows see."""
    row_range = None if first_row is None else (first_row, rows.shape[0])
    slots = k.shape[2]
    longest: Array = jnp.clip(lengths.max(), 0, slots)
    earliest: Array | int = 0
    if seen_from is not None:  # of a ring that has wrapped, any slot may be seen
        earliest = jnp.where(lengths.max() <= slots, jnp.clip(seen_from.min(), 0, longest), 0)

    def at_once(partial):
        visible = visible_slots(jnp.arange(slots), slots, lengths, seen_from)
        return join(partial, _attend_slots(rows, k, v, visible, softcap))

    def step(start, first, partial):
        slot = start + jnp.arange(min(BLOCK, slots))
        visible = visible_slots(slot, slots, lengths, seen_from) & (slot >= first)
        keys, values = (_slice_block(x, start, row_range) for x in (k, v))
        return join(partial, _attend_slots(rows, keys, values, visible, softcap))

    def in_blocks(partial):
        return _loop_over_blocks(step, slots, longest, partial, earliest)

    # Dequantized caches, and selected rows of a cache, are copies: blocks keep them small.
    if row_range is not None or (isinstance(k, Quantized) and slots > BLOCK):
        return in_blocks(partial)
    return _once_or_in_blocks(at_once, in_blocks, rows, slots, longest, partial)


def _once_or_in_blocks(
    at_once: Callable, in_blocks: Callable, rows: Array, slots: int, longest: Int[Array, ""], carry
):
    """Returns at_once(carry) or in_blocks(carry), whichever is faster.

    On a CPU, few rows take one pass over all slots, because XLA copies a block before it multiplies
    it. For many rows, and while a large cache is at most half full, blocks up to the longest row
    are faster. On other platforms a cache of several blocks is always read in blocks, because the
    float32 scores of all slots would be written to memory and read again. The platform is the one
    that the program is lowered for.
    """
    if rows.shape[2] > FEW_ROWS:
        return in_blocks(carry)
    if slots <= BLOCK:
        return at_once(carry)

    def on_a_cpu(carry):
        if slots < LARGE * BLOCK:
            return at_once(carry)
        return lax.cond(2 * longest > slots, at_once, in_blocks, carry)

    return lax.platform_dependent(carry, cpu=on_a_cpu, default=in_blocks)


def _loop_over_blocks(
    step: Callable, slots: int, longest: Int[Array, ""], carry, earliest: Int[Array, ""] | int = 0
):
    """Returns the carry after step(start, first, carry) for each block up to the longest row.

    Blocks before that of slot `earliest` are skipped. A block begins at slot `start`. The last
    block is moved back to end with the cache; its slots below `first` belong to the previous block.
    """
    block = min(BLOCK, slots)

    def body(i, carry):
        return step(jnp.minimum(i * block, slots - block), i * block, carry)

    return lax.fori_loop(earliest // block, (longest + block - 1) // block, body, carry)


def _slice_block(
    cache: Float[Array, "B K S D"] | Quantized,
    start: Int[Array, ""],
    row_range: tuple[Int[Array, ""] | int, int] | None = None,
):
    """Returns the block of a cache that begins at a slot, of the rows (first, count)."""

    def slice_leaf(leaf):
        if row_range is None:
            return lax.dynamic_slice_in_dim(leaf, start, min(BLOCK, leaf.shape[2]), axis=2)
        first, count = row_range
        indices = (first, 0, start, *[0] * (leaf.ndim - 3))
        size = (count, leaf.shape[1], min(BLOCK, leaf.shape[2]), *leaf.shape[3:])
        return lax.dynamic_slice(leaf, tuple(map(jnp.int32, indices)), size)

    return jax.tree.map(slice_leaf, cache)


def _mass(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"],
    seen: Int[Array, "B R"],
    lse: Float[Array, "B K R"] | None,
    softcap: float | None,
) -> Float[Array, "B K S"]:
    """Returns the softmax weights of each slot, summed over the rows.

    The weights of a block need the log-sum-exp of all slots. If it is not known, a first pass over
    the blocks computes it.
    """
    slots = k.shape[2]
    longest = jnp.clip(seen.max(initial=0), 0, slots)
    limit = seen[:, None, :, None]

    # [B, K, R, block], MASKED outside of first <= slot < seen
    def masked_scores(keys, start, first):
        slot = start + jnp.arange(keys.shape[2])
        scores = capped(_scores(rows, keys) * rows.shape[-1] ** -0.5, softcap)
        return jnp.where((slot >= first) & (slot < limit), scores, MASKED)

    def weights(scores, lse):
        return jnp.exp(scores - lse[..., None]).sum(2)

    def at_once(_):
        scores = masked_scores(k, 0, 0)
        return weights(scores, _log_sum_exp(scores) if lse is None else lse)

    def in_blocks(total):
        def gather(start, first, lse):
            return jnp.logaddexp(
                lse, _log_sum_exp(masked_scores(_slice_block(k, start), start, first))
            )

        def write(start, first, total):  # the overlap of the last block is written twice
            block = weights(masked_scores(_slice_block(k, start), start, 0), whole)
            return lax.dynamic_update_slice_in_dim(total, block, start, axis=2)

        whole = lse
        if whole is None:
            empty = jnp.full_like(rows[..., 0], EMPTY_LSE, accumulator_dtype(rows.dtype))
            whole = _loop_over_blocks(gather, slots, longest, empty)
        return _loop_over_blocks(write, slots, longest, total)

    zeros = jnp.zeros_like(k[..., 0], accumulator_dtype(k.dtype))
    return _once_or_in_blocks(at_once, in_blocks, rows, slots, longest, zeros)


def _log_sum_exp(scores: Float[Array, "*rows S"]) -> Float[Array, "*rows"]:
    """Returns the log-sum-exp of scores with MASKED keys; EMPTY_LSE if all are MASKED."""
    _, peak, weight = exponentials(scores)
    return peak + jnp.log(jnp.where(weight == 0, 1, weight))
