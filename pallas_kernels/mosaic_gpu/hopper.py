"""Flash decoding on NVIDIA Hopper: one Pallas kernel (Mosaic GPU) over prefix and new tokens.

A block of the grid takes some rows of one KV head and one part of its keys. Its producer warpgroup
brings blocks of keys and values into shared memory by TMA, as far ahead as there are stages; its
compute warpgroups multiply them (wgmma) and keep a running softmax. What the parts give is merged
outside, by log-sum-exp. Queries, new tokens and results are as few as there are: TMA fills the rest
of a tile with zeros, and drops what would be written there.

Decoding with it is bound by memory: keys and values of the prefix are read once for every
`row_groups` tiles of 64 rows, and nothing of the size of the scores leaves the chip.
"""

import dataclasses
import functools
import math
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
from pallas_kernels.quantized import Quantized

LOG2E = math.log2(math.e)
# Of each thread: 128 * (40 + 2 * 232) are just less than the 65,536 that a multiprocessor has.
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
    """Returns C = splits * key_groups parts of the attention, each with its log-sum-exp, float32.

    A part that sees no key is 0 and FLOOR. Scores are scaled by D**-0.5.

    Args:
      q: rows of each KV head; R is a multiple of 8. M is R rounded up to whole tiles, a multiple of
        64 * row_groups.
      k, v: the prefix; S is at least a block and a multiple of 8. `Quantized` in 8 bits (q in bf16,
        D at most 128), it is read so: the integers become bf16 on the chip, which is exact.
      lengths: live slots of each row; then, which row of the prefix is the queries' first: it may
        have more rows than they.
      k_new, v_new: new tokens; N is a multiple of 8. L is N rounded up to whole blocks.
      bias: float32, added to the scores of new tokens: 0 or MASKED; X is B or 1.
      config: how to divide the work.
      interpreted: run in Pallas's interpreter.
    """
    (batch, heads, rows, size), groups = q.shape, config.groups(q.shape[3])
    if groups + 1 != WARPGROUPS and not interpreted:
        raise ValueError(
            f"{config} has {groups} compute warpgroups: it must have {WARPGROUPS - 1}, for which "
            "the registers are divided"
        )
    parts = config.splits * config.key_groups
    how: dict[str, Any] = {"interpret": plgpu.InterpretGPUParams()} if interpreted else {}
    return plgpu.kernel(
        functools.partial(_kernel, config),
        out_type=[
            jax.ShapeDtypeStruct((parts, batch, heads, rows, size), jnp.float32),
            jax.ShapeDtypeStruct((parts, batch, heads, bias.shape[1]), jnp.float32),
        ],
        # The last name runs fastest, so that tiles that read the same keys are neighbours in time.
        grid=(batch, heads, config.splits, bias.shape[1] // (ROWS * config.row_groups)),
        grid_names=("row", "head", "split", "tile"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        scratch_types=[_scratch(config, q.dtype, size, isinstance(k, Quantized))],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **how,
    )(q, lengths, (k_new, v_new), bias, _leaves(k), _leaves(v))


class _Ring(NamedTuple):
    """Places in shared memory through which blocks of keys, or of values, come.

    Attributes:
      entries: [places, block, D].
      scales: [places, block] float32, if the entries are integers, else None.
      loaded, free: barriers of each place.
    """

    entries: Any
    scales: Any
    loaded: Any
    free: Any


class _Scratch(NamedTuple):
    """What the warpgroups of a block of the grid share.

    Attributes:
      queries: [row_groups, 64, D].
      stages: (entries of both rings of the prefix, results [groups, 64, columns]). The results
        leave through the memory of the entries, when nobody needs these any more.
      weights: [groups, 64, block], between the two products.
      asked, done: barriers: queries are there; entries have all been read.
      prefix: the rings of keys and values, whose entries are in `stages`.
      new: rings for new tokens; None: they come through those of the prefix.
      converted: [groups, block, D], integers in the dtype of the queries; None: there are none.
    """

    queries: Any
    stages: Any
    weights: Any
    asked: Any
    done: Any
    prefix: tuple[_Ring, _Ring]
    new: tuple[_Ring, _Ring] | None
    converted: Any


def _scratch(config: Config, dtype: Any, size: int, quantized: bool) -> _Scratch:
    groups = config.groups(size)
    # A block of keys is read by the warpgroups of one key group.
    readers = config.row_groups * column_groups(size)

    def ring(places: int, entries: Any, scales: Any = None) -> _Ring:
        loaded = plgpu.Barrier(num_arrivals=1 if scales is None else 2, num_barriers=places)
        free = plgpu.Barrier(num_arrivals=readers, num_barriers=places)
        return _Ring(entries, scales, loaded, free)

    stages = _shared((config.stages, config.block, size), jnp.int8 if quantized else dtype)
    scales = plgpu.SMEM((config.stages, config.block), jnp.float32) if quantized else None
    whole = _shared((config.key_groups, config.block, size), dtype)
    return _Scratch(
        queries=_shared((config.row_groups, ROWS, size), dtype),
        stages=plgpu.RefUnion(
            (stages, stages), _shared((groups, ROWS, min(size, WIDEST)), jnp.float32)
        ),
        weights=_shared((groups, ROWS, config.block), dtype),
        asked=plgpu.Barrier(num_barriers=config.row_groups),
        done=plgpu.Barrier(num_arrivals=groups),
        prefix=(ring(config.stages, None, scales), ring(config.stages, None, scales)),
        new=(ring(config.key_groups, whole), ring(config.key_groups, whole)) if quantized else None,
        converted=_shared((groups, config.block, size), dtype) if quantized else None,
    )


def _leaves(entries: Array | Quantized) -> tuple[Array, Array | None]:
    """Returns (entries, their scales if they are integers)."""
    return (entries.values, entries.scales) if isinstance(entries, Quantized) else (entries, None)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in tiles of 8 rows of 128 bytes, as wgmma and TMA read them fastest."""
    size = jnp.dtype(dtype).itemsize
    width = min(128, shape[-1] * size)  # in bytes; 64 integers are fewer
    tile = (TILE, width // size)
    tiled = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=tiled)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The keys of one block of the grid: `steps` blocks of the prefix, then those of new tokens.

    Attributes:
      row, head: of the batch, and the KV head.
      prefix_row: of the prefix.
      begin, end: of the prefix.
      steps: blocks of keys of the prefix, 0 or more.
      total: the same with those of new tokens, which the first split takes.
    """

    row: Any
    prefix_row: Any
    head: Any
    begin: Any
    end: Any
    steps: Any
    total: Any


def _part_of(config: Config, lengths: Any, new_tokens: int) -> _Part:
    split, row = lax.axis_index("split"), lax.axis_index("row")
    length, block = lengths[row], config.block
    of_split = pl.cdiv(pl.cdiv(length, config.splits), block) * block
    begin = split * of_split
    end = jnp.minimum(begin + of_split, length)
    steps = pl.cdiv(jnp.maximum(end - begin, 0), block)
    total = steps + jnp.where(split == 0, pl.cdiv(new_tokens, block), 0)
    first = lengths[lengths.shape[0] - 1]
    return _Part(row, first + row, lax.axis_index("head"), begin, end, steps, total)


def _kernel(config, q, lengths, new, bias, k, v, out, lse, scratch: _Scratch) -> None:
    """The kernel: references to the arrays of `flash`, its results, and its scratch memory."""
    (slots, size), groups = k[0].shape[2:], config.groups(k[0].shape[3])
    part = _part_of(config, lengths, new[0].shape[2])
    (*entries,), results = scratch.stages
    pairs = zip(scratch.prefix, entries, strict=True)
    rings = [ring._replace(entries=entries) for ring, entries in pairs]
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == groups)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _ask(config, part, q, scratch)
        _produce(config, part, (k, v), rings, new, scratch.new)

    @pl.when(warpgroup < groups)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = lax.rem(warpgroup, config.row_groups)
        rest = lax.div(warpgroup, config.row_groups)
        turn, column = lax.rem(rest, config.key_groups), lax.div(rest, config.key_groups)
        plgpu.barrier_wait(scratch.asked.at[mine])
        tile = lax.axis_index("tile") * config.row_groups + mine
        rows = pl.ds(tile * ROWS, ROWS)
        width = min(size, WIDEST)
        columns = pl.ds(column * width, width)
        converted = None if scratch.converted is None else scratch.converted.at[warpgroup]
        own = scratch.queries.at[mine], scratch.weights.at[warpgroup], converted
        attend = functools.partial(_attend, own, columns)
        hide_prefix, hide_new = _masks(config, part, slots, bias, rows)
        blocks = ((rings, hide_prefix), (scratch.new or rings, hide_new))
        total, peak, weight = _consume(config, part, turn, width, attend, blocks)
        at = (lax.axis_index("split") * config.key_groups + turn, part.row, part.head, rows)
        seen = jnp.where(weight == 0.0, 1.0, weight)

        @pl.when(column == 0)
        def _():
            lse[at] = jnp.where(weight == 0.0, FLOOR, (peak + jnp.log2(seen)) * (1 / LOG2E))

        plgpu.barrier_arrive(scratch.done)
        plgpu.barrier_wait(scratch.done)  # for the other warpgroup, which may still read entries
        results[warpgroup] = total / lax.broadcast_in_dim(seen, total.shape, [0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(results.at[warpgroup], out.at[(*at, columns)])
        plgpu.wait_smem_to_gmem(0)


def _ask(config: Config, part: _Part, q, scratch: _Scratch) -> None:
    """Brings the queries."""
    for i in range(config.row_groups):
        tile = lax.axis_index("tile") * config.row_groups + i
        rows = q.at[part.row, part.head, pl.ds(tile * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(rows, scratch.queries.at[i], scratch.asked.at[i])


def _produce(config: Config, part: _Part, prefix, rings, new, new_rings) -> None:
    """Brings block after block of keys and values, as places become free."""
    block, slots = config.block, prefix[0][0].shape[2]

    def bring(i, first, at, row, sources, rings):
        """Brings block i, of a row, into rings whose first block was `first`."""
        for source, ring in zip(sources, rings, strict=True):
            places = ring.entries.shape[0]
            place = lax.rem(i, places)

            @pl.when(i - first >= places)
            def _(ring=ring, place=place):
                plgpu.barrier_wait(ring.free.at[place])

            for array, shared in zip(source, (ring.entries, ring.scales), strict=True):
                if array is not None:
                    piece = array.at[row, part.head, pl.ds(at, block)]
                    plgpu.copy_gmem_to_smem(piece, shared.at[place], ring.loaded.at[place])

    def bring_prefix(i, carry):
        at = jnp.minimum(part.begin + i * block, slots - block)  # never beyond the cache
        bring(i, 0, at, part.prefix_row, prefix, rings)
        return carry

    def bring_new(i, carry):
        sources = [(array, None) for array in new]
        first = part.steps if new_rings else 0
        bring(i, first, (i - part.steps) * block, part.row, sources, new_rings or rings)
        return carry

    lax.fori_loop(0, part.steps, bring_prefix, None)
    lax.fori_loop(part.steps, part.total, bring_new, None)


def _masks(config: Config, part: _Part, slots: int, bias, rows) -> tuple[Callable, Callable]:
    """Returns (what hides scores of block i of the prefix, the same of new tokens)."""
    block = config.block

    def hide_prefix(i, scores):
        begin = part.begin + i * block
        at = jnp.minimum(begin, slots - block)  # as `_produce` brought it
        place = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + at
        return jnp.where((place >= begin) & (place < part.end), scores, MASKED)

    def hide_new(i, scores):
        row = jnp.minimum(part.row, bias.shape[0] - 1)
        of_block = bias.at[row, rows, pl.ds((i - part.steps) * block, block)]
        return scores + _load(of_block, plgpu.Layout.WGMMA, optimized=False)

    return hide_prefix, hide_new


def _load(ref: Any, layout: Any, optimized: bool = True) -> Array:
    """Returns what a reference holds, in a layout; optimized: it may not cost bank conflicts."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def _consume(config: Config, part: _Part, turn, width: int, attend, blocks):
    """Returns (total, peak, weight) of a warpgroup's rows over the blocks of keys of its turns.

    `blocks` has (rings, what hides scores) for the prefix and for new tokens.
    """

    def of_row(value: float) -> Array:
        filled = jnp.full((ROWS,), value, jnp.float32)
        return plgpu.layout_cast(filled, plgpu.Layout.WGMMA.reduce(1))

    def turns(blocks):
        return jnp.maximum(pl.cdiv(blocks - turn, config.key_groups), 0)

    nothing = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    carry = (nothing, of_row(FLOOR), of_row(0.0))
    ends = (0, turns(part.steps), turns(part.total))
    for (rings, hide), first, last in zip(blocks, ends, ends[1:], strict=False):

        def step(j, carry, rings=rings, hide=hide):
            i = j * config.key_groups + turn
            return attend(rings, i, functools.partial(hide, i), carry)

        carry = lax.fori_loop(first, last, step, carry)
    return carry


def _attend(own, columns, rings, i, hide, carry):
    """Returns (total, peak, weight) with block i of the keys; peaks are in powers of two."""
    (q_s, p_s, converted), (keys, values) = own, rings
    total, peak, weight = carry
    place = lax.rem(i, keys.entries.shape[0])

    def score(accumulator):
        plgpu.wgmma(accumulator, q_s, k_s.transpose((1, 0)))
        return accumulator[...]

    def add_up(accumulator):
        plgpu.wgmma(accumulator, p_s, v_s.at[:, columns])
        return accumulator[...]

    k_s, scales = _take(keys, place, converted)
    scores = pl.run_scoped(score, plgpu.ACC((ROWS, k_s.shape[0]), jnp.float32))
    _leave(keys, place)
    scores = scores * (q_s.shape[-1] ** -0.5 * LOG2E)
    if scales is not None:
        scores = scores * lax.broadcast_in_dim(scales, scores.shape, [1])
    scores = hide(scores)
    risen = jnp.maximum(peak, scores.max(axis=1))
    fade = jnp.exp2(peak - risen)
    p = jnp.exp2(scores - lax.broadcast_in_dim(risen, scores.shape, [0]))
    weight = weight * fade + p.sum(axis=1)
    v_s, scales = _take(values, place, converted)
    if scales is not None:
        p = p * lax.broadcast_in_dim(scales, p.shape, [1])
    # Through shared memory: the interpreter multiplies nothing that lies in registers.
    p_s[...] = p.astype(p_s.dtype)
    plgpu.commit_smem()
    total = total * lax.broadcast_in_dim(fade, total.shape, [0])
    total = total + pl.run_scoped(add_up, plgpu.ACC(total.shape, jnp.float32))
    _leave(values, place)
    return total, risen, weight


def _take(ring: _Ring, place, converted) -> tuple[Any, Any]:
    """Returns (entries for wgmma, their scales or None) of a place, when they are loaded.

    Integers are exact in 16 bits, so they are converted as they are; each warpgroup does it for
    itself, and leaves the place at once. The scales of keys and values multiply columns of scores
    and of weights.
    """
    plgpu.barrier_wait(ring.loaded.at[place])
    if ring.scales is None:
        return ring.entries.at[place], None
    entries = _load(ring.entries.at[place], plgpu.Layout.WGMMA_UPCAST_2X)
    scales = _load(ring.scales.at[place], plgpu.Layout.WGMMA.reduce(0))
    plgpu.barrier_arrive(ring.free.at[place])
    converted[...] = entries.astype(converted.dtype)
    plgpu.commit_smem()
    return converted, scales


def _leave(ring: _Ring, place) -> None:
    """Leaves a place whose entries were multiplied where they lay."""
    if ring.scales is None:
        plgpu.barrier_arrive(ring.free.at[place])
