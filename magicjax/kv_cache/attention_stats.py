"""What a policy wants to see of attention: the newest queries, and what all of them attended to."""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Watch:
    """What of a model's attention must be kept.

    Attributes:
      window: W, how many of each row's newest queries.
      total: the attention that all queries paid to each entry.
      rounds: keep watching in every round, not only at prefill.
    """

    window: int = 0
    total: bool = False
    rounds: bool = False

    def __or__(self, other: "Watch") -> "Watch":
        """Returns what shows both of them all they want."""
        return Watch(
            max(self.window, other.window), self.total or other.total, self.rounds or other.rounds
        )


@struct.dataclass
class Queries:
    """The newest queries of each row in one layer, oldest first.

    Attributes:
      q: [B, W, H, D], rotated.
      lse: float32 [B, W, H], the log-sum-exp of all scaled scores that each query gave.
      seen: int32 [B, W], how many positions each saw, its own included (so it stands at seen - 1);
        0: there is no such query, because the row is shorter than W. Those come first.
    """

    q: Float[Array, "B W H D"]
    lse: Float[Array, "B W H"]
    seen: Int[Array, "B W"]


@struct.dataclass
class Seen:
    """What was watched.

    Attributes:
      queries: for each layer; None if no window was asked for.
      total: float32 [B, K, S] for each layer, summed over the G heads of a KV head; or None.
      stages: static; as in a cache.
    """

    queries: tuple[Queries, ...] | None
    total: tuple[Float[Array, "B K S"], ...] | None
    stages: int = struct.field(pytree_node=False, default=1)

    of_layers = ("queries", "total")


def no_queries(batch: int, window: int, heads: int, size: int, dtype) -> Queries:
    """Returns a window without queries."""
    return Queries(
        jnp.zeros((batch, window, heads, size), dtype),
        jnp.zeros((batch, window, heads), jnp.promote_types(dtype, jnp.float32)),
        jnp.zeros((batch, window), jnp.int32),
    )


def of_chunk(
    old: Queries,
    new: tuple[Array, Array],
    start: Int[Array, ""],
    lengths: Int[Array, "B"],
) -> Queries:
    """Returns the window with those of a prompt's last W queries that are in a chunk.

    Args:
      old: the window so far.
      new: queries [B, T, H, D] of the chunk's tokens, and the log-sum-exp of their scores.
      start: position of the chunk's first token.
      lengths: of the prompts.
    """
    window = old.seen.shape[1]
    position = lengths[:, None] - window + jnp.arange(window)
    q, lse = new
    place = position - start
    here = (position >= 0) & (place >= 0) & (place < q.shape[1])
    place = jnp.clip(place, 0, q.shape[1] - 1)

    def newer(x, was):
        taken = jnp.take_along_axis(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), 1)
        return jnp.where(here.reshape(*here.shape, *[1] * (x.ndim - 2)), taken, was)

    return Queries(
        newer(q, old.q),
        newer(lse, old.lse),
        jnp.where(here, position + 1, old.seen).astype(jnp.int32),
    )


def follow(
    old: Queries,
    new: tuple[Array, Array],
    path: Int[Array, "B A"],
    kept: Int[Array, "B"],
    count: Int[Array, "B"],
) -> Queries:
    """Returns the window moved on by the first `kept` nodes of each path.

    Args:
      old: the window before the round.
      new: queries [B, N, H, D] of the tree's nodes, and the log-sum-exp of their scores.
      path, kept: as a round's.
      count: tokens committed before the round.
    """
    seen = (count[:, None] + 1 + jnp.arange(path.shape[1])).astype(jnp.int32)
    window = kept[:, None] + jnp.arange(old.seen.shape[1])

    def move(was, x):
        both = jnp.concatenate([was, x], 1)
        return jnp.take_along_axis(both, window.reshape(*window.shape, *[1] * (x.ndim - 2)), 1)

    def on_path(x):
        return jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), 1)

    q, lse = new
    return Queries(move(old.q, on_path(q)), move(old.lse, on_path(lse)), move(old.seen, seen))


def newest(queries: Queries, count: int) -> Queries:
    """Returns the last `count` of the window."""
    first = queries.seen.shape[1] - count
    return Queries(queries.q[:, first:], queries.lse[:, first:], queries.seen[:, first:])
