"""Attention statistics for policies: the newest queries, and the attention of each entry."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from sharding import HEADS, KV_HEADS, LAYER_BATCH, Split, logical_axes


@struct.dataclass
class RecentQueries:
    """The newest queries of each row in one layer, oldest first.

    Attributes:
      q: [B, W, H, D], rotated.
      lse: float32 [B, W, H], the log-sum-exp of each query's scaled scores.
      seen: int32 [B, W], the number of positions that each query attended to, its own included: a
        query's position is seen - 1. 0 marks a missing query of a row shorter than W; those come
        first.
    """

    q: Float[Array, "B W H D"] = struct.field(metadata=logical_axes(LAYER_BATCH, None, HEADS))
    lse: Float[Array, "B W H"] = struct.field(metadata=logical_axes(LAYER_BATCH, None, HEADS))
    seen: Int[Array, "B W"] = struct.field(metadata=logical_axes(LAYER_BATCH))


@struct.dataclass
class AttentionStats:
    """Statistics of a model's attention.

    Attributes:
      queries: per layer; None without a window.
      total: float32 [B, K, S] per layer, the attention that each slot received, summed over the G
        heads of a KV head; or None.
      split: static; the model's division over devices.
    """

    queries: tuple[RecentQueries, ...] | None
    total: tuple[Float[Array, "B K S"], ...] | None = struct.field(
        metadata=logical_axes(LAYER_BATCH, KV_HEADS)
    )
    split: Split = struct.field(pytree_node=False, default=Split())


def empty_window(batch: int, window: int, heads: int, size: int, dtype) -> RecentQueries:
    """Returns a window without queries."""
    return RecentQueries(
        jnp.zeros((batch, window, heads, size), dtype),
        jnp.zeros((batch, window, heads), jnp.promote_types(dtype, jnp.float32)),
        jnp.zeros((batch, window), jnp.int32),
    )


def update_from_chunk(
    old: RecentQueries,
    new: tuple[Array, Array],
    start: Int[Array, ""],
    lengths: Int[Array, "B"],
) -> RecentQueries:
    """Returns the window updated with a chunk's queries that are among the prompt's last W.

    Args:
      old: the window so far.
      new: queries [B, T, H, D] of the chunk's tokens, and the log-sum-exp of their scores.
      start: position of the chunk's first token.
      lengths: of the prompts.
    """
    window = old.seen.shape[1]
    position = lengths[:, None] - window + jnp.arange(window)
    q, lse = new
    index = position - start
    in_chunk = (position >= 0) & (index >= 0) & (index < q.shape[1])
    index = jnp.clip(index, 0, q.shape[1] - 1)

    def select(x, previous):
        taken = jnp.take_along_axis(x, _expand(index, x), 1)
        return jnp.where(_expand(in_chunk, x), taken, previous)

    return RecentQueries(
        select(q, old.q),
        select(lse, old.lse),
        jnp.where(in_chunk, position + 1, old.seen).astype(jnp.int32),
    )


def update_from_path(
    old: RecentQueries,
    new: tuple[Array, Array],
    path: Int[Array, "B A"],
    kept: Int[Array, "B"],
    count: Int[Array, "B"],
) -> RecentQueries:
    """Returns the window advanced by the first `kept` nodes of each path.

    Args:
      old: the window before the round.
      new: queries [B, N, H, D] of the tree's nodes, and the log-sum-exp of their scores.
      path, kept: as in `magicjax.drafters.base.RoundOutcome`.
      count: int32 [B], tokens committed before the round.
    """
    seen = (count[:, None] + 1 + jnp.arange(path.shape[1])).astype(jnp.int32)
    window = kept[:, None] + jnp.arange(old.seen.shape[1])

    def advance(previous, x):
        both = jnp.concatenate([previous, x], 1)
        return jnp.take_along_axis(both, _expand(window, x), 1)

    q, lse = (jnp.take_along_axis(x, _expand(path, x), 1) for x in new)
    return RecentQueries(advance(old.q, q), advance(old.lse, lse), advance(old.seen, seen))


def newest(queries: RecentQueries, count: int) -> RecentQueries:
    """Returns the last `count` queries of the window."""
    return jax.tree.map(lambda x: x[:, x.shape[1] - count :], queries)


def _expand(index: Array, x: Array) -> Array:
    """Returns a [B, T] array with as many axes as x."""
    return index.reshape(*index.shape, *[1] * (x.ndim - 2))
