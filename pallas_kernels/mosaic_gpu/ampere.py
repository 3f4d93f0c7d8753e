"""Flash decoding on NVIDIA Ampere and Ada: one Pallas kernel over prefix and new tokens.

A block of the grid is one warpgroup. It processes a tile of 64 query rows of one KV head, and one
part of its keys. It copies the next block of keys and values to shared memory (cp.async) while it
multiplies the current one (mma), and keeps a running softmax in registers. Two blocks of the grid
share a multiprocessor of an A100. The caller merges the parts by log-sum-exp.

These copies do not check bounds: queries and new tokens are padded to whole tiles, and the last
block of a prefix is moved back to end with the cache, with repeated slots masked.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.lse_merge import FLOOR, MASKED
from pallas_kernels.mosaic_gpu.parts import LOG2E, Part, make_part

ROWS = 64  # of a tile: 16 for each warp
BLOCK = 64  # keys that are processed at once
STAGES = 2  # blocks of keys in shared memory


def flash(
    q: Float[Array, "B K R D"],
    k: Float[Array, "C K S D"],
    v: Float[Array, "C K S D"],
    lengths: Int[Array, "B+1"],
    k_new: Float[Array, "B K N D"],
    v_new: Float[Array, "B K N D"],
    bias: Float[Array, "X R N"],
    splits: int,
    interpreted: bool = False,
) -> tuple[Float[Array, "P B K R D"], Float[Array, "P B K R"]]:
    """Returns `splits` parts of the attention with their log-sum-exp, in float32.

    A part that sees no key is 0 and FLOOR. Scores are scaled by D**-0.5.

    Args:
      q: rows of each KV head, in 16 bits; R is a multiple of ROWS.
      k, v: the prefix; S >= BLOCK.
      lengths: live slots of each row; then the row of the prefix that belongs to the first row of
        q, because the prefix may have more rows.
      k_new, v_new: new tokens; N is a multiple of BLOCK.
      bias: float32, added to the scores of new tokens: 0 or MASKED; X is B or 1.
      splits: parts of the prefix, each a block of the grid; the length of each row is divided.
      interpreted: run in Pallas's interpreter. It has no mma and no copies without barriers, so
        matrix products and plain copies replace them.
    """
    batch, heads, rows, size = q.shape
    operations = _INTERPRETED if interpreted else _DEVICE
    lane = plgpu.LoweringSemantics.Lane
    options: dict[str, Any] = {"interpret": plgpu.InterpretGPUParams()} if interpreted else {}
    return plgpu.kernel(
        functools.partial(_kernel, splits, operations),
        out_type=[
            jax.ShapeDtypeStruct((splits, batch, heads, rows, size), jnp.float32),
            jax.ShapeDtypeStruct((splits, batch, heads, rows), jnp.float32),
        ],
        # The last axis varies fastest, so that tiles that read the same keys run together.
        grid=(batch, heads, splits, rows // ROWS),
        grid_names=("row", "head", "split", "tile"),
        scratch_types=[
            _shared((STAGES, BLOCK, size), q.dtype),
            _shared((STAGES, BLOCK, size), q.dtype),
            _shared((ROWS, BLOCK), q.dtype),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=lane),
        **options,
    )(q, lengths, (k_new, v_new), bias, k, v)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in tiles of 8 rows of 128 bytes, from which `ldmatrix` loads."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=tiled)


class _Operations(NamedTuple):
    """What differs between a device and the interpreter.

    Attributes:
      copy: starts the copy of a piece of an array to shared memory.
      wait: waits until at most so many copies are in flight.
      load: returns the values of a reference, perhaps transposed, in a layout.
      cast: returns values in a layout.
      mma: returns accumulator + a @ b.
      slots: returns [ROWS, BLOCK] of the index of a column.
    """

    copy: Callable[[Any, Any], None]
    wait: Callable[[int], None]
    load: Callable[..., Array]
    cast: Callable[[Array, Any], Array]
    mma: Callable[[Array, Array, Array], Array]
    slots: Callable[[Any], Array]


def _load(ref: Any, layout: Any, transposed: bool = False, optimized: bool = True) -> Array:
    ref = ref.transpose((1, 0)) if transposed else ref
    return plgpu.load(ref, layout=layout, optimized=optimized)


def _columns(layout: Any) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=layout)


def _assign(source: Any, target: Any) -> None:
    target[...] = source[...]


_DEVICE = _Operations(
    functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS),
    plgpu.wait_gmem_to_smem,
    _load,
    plgpu.layout_cast,
    plgpu.mma,
    _columns,
)
_INTERPRETED = _Operations(
    _assign,
    lambda count: None,
    lambda ref, layout, transposed=False, optimized=True: ref[...].T if transposed else ref[...],
    lambda x, layout: x,
    lambda total, a, b: total + jnp.dot(a, b, preferred_element_type=jnp.float32),
    lambda layout: lax.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1),
)


def _kernel(splits, do: _Operations, q, lengths, new, bias, k, v, out, lse, *scratch) -> None:
    """The kernel; takes references to the arguments of `flash`, its results, and scratch memory."""
    part = make_part(splits, BLOCK, lengths, new[0].shape[2])
    (slots, size), layout = k.shape[2:], plgpu.Layout.MMA_ACC(q.dtype)
    rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)

    def per_row(value: float) -> Array:
        return do.cast(jnp.full((ROWS,), value, jnp.float32), layout.reduce(1))

    def first_slot(i):  # of block i of the prefix, not beyond the cache
        return jnp.minimum(part.begin + i * BLOCK, slots - BLOCK)

    def mask_prefix(i, scores):
        slot = do.slots(layout) + first_slot(i)
        seen = (slot >= part.begin + i * BLOCK) & (slot < part.end)
        return jnp.where(seen, scores, MASKED)

    def mask_new(i, scores):
        row = jnp.minimum(part.row, bias.shape[0] - 1)
        return scores + do.load(
            bias.at[row, rows, pl.ds(i * BLOCK, BLOCK)], layout, optimized=False
        )

    queries = do.load(
        q.at[part.row, part.head, rows], plgpu.Layout.MMA_LHS(q.dtype), optimized=False
    )
    attend = functools.partial(_attend_blocks, do, part, queries, scratch)
    zeros = do.cast(jnp.zeros((ROWS, size), jnp.float32), layout)
    carry = zeros, per_row(FLOOR), per_row(0.0)
    carry = attend((k, v), part.prefix_row, first_slot, mask_prefix, part.prefix_blocks, carry)
    blocks = part.blocks - part.prefix_blocks
    carry = attend(new, part.row, lambda i: i * BLOCK, mask_new, blocks, carry)
    total, peak, weight = carry
    at = lax.axis_index("split"), part.row, part.head, rows
    seen = jnp.where(weight == 0.0, 1.0, weight)
    lse[at] = jnp.where(weight == 0.0, FLOOR, (peak + jnp.log2(seen)) * (1 / LOG2E))
    out[at] = total / lax.broadcast_in_dim(seen, total.shape, [0])


def _attend_blocks(
    do: _Operations,
    part: Part,
    queries: Array,
    scratch: Any,
    entries: Any,
    row: Any,
    first: Callable[[Any], Any],
    mask: Callable[[Any, Array], Array],
    blocks: Any,
    carry: Any,
) -> Any:
    """Returns (total, peak, weight) with blocks of keys added; peaks are in powers of two.

    Args:
      do: operations.
      part: the keys of this block of the grid.
      queries: [ROWS, D].
      scratch: shared memory of keys, values and weights.
      entries: arrays of keys and values.
      row: row of the arrays.
      first: returns the first slot of block i.
      mask: returns scores of block i, MASKED where they are not seen.
      blocks: their number, 0 or more.
      carry: result of the blocks before.
    """
    k_s, v_s, p_s = scratch
    dtype = queries.dtype
    lhs, rhs = plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.MMA_RHS(dtype)
    accumulator = plgpu.Layout.MMA_ACC(dtype)

    def copy(i):
        # The number of copies in flight must be known, so the last block is copied again.
        slot = first(jnp.clip(i, 0, jnp.maximum(blocks - 1, 0)))
        for source, target in zip(entries, (k_s, v_s), strict=True):
            piece = source.at[row, part.head, pl.ds(slot, BLOCK)]
            do.copy(piece, target.at[lax.rem(i, STAGES)])

    def step(i, carry):
        total, peak, weight = carry
        stage = lax.rem(i, STAGES)
        do.wait(2 * (STAGES - 2))
        copy(i + STAGES - 1)
        keys = do.load(k_s.at[stage], rhs, transposed=True)
        zeros = do.cast(jnp.zeros((ROWS, BLOCK), jnp.float32), accumulator)
        scores = do.mma(zeros, queries, keys) * (queries.shape[1] ** -0.5 * LOG2E)
        scores = mask(i, scores)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        rescale = jnp.exp2(peak - new_peak)
        p = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
        weight = weight * rescale + p.sum(axis=1)
        p_s[...] = p.astype(dtype)  # through shared memory: the layouts differ
        total = total * lax.broadcast_in_dim(rescale, total.shape, [0])
        total = do.mma(total, do.load(p_s, lhs), do.load(v_s.at[stage], rhs))
        return total, new_peak, weight

    for i in range(STAGES - 1):
        copy(jnp.int32(i))
    carry = lax.fori_loop(0, blocks, step, carry)
    do.wait(0)
    return carry
