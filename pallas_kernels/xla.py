"""Tree attention from XLA's own operations: the fast path on a CPU, and the one for any device.

The committed prefix and the new tokens are attended to separately and joined by their log-sum-exp,
so the caches are read where they lie: never joined, transposed or copied. The mass of each slot,
which takes the same scores of the same keys, is computed beside it.
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
from pallas_kernels.quantized import Quantized, dequantize

BLOCK = 1024  # slots of a block, where the prefix is read in blocks
LARGE = 4  # blocks in a cache from which it is worth a branch to read only a part of it
# Up to this many query rows for a key/value head, one pass over the whole prefix on a CPU; beyond,
# blocks, because the scores of all slots at once would outgrow the caches themselves.
FEW_ROWS = 48
# Up to this many rows and this head size, scores in float32 are computed keys first (measured).
LEFT_ROWS, LEFT_SIZE = 8, 64
PIECE_BYTES = 2 << 20  # of one head's keys: XLA runs a longer matrix-vector product on one core


def attend(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"] | Quantized,
    v_prefix: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, " B"],
    k_new: Float[Array, "B N K D"],
    v_new: Float[Array, "B N K D"],
    mask: Bool[Array, "#B T N"],
    first_row: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Returns (out, lse) in float32, or in float64 for float64 inputs."""
    batch, length, heads = q.shape[:3]
    kv_heads = k_prefix.shape[1]
    group = heads // kv_heads
    rows = _rows(q, kv_heads)
    part = _new(rows, k_new, v_new, jnp.repeat(mask, group, axis=1))
    if k_prefix.shape[2]:
        part = _prefix(rows, k_prefix, v_prefix, lengths, part, first_row)
    out, lse = finish(part)

    def unpack(x):  # [B, K, T * G, ...] -> [B, T, H, ...]
        x = x.reshape(batch, kv_heads, length, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(batch, length, heads, *x.shape[4:])

    return unpack(out), unpack(lse)


def mass(
    q: Float[Array, "B T H D"],
    k_prefix: Float[Array, "B K S D"],
    seen: Int[Array, "B T"],
    lse: Float[Array, "B T H"] | None,
) -> Float[Array, "B K S"]:
    """Returns the softmax weights of each slot, summed over queries and the heads of a group."""
    kv_heads = k_prefix.shape[1]
    rows = _rows(q, kv_heads)
    seen = jnp.repeat(seen, q.shape[2] // kv_heads, axis=1)  # [B, R]
    if lse is not None:
        # A row that sees nothing may come with any log-sum-exp, -inf included.
        lse = jnp.where(seen[:, None] > 0, _rows(lse, kv_heads), 0)  # [B, K, R]
    if _needs_two_rows(rows):  # the second sees nothing
        rows = jnp.concatenate([rows, rows], axis=2)
        seen = jnp.concatenate([seen, jnp.zeros_like(seen)], axis=1)
        lse = lse if lse is None else jnp.concatenate([lse, jnp.zeros_like(lse)], axis=2)
    return _mass(rows, k_prefix, seen, lse)


def _rows(x: Float[Array, "B T H *D"], kv_heads: int) -> Float[Array, "B K R *D"]:
    """Returns all queries of a key/value head as rows of one matrix, R = T * G.

    Its keys are then read once for all of them.
    """
    batch, length, heads, *rest = x.shape
    x = x.reshape(batch, length, kv_heads, heads // kv_heads, *rest).swapaxes(1, 2)
    return x.reshape(batch, kv_heads, length * heads // kv_heads, *rest)


def _needs_two_rows(rows: Float[Array, "B K R D"]) -> bool:
    """Returns whether a second row, to be dropped, makes the products with a cache faster.

    A CPU has no matrix-vector product in 16 bits: XLA would convert the cache to float32 first. Two
    rows make it a matrix product, which reads 16 bits.
    """
    return rows.shape[2] == 1 and rows.dtype.itemsize < 4


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


def _block(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"] | Quantized,
    v: Float[Array, "B K S D"] | Quantized,
    live: Bool[Array, "B S"],
) -> Partial:
    """Returns attention of the rows to those of the given slots that are live."""
    count = rows.shape[2]
    k, v = (dequantize(x, rows.dtype) if isinstance(x, Quantized) else x for x in (k, v))
    if _needs_two_rows(rows):
        rows = jnp.concatenate([rows, rows], axis=2)
    scores = _scores(rows, k) * rows.shape[-1] ** -0.5
    p, peak, weight = exponentials(jnp.where(live[:, None, None], scores, MASKED))
    total = _weigh(p.astype(v.dtype), v)
    return Partial(total[:, :, :count], peak[:, :, :count], weight[:, :, :count])


def _scores(rows: Float[Array, "B K R D"], k: Float[Array, "B K S D"]) -> Float[Array, "B K R S"]:
    """Returns rows times keys, in the order that reads the keys fastest."""
    count = rows.shape[2]
    if count == 1:
        scores = _dot("bkrd,bkpsd->bkprs", rows, _pieces(k))
        return scores.reshape(*rows.shape[:3], k.shape[2])
    if rows.dtype == jnp.float32 and count <= LEFT_ROWS and rows.shape[3] <= LEFT_SIZE:
        # With the long operand on the left the product is faster. The barrier keeps XLA from
        # folding the transposition of the result back into the slow order.
        (scores,) = lax.optimization_barrier((_dot("bksd,bkrd->bksr", k, rows),))
        return scores.swapaxes(2, 3)
    return _dot("bkrd,bksd->bkrs", rows, k)


def _weigh(p: Float[Array, "B K R S"], v: Float[Array, "B K S D"]) -> Float[Array, "B K R D"]:
    """Returns the sum of the values, each weighed by p."""
    if p.shape[2] == 1:
        v = _pieces(v)
        return _dot("bkprs,bkpsd->bkprd", p.reshape(*v.shape[:3], 1, v.shape[3]), v).sum(2)
    return _dot("bkrs,bksd->bkrd", p, v)


def _pieces(x: Float[Array, "B K S D"]) -> Float[Array, "B K P S/P D"]:
    """Returns a view in P equal pieces along S, each at most PIECE_BYTES if S divides so.

    The cache is read where it lies; the pieces only become items of a batch, which all cores share.
    S = 8448 and D = 64 in float32 (2.2 MB a head) takes two pieces: 15.5 ms became 8.1.
    """
    batch, heads, slots, size = x.shape
    pieces = 1
    while slots * size * x.dtype.itemsize > pieces * PIECE_BYTES and slots % (2 * pieces) == 0:
        pieces *= 2
    return x.reshape(batch, heads, pieces, slots // pieces, size)


def _prefix(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"] | Quantized,
    v: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, " B"],
    part: Partial,
    first_row: Int[Array, ""] | int | None,
) -> Partial:
    """Returns `part` joined with attention to the live slots."""
    own = None if first_row is None else (first_row, rows.shape[0])
    slots = k.shape[2]
    longest = jnp.clip(lengths.max(), 0, slots)

    def at_once(part):
        return join(part, _block(rows, k, v, jnp.arange(slots) < lengths[:, None]))

    def step(start, first, part):
        slot = start + jnp.arange(min(BLOCK, slots))
        live = (slot >= first) & (slot < lengths[:, None])
        return join(part, _block(rows, _cut(k, start, own), _cut(v, start, own), live))

    def in_blocks(part):
        return _for_blocks(step, slots, longest, part)

    # A quantized cache is copied to be dequantized: by blocks, the copy is never of the whole.
    # Likewise rows of a larger one, which nobody can multiply where they lie.
    if own is not None or (isinstance(k, Quantized) and slots > BLOCK):
        return in_blocks(part)
    return _faster(at_once, in_blocks, rows, slots, longest, part)


def _faster(
    at_once: Callable, in_blocks: Callable, rows: Array, slots: int, longest: Int[Array, ""], carry
):
    """Returns what `at_once` makes of the carry, or `in_blocks`, whichever is faster.

    Few rows take one pass over all slots on a CPU: there a block of the cache cannot be multiplied
    where it lies, it is copied first. While a large cache is at most half full, and for many rows,
    blocks up to the longest row are faster all the same, so the work follows what is live. (Before
    JAX 0.11, XLA for a CPU converts a whole 16-bit cache to float32 to slice it; float32 is not
    moved.) Elsewhere a cache of several blocks is always read by blocks, because the scores of all
    slots, in float32, would be written to memory and read again. What counts is the platform that
    the program is lowered for, which need not be the one that it is made on.
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


def _for_blocks(step: Callable, slots: int, longest: Int[Array, ""], carry):
    """Returns the carry after step(start, first, carry) for each block up to the longest row.

    A block begins at slot `start`. Its slots below `first` were in the block before: the last block
    is moved back, to end with the cache.
    """
    block = min(BLOCK, slots)

    def body(i, carry):
        return step(jnp.minimum(i * block, slots - block), i * block, carry)

    return lax.fori_loop(0, (longest + block - 1) // block, body, carry)


def _cut(
    cache: Float[Array, "B K S D"] | Quantized,
    start: Int[Array, ""],
    rows: tuple[Int[Array, ""] | int, int] | None = None,
):
    """Returns the block of a cache that begins at slot `start`, of (the first row, how many)."""

    def cut(leaf):
        if rows is None:
            return lax.dynamic_slice_in_dim(leaf, start, min(BLOCK, leaf.shape[2]), axis=2)
        first, count = rows
        at = (first, 0, start, *[0] * (leaf.ndim - 3))
        size = (count, leaf.shape[1], min(BLOCK, leaf.shape[2]), *leaf.shape[3:])
        return lax.dynamic_slice(leaf, tuple(map(jnp.int32, at)), size)

    return jax.tree.map(cut, cache)


def _mass(
    rows: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"],
    seen: Int[Array, "B R"],
    lse: Float[Array, "B K R"] | None,
) -> Float[Array, "B K S"]:
    """Returns the sum over the rows of their softmax weights.

    Weights of two blocks do not have to be joined as sums of values do, if the log-sum-exp of the
    whole is known: without it, the blocks are read a first time for it.
    """
    slots = k.shape[2]
    longest = jnp.clip(seen.max(initial=0), 0, slots)
    limit = seen[:, None, :, None]

    def scores_of(keys, start, first):  # [B, K, R, block], MASKED outside of first <= slot < seen
        slot = start + jnp.arange(keys.shape[2])
        scores = _scores(rows, keys) * rows.shape[-1] ** -0.5
        return jnp.where((slot >= first) & (slot < limit), scores, MASKED)

    def weigh(scores, lse):
        return jnp.exp(scores - lse[..., None]).sum(2)

    def at_once(_):
        scores = scores_of(k, 0, 0)
        return weigh(scores, _log_sum_exp(scores) if lse is None else lse)

    def in_blocks(total):
        def gather(start, first, lse):
            return jnp.logaddexp(lse, _log_sum_exp(scores_of(_cut(k, start), start, first)))

        def write(start, first, total):  # what the last block repeats is written again
            block = weigh(scores_of(_cut(k, start), start, 0), whole)
            return lax.dynamic_update_slice_in_dim(total, block, start, axis=2)

        whole = lse
        if whole is None:
            nothing = jnp.full_like(rows[..., 0], EMPTY_LSE, accumulator_dtype(rows.dtype))
            whole = _for_blocks(gather, slots, longest, nothing)
        return _for_blocks(write, slots, longest, total)

    zeros = jnp.zeros_like(k[..., 0], accumulator_dtype(k.dtype))
    return _faster(at_once, in_blocks, rows, slots, longest, zeros)


def _log_sum_exp(scores: Float[Array, "*rows S"]) -> Float[Array, "*rows"]:
    """Returns the log-sum-exp of scores in which hidden keys are MASKED; EMPTY_LSE for none."""
    _, peak, weight = exponentials(scores)
    return peak + jnp.log(jnp.where(weight == 0, 1, weight))
