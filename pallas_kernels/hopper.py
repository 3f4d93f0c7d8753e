"""Flash decoding on NVIDIA Hopper: one Pallas kernel (Mosaic GPU) over prefix and new tokens.

A block of the grid takes some rows of one KV head and one part of its keys. Its producer warpgroup
brings blocks of keys and values into shared memory by TMA, as far ahead as there are stages; its
compute warpgroups multiply them (wgmma) and keep a running softmax. What the parts give is merged
outside, by log-sum-exp.

Decoding with it is bound by memory: keys and values of the prefix are read once for every
`row_groups` tiles of 64 rows, and nothing of the size of the scores leaves the chip.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper_config import ROWS, WARPGROUPS, WIDEST, Config, column_groups
from pallas_kernels.partials import FLOOR, MASKED

LOG2E = math.log2(math.e)
# Of each thread: 128 * (40 + 2 * 232) are just less than the 65,536 that a multiprocessor has.
PRODUCER_REGISTERS, COMPUTE_REGISTERS = 40, 232


def flash(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "B"],
    k_new: Float[Array, "B K N D"],
    v_new: Float[Array, "B K N D"],
    bias: Float[Array, "X R N"],
    config: Config,
    interpreted: bool = False,
) -> tuple[Float[Array, "C B K R D"], Float[Array, "C B K R"]]:
    """Returns C = splits * key_groups parts of the attention, each with its log-sum-exp, float32.

    A part that sees no key is 0 and FLOOR. Scores are scaled by D**-0.5.

    Args:
      q: rows of each KV head; R is a multiple of 64 * row_groups.
      k, v: the prefix; S is at least a block and a multiple of 8.
      lengths: live slots of each row.
      k_new, v_new: new tokens; N is a multiple of the block.
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
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    shared = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=tiled)
    entries = shared((config.stages, config.block, size))
    loaded = plgpu.Barrier(num_barriers=config.stages)
    # A block of keys is read by the warpgroups of one key group.
    readers = config.row_groups * column_groups(size)
    free = plgpu.Barrier(num_arrivals=readers, num_barriers=config.stages)
    how: dict[str, Any] = {"interpret": plgpu.InterpretGPUParams()} if interpreted else {}
    return plgpu.kernel(
        functools.partial(_kernel, config),
        out_type=[
            jax.ShapeDtypeStruct((parts, batch, heads, rows, size), jnp.float32),
            jax.ShapeDtypeStruct((parts, batch, heads, rows), jnp.float32),
        ],
        # The last name runs fastest, so that tiles that read the same keys are neighbours in time.
        grid=(batch, heads, config.splits, rows // (ROWS * config.row_groups)),
        grid_names=("row", "head", "split", "tile"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        scratch_types=[
            shared((config.row_groups, ROWS, size)),
            entries,
            entries,
            shared((groups, ROWS, config.block)),
            plgpu.Barrier(num_barriers=config.row_groups),
            loaded,
            loaded,
            free,
            free,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **how,
    )(q, k, v, lengths, k_new, v_new, bias)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The keys of one block of the grid: `steps` blocks of the prefix, then those of new tokens.

    Attributes:
      row, head: of the batch, and the KV head.
      begin, end: of the prefix.
      steps: blocks of keys of the prefix, 0 or more.
      total: the same with those of new tokens, which the first split takes.
    """

    row: Any
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
    total = steps + jnp.where(split == 0, new_tokens // block, 0)
    return _Part(row, lax.axis_index("head"), begin, end, steps, total)


def _kernel(config, q, k, v, lengths, k_new, v_new, bias, out, lse, *scratch) -> None:
    """The kernel: references to the arrays of `flash`, its results, and its scratch memory."""
    q_s, k_s, v_s, p_s, q_bar, k_bar, v_bar, k_free, v_free = scratch
    part = _part_of(config, lengths, k_new.shape[2])
    groups = config.groups(k.shape[3])
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == groups)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        entries = ((k, k_new, k_s, k_bar, k_free), (v, v_new, v_s, v_bar, v_free))
        _produce(config, part, q, q_s, q_bar, entries)

    @pl.when(warpgroup < groups)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = lax.rem(warpgroup, config.row_groups)
        rest = lax.div(warpgroup, config.row_groups)
        turn, column = lax.rem(rest, config.key_groups), lax.div(rest, config.key_groups)
        plgpu.barrier_wait(q_bar.at[mine])
        tile = lax.axis_index("tile") * config.row_groups + mine
        rows = pl.ds(tile * ROWS, ROWS)
        width = min(k.shape[3], WIDEST)
        columns = pl.ds(column * width, width)
        attend = functools.partial(
            _attend,
            config,
            (q_s.at[mine], k_s, v_s, p_s.at[warpgroup]),
            (k_bar, v_bar, k_free, v_free),
            columns,
        )
        hide_prefix, hide_new = _masks(config, part, k.shape[2], bias, rows)
        total, peak, weight = _consume(config, part, turn, width, attend, hide_prefix, hide_new)
        at = (lax.axis_index("split") * config.key_groups + turn, part.row, part.head, rows)
        seen = jnp.where(weight == 0.0, 1.0, weight)
        out[(*at, columns)] = total / lax.broadcast_in_dim(seen, total.shape, [0])

        @pl.when(column == 0)
        def _():
            lse[at] = jnp.where(weight == 0.0, FLOOR, (peak + jnp.log2(seen)) * (1 / LOG2E))


def _produce(config: Config, part: _Part, q, q_s, q_bar, entries) -> None:
    """Brings the queries, then block after block of keys and values, as slots become free."""
    block, stages = config.block, config.stages
    slots = entries[0][0].shape[2]
    for i in range(config.row_groups):
        tile = lax.axis_index("tile") * config.row_groups + i
        rows = q.at[part.row, part.head, pl.ds(tile * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(rows, q_s.at[i], q_bar.at[i])

    def bring(i, carry):
        slot = lax.rem(i, stages)
        for of_prefix, of_new, shared, loaded, free in entries:

            @pl.when(i >= stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[slot])

            @pl.when(i < part.steps)
            def _(of_prefix=of_prefix, shared=shared, loaded=loaded):
                at = jnp.minimum(part.begin + i * block, slots - block)  # never beyond the cache
                source = of_prefix.at[part.row, part.head, pl.ds(at, block)]
                plgpu.copy_gmem_to_smem(source, shared.at[slot], loaded.at[slot])

            @pl.when(i >= part.steps)
            def _(of_new=of_new, shared=shared, loaded=loaded):
                source = of_new.at[part.row, part.head, pl.ds((i - part.steps) * block, block)]
                plgpu.copy_gmem_to_smem(source, shared.at[slot], loaded.at[slot])

        return carry

    lax.fori_loop(0, part.total, bring, None)


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
        return scores + _load(bias.at[row, rows, pl.ds((i - part.steps) * block, block)])

    return hide_prefix, hide_new


def _load(ref: Any) -> Array:
    """Returns a tile in the layout of scores, read element by element."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=plgpu.Layout.WGMMA, optimized=False)


def _consume(config: Config, part: _Part, turn, width: int, attend, hide_prefix, hide_new):
    """Returns (total, peak, weight) of a warpgroup's rows over the blocks of keys of its turns."""

    def of_row(value: float) -> Array:
        filled = jnp.full((ROWS,), value, jnp.float32)
        return plgpu.layout_cast(filled, plgpu.Layout.WGMMA.reduce(1))

    def turns(blocks):
        return jnp.maximum(pl.cdiv(blocks - turn, config.key_groups), 0)

    def run(first, last, hide, carry):
        def body(j, carry):
            i = j * config.key_groups + turn
            return attend(i, functools.partial(hide, i), carry)

        return lax.fori_loop(first, last, body, carry)

    nothing = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    carry = (nothing, of_row(FLOOR), of_row(0.0))
    carry = run(0, turns(part.steps), hide_prefix, carry)
    return run(turns(part.steps), turns(part.total), hide_new, carry)


def _attend(config: Config, shared, barriers, columns, i, hide, carry):
    """Returns (total, peak, weight) with block i of the keys; peaks are in powers of two."""
    (q_s, k_s, v_s, p_s), (k_bar, v_bar, k_free, v_free) = shared, barriers
    total, peak, weight = carry
    slot = lax.rem(i, config.stages)

    def score(accumulator):
        plgpu.wgmma(accumulator, q_s, k_s.at[slot].transpose((1, 0)))
        return accumulator[...]

    def add_up(accumulator):
        plgpu.wgmma(accumulator, p_s, v_s.at[slot, :, columns])
        return accumulator[...]

    plgpu.barrier_wait(k_bar.at[slot])
    scores = pl.run_scoped(score, plgpu.ACC((ROWS, config.block), jnp.float32))
    plgpu.barrier_arrive(k_free.at[slot])
    scores = hide(scores * (q_s.shape[-1] ** -0.5 * LOG2E))
    risen = jnp.maximum(peak, scores.max(axis=1))
    fade = jnp.exp2(peak - risen)
    p = jnp.exp2(scores - lax.broadcast_in_dim(risen, scores.shape, [0]))
    # Through shared memory: the interpreter multiplies nothing that lies in registers.
    p_s[...] = p.astype(p_s.dtype)
    plgpu.commit_smem()
    plgpu.barrier_wait(v_bar.at[slot])
    total = total * lax.broadcast_in_dim(fade, total.shape, [0])
    total = total + pl.run_scoped(add_up, plgpu.ACC(total.shape, jnp.float32))
    plgpu.barrier_arrive(v_free.at[slot])
    return total, risen, weight * fade + p.sum(axis=1)
