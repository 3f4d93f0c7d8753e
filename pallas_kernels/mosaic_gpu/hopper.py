"""Flash decoding on NVIDIA Hopper: one Pallas kernel (Mosaic GPU) over prefix and new tokens.

A block of the grid processes some rows of one KV head and one part of its keys. Its producer
warpgroup copies blocks of keys and values to shared memory by TMA, ahead by the number of stages.
Its compute warpgroups multiply them (wgmma) and keep a running softmax. The caller merges the parts
by log-sum-exp. Queries, new tokens and results need no padding to whole tiles: TMA reads zeros
beyond an array and drops writes there.

Decoding is bound by memory: keys and values of the prefix are read once for every `row_groups`
tiles of 64 rows, and scores stay on the chip.
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
from pallas_kernels.mosaic_gpu.hopper_config import (
    ROWS,
    TILE,
    WARPGROUPS,
    WIDEST,
    Config,
    column_groups,
)
from pallas_kernels.mosaic_gpu.parts import LOG2E, Part, make_part
from pallas_kernels.quantized import Quantized, leaves

# Per thread: 128 * (40 + 2 * 232) is just below the 65,536 registers of a multiprocessor.
PRODUCER_REGISTERS, COMPUTE_REGISTERS = 40, 232


def flash(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"] | Quantized,
    v: Float[Array, "B K S D"] | Quantized,
    lengths: Int[Array, "B+1"],
    k_new: Float[Array, "B K N D"],
    v_new: Float[Array, "B K N D"],
    bias: Float[Array, "X M L"],
    config: Config,
    interpreted: bool = False,
) -> tuple[Float[Array, "C B K R D"], Float[Array, "C B K M"]]:
    """Returns C = splits * key_groups parts of the attention with their log-sum-exp, in float32.

    A part that sees no key is 0 and FLOOR. Scores are scaled by D**-0.5.

    Args:
      q: rows of each KV head; R is a multiple of 8. M is R rounded up to a multiple of
        64 * row_groups.
      k, v: the prefix; S is at least a block and a multiple of 8. If `Quantized` in 8 bits (q in
        bf16, D at most 128), the kernel converts the integers to bf16, which is exact.
      lengths: live slots of each row; then the row of the prefix that belongs to the first row of
        q, because the prefix may have more rows.
      k_new, v_new: new tokens; N is a multiple of 8. L is N rounded up to whole blocks.
      bias: float32, added to the scores of new tokens: 0 or MASKED; X is B or 1.
      config: how to divide the work.
      interpreted: run in Pallas's interpreter.
    """
    (batch, heads, rows, size), groups = q.shape, config.groups(q.shape[3])
    if groups + 1 != WARPGROUPS and not interpreted:
        raise ValueError(
            f"{config} has {groups} compute warpgroups: it must have {WARPGROUPS - 1}, because the "
            "registers are divided among that many"
        )
    parts = config.splits * config.key_groups
    options: dict[str, Any] = {"interpret": plgpu.InterpretGPUParams()} if interpreted else {}
    return plgpu.kernel(
        functools.partial(_kernel, config),
        out_type=[
            jax.ShapeDtypeStruct((parts, batch, heads, rows, size), jnp.float32),
            jax.ShapeDtypeStruct((parts, batch, heads, bias.shape[1]), jnp.float32),
        ],
        # The last axis varies fastest, so that tiles that read the same keys run together.
        grid=(batch, heads, config.splits, bias.shape[1] // (ROWS * config.row_groups)),
        grid_names=("row", "head", "split", "tile"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        scratch_types=[_scratch(config, q.dtype, size, isinstance(k, Quantized))],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(q, lengths, (k_new, v_new), bias, leaves(k), leaves(v))


class _Ring(NamedTuple):
    """A ring of buffers in shared memory for blocks of keys or of values.

    Attributes:
      entries: [buffers, block, D].
      scales: [buffers, block] float32 if the entries are integers, else None.
      loaded, free: barriers of each buffer.
    """

    entries: Any
    scales: Any
    loaded: Any
    free: Any


class _Scratch(NamedTuple):
    """The shared memory and barriers of a block of the grid.

    Attributes:
      queries: [row_groups, 64, D].
      stages: a union of the entries of both rings of the prefix and of the results
        [groups, 64, columns], which are written after all entries have been read.
      weights: [groups, 64, block], softmax weights between the two products.
      queries_loaded, entries_read: barriers.
      prefix: rings of keys and values, whose entries are in `stages`.
      new: rings for new tokens; None: they use the rings of the prefix.
      converted: [groups, block, D], integers converted to the dtype of the queries, or None.
    """

    queries: Any
    stages: Any
    weights: Any
    queries_loaded: Any
    entries_read: Any
    prefix: tuple[_Ring, _Ring]
    new: tuple[_Ring, _Ring] | None
    converted: Any


def _scratch(config: Config, dtype: Any, size: int, quantized: bool) -> _Scratch:
    groups = config.groups(size)
    # The warpgroups of one key group read a block of keys.
    readers = config.row_groups * column_groups(size)

    def ring(buffers: int, entries: Any, scales: Any = None) -> _Ring:
        loaded = plgpu.Barrier(num_arrivals=1 if scales is None else 2, num_barriers=buffers)
        free = plgpu.Barrier(num_arrivals=readers, num_barriers=buffers)
        return _Ring(entries, scales, loaded, free)

    stages = _shared((config.stages, config.block, size), jnp.int8 if quantized else dtype)
    scales = plgpu.SMEM((config.stages, config.block), jnp.float32) if quantized else None
    new_entries = _shared((config.key_groups, config.block, size), dtype)
    return _Scratch(
        queries=_shared((config.row_groups, ROWS, size), dtype),
        stages=plgpu.RefUnion(
            (stages, stages), _shared((groups, ROWS, min(size, WIDEST)), jnp.float32)
        ),
        weights=_shared((groups, ROWS, config.block), dtype),
        queries_loaded=plgpu.Barrier(num_barriers=config.row_groups),
        entries_read=plgpu.Barrier(num_arrivals=groups),
        prefix=(ring(config.stages, None, scales), ring(config.stages, None, scales)),
        new=(ring(config.key_groups, new_entries), ring(config.key_groups, new_entries))
        if quantized
        else None,
        converted=_shared((groups, config.block, size), dtype) if quantized else None,
    )


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in tiles of 8 rows of 128 bytes, the layout that wgmma reads."""
    size = jnp.dtype(dtype).itemsize
    width = min(128, shape[-1] * size)  # bytes; 64 integers are fewer
    tile = (TILE, width // size)
    tiled = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=tiled)


