"""Flash decoding on TPUs: one Pallas kernel over new tokens and the prefix.

A step of the grid multiplies the queries of all KV heads of a row with one block of keys, and keeps
a running softmax in VMEM. The pipeline copies the next block meanwhile. Blocks beyond a row's
length have the index of its last one, so they are not copied, and are skipped.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.lse_merge import EMPTY_LSE, FLOOR, MASKED, dot_precision
from pallas_kernels.quantized import Quantized, leaves
from pallas_kernels.scores import capped
from pallas_kernels.tpu.config import VMEM_LIMIT, Config

UNROLLED_HEADS = 8  # with more KV heads, a loop runs over groups of them


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The static sizes of a call, and which block each step of the grid reads.

    Attributes:
      config: how the kernel divides its work.
      new_blocks: blocks of new tokens, which come first.
      slots: S, of the prefix.
      more_rows: whether the bias has a row for each row of the queries.
    """

    config: Config
    new_blocks: int
    slots: int
    more_rows: bool

    def live(self, row, scalars) -> Any:
        """Returns the slots of a row that may be seen: those up to the last one in use."""
        return jnp.minimum(scalars[row], self.slots)

    def query_index(self, row, tile, step, scalars) -> tuple:
        return row, 0, tile, 0

    def window_index(self, row, tile, step, scalars) -> tuple:
        return row, tile, 0

    def bias_index(self, row, tile, step, scalars) -> tuple:
        return row * self.more_rows, tile, jnp.minimum(step, self.new_blocks - 1)

    def new_index(self, row, tile, step, scalars) -> tuple:
        return row, 0, jnp.minimum(step, self.new_blocks - 1), 0

    def prefix_index(self, row, tile, step, scalars) -> tuple:
        last = jnp.maximum(self.live(row, scalars) - 1, 0) // self.config.block
        block = jnp.clip(step - self.new_blocks, 0, last)
        return scalars[scalars.shape[0] - 1] + row, 0, block, 0

    def scales_index(self, *indices) -> tuple:
        return self.prefix_index(*indices)[:3]


