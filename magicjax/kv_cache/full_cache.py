"""The key/value cache of fixed shape that holds everything committed.

It is written in place inside the compiled loop. What makes that legal for XLA is that every
write happens at an index that depends on the round's verdict, and so on every read of the round.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

Layers = tuple[Float[Array, "B K S D"], ...]


@struct.dataclass
class KVCache:
    """All committed keys and values.

    Attributes:
      k, v: one array [B, K, S, D] for each layer.
      lengths: int32 [B]; a row's live entries are its first `lengths` slots. What lies beyond is
        finite rubbish that the next commits overwrite.
      stages: static; how many pipeline stages have layers of their own in it. Outside of a program
        for a mesh the rows of k and v are then those of all stages
        (`magicjax.parallel.pipeline_stages`).
    """

    k: Layers
    v: Layers
    lengths: Int[Array, "B"]
    stages: int = struct.field(pytree_node=False, default=1)

    of_layers = ("k", "v")

    def live(self, layer: int) -> Int[Array, "B"]:
        """Returns how many slots of each row are live."""
        del layer  # all alike
        return self.lengths


def empty(
    layers: int, batch: int, heads: int, slots: int, head_dim: int, dtype, stages: int = 1
) -> KVCache:
    """Returns a cache of zeros; zeros, because a dead slot must be finite."""
    shape = (batch, heads, slots, head_dim)
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in "kv")
    return KVCache(k, v, jnp.zeros(batch, jnp.int32), stages)


def zero_after(witness: Int[Array, ""]) -> Int[Array, ""]:
    """Returns 0, in a way that makes it depend on `witness`, an index or token (never negative).

    Added to the place of a write, it keeps XLA from moving that write before the reads that led
    to `witness`: such a write would need a copy of the whole cache to be legal.
    """
    return jnp.minimum(witness, 0)


def take_path(new: Float[Array, "B N K D"], path: Int[Array, "B A"]) -> Float[Array, "B K A D"]:
    """Returns the entries of the nodes on each row's path, laid out as in a cache."""
    return jnp.take_along_axis(new, path[:, :, None, None], axis=1).swapaxes(1, 2)


@jax.vmap
def _write(slots: Float[Array, "K S D"], entries: Float[Array, "K A D"], start: Int[Array, ""]):
    return jax.lax.dynamic_update_slice_in_dim(slots, entries, start, axis=1)


def append(cache: KVCache, new: tuple, path: Int[Array, "B A"], kept: Int[Array, "B"]) -> KVCache:
    """Returns the cache with the first `kept` nodes of each row's path behind its live entries.

    All A entries of the path are written, for a static shape; those beyond `kept` land in dead
    slots. The caller guarantees S >= lengths + A: an update beyond the end would be moved back
    over live entries.

    Args:
      cache: the committed entries.
      new: for each layer the pair k, v [B, N, K, D] of the nodes.
      path: node ids.
      kept: how many to keep, int32 [B], 0..A; it must depend on all that was read from `cache`
        this round (`zero_after`).
    """
    start = cache.lengths + zero_after(kept)
    k = tuple(_write(old, take_path(n, path), start) for old, (n, _) in zip(cache.k, new))
    v = tuple(_write(old, take_path(n, path), start) for old, (_, n) in zip(cache.v, new))
    return dataclasses.replace(cache, k=k, v=v, lengths=cache.lengths + kept)