def _kernel(config, q, lengths, new, bias, k, v, out, lse, scratch: _Scratch) -> None:
    """The kernel; takes references to the arguments of `flash`, its results, and scratch memory."""
    (slots, size), groups = k[0].shape[2:], config.groups(k[0].shape[3])
    part = make_part(config.splits, config.block, lengths, new[0].shape[2])
    (*entries,), results = scratch.stages
    pairs = zip(scratch.prefix, entries, strict=True)
    rings = [ring._replace(entries=entries) for ring, entries in pairs]
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == groups)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _load_queries(config, part, q, scratch)
        _load_blocks(config, part, (k, v), rings, new, scratch.new)

    @pl.when(warpgroup < groups)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        row_group = lax.rem(warpgroup, config.row_groups)
        group = lax.div(warpgroup, config.row_groups)
        key_group, column = lax.rem(group, config.key_groups), lax.div(group, config.key_groups)
        plgpu.barrier_wait(scratch.queries_loaded.at[row_group])
        tile = lax.axis_index("tile") * config.row_groups + row_group
        rows = pl.ds(tile * ROWS, ROWS)
        width = min(size, WIDEST)
        columns = pl.ds(column * width, width)
        converted = None if scratch.converted is None else scratch.converted.at[warpgroup]
        buffers = scratch.queries.at[row_group], scratch.weights.at[warpgroup], converted
        attend = functools.partial(_attend_block, buffers, columns)
        mask_prefix, mask_new = _masks(config, part, slots, bias, rows)
        sources = ((rings, mask_prefix), (scratch.new or rings, mask_new))
        total, peak, weight = _attend_blocks(config, part, key_group, width, attend, sources)
        index = lax.axis_index("split") * config.key_groups + key_group
        at = (index, part.row, part.head, rows)
        seen = jnp.where(weight == 0.0, 1.0, weight)

        @pl.when(column == 0)
        def _():
            lse[at] = jnp.where(weight == 0.0, FLOOR, (peak + jnp.log2(seen)) * (1 / LOG2E))

        plgpu.barrier_arrive(scratch.entries_read)
        plgpu.barrier_wait(scratch.entries_read)  # the other warpgroup may still read entries
        results[warpgroup] = total / lax.broadcast_in_dim(seen, total.shape, [0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(results.at[warpgroup], out.at[(*at, columns)])
        plgpu.wait_smem_to_gmem(0)


def _load_queries(config: Config, part: Part, q, scratch: _Scratch) -> None:
    """Copies the queries to shared memory."""
    for i in range(config.row_groups):
        tile = lax.axis_index("tile") * config.row_groups + i
        rows = q.at[part.row, part.head, pl.ds(tile * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(rows, scratch.queries.at[i], scratch.queries_loaded.at[i])


def _load_blocks(config: Config, part: Part, prefix, rings, new, new_rings) -> None:
    """Copies blocks of keys and values to shared memory as buffers become free."""
    block, slots = config.block, prefix[0][0].shape[2]

    def load(i, first, slot, row, sources, rings):
        """Copies block i, from a row and slot, to rings whose first block was `first`."""
        for source, ring in zip(sources, rings, strict=True):
            buffers = ring.entries.shape[0]
            buffer = lax.rem(i, buffers)

            @pl.when(i - first >= buffers)
            def _(ring=ring, buffer=buffer):
                plgpu.barrier_wait(ring.free.at[buffer])

            for array, shared in zip(source, (ring.entries, ring.scales), strict=True):
                if array is not None:
                    piece = array.at[row, part.head, pl.ds(slot, block)]
                    plgpu.copy_gmem_to_smem(piece, shared.at[buffer], ring.loaded.at[buffer])

    def load_prefix(i, carry):
        slot = jnp.minimum(part.begin + i * block, slots - block)  # not beyond the cache
        load(i, 0, slot, part.prefix_row, prefix, rings)
        return carry

    def load_new(i, carry):
        sources = [(array, None) for array in new]
        first = part.prefix_blocks if new_rings else 0
        load(i, first, (i - part.prefix_blocks) * block, part.row, sources, new_rings or rings)
        return carry

    lax.fori_loop(0, part.prefix_blocks, load_prefix, None)
    lax.fori_loop(part.prefix_blocks, part.blocks, load_new, None)


def _masks(config: Config, part: Part, slots: int, bias, rows) -> tuple[Callable, Callable]:
    """Returns functions that mask the scores of block i of the prefix and of new tokens."""
    block = config.block

    def mask_prefix(i, scores):
        begin = part.begin + i * block
        first = jnp.minimum(begin, slots - block)  # as in `_load_blocks`
        slot = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + first
        return jnp.where((slot >= begin) & (slot < part.end), scores, MASKED)

    def mask_new(i, scores):
        row = jnp.minimum(part.row, bias.shape[0] - 1)
        block_bias = bias.at[row, rows, pl.ds((i - part.prefix_blocks) * block, block)]
        return scores + _to_registers(block_bias, plgpu.Layout.WGMMA, optimized=False)

    return mask_prefix, mask_new


def _to_registers(ref: Any, layout: Any, optimized: bool = True) -> Array:
    """Returns the array of a reference in a layout; `optimized` forbids bank conflicts."""
    return plgpu.load(ref, layout=layout, optimized=optimized)


def _attend_blocks(config: Config, part: Part, key_group, width: int, attend, sources):
    """Returns (total, peak, weight) of a warpgroup's rows over the blocks of its key group.

    `sources` has the rings and the mask function of the prefix, then of new tokens.
    """

    def per_row(value: float) -> Array:
        filled = jnp.full((ROWS,), value, jnp.float32)
        return plgpu.layout_cast(filled, plgpu.Layout.WGMMA.reduce(1))

    def own_blocks(blocks):
        return jnp.maximum(pl.cdiv(blocks - key_group, config.key_groups), 0)

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    carry = (zeros, per_row(FLOOR), per_row(0.0))
    ends = (0, own_blocks(part.prefix_blocks), own_blocks(part.blocks))
    for (rings, mask), first, last in zip(sources, ends, ends[1:], strict=False):

        def step(j, carry, rings=rings, mask=mask):
            i = j * config.key_groups + key_group
            return attend(rings, i, functools.partial(mask, i), carry)

        carry = lax.fori_loop(first, last, step, carry)
    return carry


def _attend_block(buffers, columns, rings, i, mask, carry):
    """Returns (total, peak, weight) with block i of the keys added; peaks are in powers of two."""
    (q_s, p_s, converted), (keys, values) = buffers, rings
    total, peak, weight = carry
    buffer = lax.rem(i, keys.entries.shape[0])

    def score(accumulator):
        plgpu.wgmma(accumulator, q_s, k_s.transpose((1, 0)))
        return accumulator[...]

    def weighted_sum(accumulator):
        plgpu.wgmma(accumulator, p_s, v_s.at[:, columns])
        return accumulator[...]

    k_s, scales = _acquire(keys, buffer, converted)
    scores = pl.run_scoped(score, plgpu.ACC((ROWS, k_s.shape[0]), jnp.float32))
    _release(keys, buffer)
    scores = scores * (q_s.shape[-1] ** -0.5 * LOG2E)
    if scales is not None:
        scores = scores * lax.broadcast_in_dim(scales, scores.shape, [1])
    scores = mask(scores)
    new_peak = jnp.maximum(peak, scores.max(axis=1))
    rescale = jnp.exp2(peak - new_peak)
    p = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    weight = weight * rescale + p.sum(axis=1)
    v_s, scales = _acquire(values, buffer, converted)
    if scales is not None:
        p = p * lax.broadcast_in_dim(scales, p.shape, [1])
    # Through shared memory: the interpreter does not support operands in registers.
    p_s[...] = p.astype(p_s.dtype)
    plgpu.commit_smem()
    total = total * lax.broadcast_in_dim(rescale, total.shape, [0])
    total = total + pl.run_scoped(weighted_sum, plgpu.ACC(total.shape, jnp.float32))
    _release(values, buffer)
    return total, new_peak, weight


def _acquire(ring: _Ring, buffer, converted) -> tuple[Any, Any]:
    """Waits for a buffer and returns its entries for wgmma and their scales, or None.

    Each warpgroup converts integers, which is exact in 16 bits, and then releases the buffer. The
    caller multiplies the columns of scores and weights by the scales of keys and values.
    """
    plgpu.barrier_wait(ring.loaded.at[buffer])
    if ring.scales is None:
        return ring.entries.at[buffer], None
    entries = _to_registers(ring.entries.at[buffer], plgpu.Layout.WGMMA_UPCAST_2X)
    scales = _to_registers(ring.scales.at[buffer], plgpu.Layout.WGMMA.reduce(0))
    plgpu.barrier_arrive(ring.free.at[buffer])
    converted[...] = entries.astype(converted.dtype)
    plgpu.commit_smem()
    return converted, scales


def _release(ring: _Ring, buffer) -> None:
    """Releases a buffer whose entries were multiplied in place."""
    if ring.scales is None:
        plgpu.barrier_arrive(ring.free.at[buffer])