def flash(
    q: Float[Array, "B K R D"],
    k: Float[Array, "C K S D"] | Quantized,
    v: Float[Array, "C K S D"] | Quantized,
    lengths: Int[Array, "B+1"],
    k_new: Float[Array, "B K N D"],
    v_new: Float[Array, "B K N D"],
    bias: Float[Array, "X R N"],
    seen_from: Int[Array, "B R 1"] | None,
    softcap: float | None,
    config: Config,
    interpret: Any = False,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R 1"]]:
    """Returns the attention in q's dtype, and its log-sum-exp in float32.

    Args:
      q: rows of each KV head; R is a multiple of config.rows.
      k, v: the prefix, S >= 1; if `Quantized` in 8 bits, integers are converted to q's dtype, and
        scales multiply scores and weights.
      lengths: tokens of each row; then the row of the prefix of the first row of q.
      k_new, v_new: new tokens; N is a multiple of config.new_block.
      bias: float32, added to the scores of new tokens: 0 or MASKED; X is B or 1.
      seen_from: with a sliding window, the first position that each row of q sees, 0 or more.
      softcap: as for `tree_attention`.
      config: how to divide the work.
      interpret: parameters of Pallas's interpreter; False: compile.
    """
    (batch, heads, rows, size), slots = q.shape, k.shape[2]
    grid = _Grid(config, k_new.shape[2] // config.new_block, slots, bias.shape[0] > 1)
    quantized = isinstance(k, Quantized)
    prefix = pl.BlockSpec((1, heads, config.block, size), grid.prefix_index)
    scales = pl.BlockSpec((1, heads, config.block), grid.scales_index) if quantized else None
    new = pl.BlockSpec((1, heads, config.new_block, size), grid.new_index)
    window = pl.BlockSpec((1, config.rows, 1), grid.window_index)
    tile = pl.BlockSpec((1, heads, config.rows, size), grid.query_index)
    prefix_blocks = pl.cdiv(jnp.minimum(lengths[:-1].max(), slots), config.block)
    return pl.pallas_call(
        functools.partial(_kernel, grid, softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, rows // config.rows, grid.new_blocks + prefix_blocks),
            in_specs=[
                tile,
                (prefix, scales),
                (prefix, scales),
                new,
                new,
                pl.BlockSpec((1, config.rows, config.new_block), grid.bias_index),
                None if seen_from is None else window,
            ],
            out_specs=[tile, pl.BlockSpec((1, heads, config.rows, 1), grid.query_index)],
            scratch_shapes=[
                pltpu.VMEM((heads, config.rows, size), jnp.float32),
                pltpu.VMEM((heads, config.rows, 1), jnp.float32),
                pltpu.VMEM((heads, config.rows, 1), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, rows, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            # Of rows, tiles of query rows and blocks: chips with two cores divide the rows.
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        interpret=interpret,
    )(lengths, q, leaves(k), leaves(v), k_new, v_new, bias, seen_from)


def _kernel(
    grid: _Grid, softcap, lengths, q, k, v, k_new, v_new, bias, seen_from, out, lse, *running
) -> None:
    """The kernel; takes references to the arguments of `flash`, its results, and scratch memory."""
    step, row, block = pl.program_id(2), pl.program_id(0), grid.config.block
    total, peak, weight = running
    live = grid.live(row, lengths)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)
        peak[...] = jnp.full_like(peak, FLOOR)
        weight[...] = jnp.zeros_like(weight)

    def for_each_head(add) -> None:
        lax.fori_loop(0, q.shape[1], lambda head, _: add(head), None, unroll=_unroll(q.shape[1]))

    @pl.when(step < grid.new_blocks)
    def _():
        def add(head) -> None:
            scores = _scores(q[0, head], k_new[0, head], softcap) + bias[0]
            _accumulate(scores, v_new[0, head], None, [x.at[head] for x in running])

        for_each_head(add)

    first = (step - grid.new_blocks) * block

    @pl.when((step >= grid.new_blocks) & (first < live))
    def _():
        slot = first + lax.broadcasted_iota(jnp.int32, (1, block), 1)
        seen = slot < live
        if seen_from is not None:
            seen &= _position(slot, lengths[row], grid.slots) >= seen_from[0]

        def add(head) -> None:
            keys, values = (x[0][0, head].astype(q.dtype) for x in (k, v))
            scales = [None if x[1] is None else x[1][0, head][None] for x in (k, v)]
            if grid.slots % block:  # what follows the last slot may not be finite
                inside = first + lax.broadcasted_iota(jnp.int32, (block, 1), 0) < grid.slots
                values = jnp.where(inside, values, 0)
                scales = [x if x is None else jnp.where(slot < grid.slots, x, 0) for x in scales]
            scores = _scores(q[0, head], keys, softcap, scales[0])
            scores = jnp.where(seen, scores, MASKED)
            _accumulate(scores, values, scales[1], [x.at[head] for x in running])

        for_each_head(add)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        nonzero = jnp.where(weight[...] == 0, 1, weight[...])
        out[0] = (total[...] / nonzero).astype(out.dtype)
        lse[0] = jnp.where(weight[...] == 0, EMPTY_LSE, peak[...] + jnp.log(nonzero))


def _unroll(heads: int) -> int:
    return next(n for n in range(min(heads, UNROLLED_HEADS), 0, -1) if heads % n == 0)


def _position(slot, length, slots: int):
    """Returns the newest position of a text in each slot of a ring, negative in an empty one."""
    rounds, last = (length - 1) // slots, (length - 1) % slots
    return slot + slots * (rounds - (slot > last))


def _dot(a, b, contracted: tuple[int, int]):
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    precision = dot_precision(a.dtype)
    return lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)


def _scores(rows, keys, softcap: float | None, scales=None):
    """Returns the scores of rows [R, D] and keys [X, D], whose scales are [1, X] or None."""
    scores = _dot(rows, keys, (1, 1)) * rows.shape[1] ** -0.5
    return capped(scores if scales is None else scores * scales, softcap)


def _accumulate(scores, values, scales, running) -> None:
    """Adds values [X, D] with scores [R, X] to the total, peak and weight of rows."""
    total, peak, weight = running
    new_peak = jnp.maximum(peak[...], scores.max(1, keepdims=True))
    rescale, p = jnp.exp(peak[...] - new_peak), jnp.exp(scores - new_peak)
    weight[...] = weight[...] * rescale + p.sum(1, keepdims=True)
    p = (p if scales is None else p * scales).astype(values.dtype)
    total[...] = total[...] * rescale + _dot(p, values, (1, 0))
    peak[...] = new_peak
