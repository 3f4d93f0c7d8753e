"""What drafters read of a model's pass: recent queries, attention of entries, layers' inputs."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from sharding import BATCH, HEADS, KV_HEADS, LAYER_BATCH, Split, logical_axes


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
class ModelStats:
    """Statistics of a model's attention over a text, and inputs of its layers.

    Attributes:
      queries: `RecentQueries` per layer, None for a layer with a state; None without a window.
      total: float32 [B, K, S] per layer, the attention that each slot received, summed over the G
        heads of a KV head, None for a layer with a sliding window; or None.
      layer_inputs: [B, T, E] of each token, by layer; undefined except for the tokens of the passes
        that ran.
      split: static; the model's division over devices.
    """

    queries: tuple[Any, ...] | None
    total: tuple[Float[Array, "B K S"] | None, ...] | None = struct.field(
        metadata=logical_axes(LAYER_BATCH, KV_HEADS)
    )
    layer_inputs: dict[int, Float[Array, "B T E"]] = struct.field(
        default_factory=dict, metadata=logical_axes(BATCH)
    )
    split: Split = struct.field(pytree_node=False, default=Split())


def empty_window(batch: int, window: int, heads: int, size: int, dtype) -> RecentQueries:
    """Returns a window without queries."""
    return RecentQueries(
        jnp.zeros((batch, window, heads, size), dtype),
        jnp.zeros((batch, window, heads), jnp.promote_types(dtype, jnp.float32)),
        jnp.zeros((batch, window), jnp.int32),
    )


@jax.jit  # traced once for all layers
def update_from_chunk(
    window: RecentQueries,
    queries: tuple[Array, Array],
    start: Int[Array, ""],
    lengths: Int[Array, "B"],
) -> RecentQueries:
    """Returns the window updated with a chunk's queries that are among the prompt's last W.

    Args:
      window: so far.
      queries: [B, T, H, D], of the chunk's tokens, and the log-sum-exp of their scores.
      start: position of the chunk's first token.
      lengths: prompt lengths.
    """
    size = window.seen.shape[1]
    position = lengths[:, None] - size + jnp.arange(size)
    q, lse = queries
    index = position - start
    in_chunk = (position >= 0) & (index >= 0) & (index < q.shape[1])
    index = jnp.clip(index, 0, q.shape[1] - 1)

    def select(x, previous):
        selected = jnp.take_along_axis(x, _expand(index, x), 1)
        return jnp.where(_expand(in_chunk, x), selected, previous)

    return RecentQueries(
        select(q, window.q),
        select(lse, window.lse),
        jnp.where(in_chunk, position + 1, window.seen).astype(jnp.int32),
    )


@jax.jit  # traced once for all layers
def update_from_path(
    window: RecentQueries,
    queries: tuple[Array, Array],
    path: Int[Array, "B A"],
    count: Int[Array, "B"],
    start: Int[Array, "B"],
) -> RecentQueries:
    """Returns the window advanced by the first `count` nodes of each path.

    Args:
      window: before the round.
      queries: [B, N, H, D], of the tree's nodes, and the log-sum-exp of their scores.
      path: the committed nodes first.
      count: int32 [B], the number of committed nodes.
      start: int32 [B], the position of the root.
    """
    seen = (start[:, None] + 1 + jnp.arange(path.shape[1])).astype(jnp.int32)
    newest = count[:, None] + jnp.arange(window.seen.shape[1])

    def advance(previous, x):
        extended = jnp.concatenate([previous, x], 1)
        return jnp.take_along_axis(extended, _expand(newest, x), 1)

    q, lse = (jnp.take_along_axis(x, _expand(path, x), 1) for x in queries)
    return RecentQueries(advance(window.q, q), advance(window.lse, lse), advance(window.seen, seen))


def newest(queries: RecentQueries, count: int) -> RecentQueries:
    """Returns the last `count` queries of the window."""
    return jax.tree.map(lambda x: x[:, x.shape[1] - count :], queries)


def _expand(index: Array, x: Array) -> Array:
    """Returns a [B, T] array with as many axes as x."""
    return index.reshape(*index.shape, *[1] * (x.ndim - 2))
