"""The target's KV cache: fixed shape, all committed keys and values.

The compiled loop writes it in place. XLA can do so because the index of every write depends on the
round's verification result, and therefore on all reads of the round.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax.model import Model
from sharding import KV_HEADS, LAYER_BATCH, Split, logical_axes

CAPACITY_MULTIPLE = 64  # slots; contexts of nearly the same length share a program

Layers = tuple[Float[Array, "B K S D"], ...]


@struct.dataclass
class KVCache:
    """All committed keys and values.

    Attributes:
      k, v: one array [B, K, S, D] per layer.
      lengths: int32 [B]; the first `lengths` slots of a row are live. The others hold finite
        garbage that later commits overwrite.
      split: static; the model's division over devices.
    """

    k: Layers = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    v: Layers = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    lengths: Int[Array, "B"]
    split: Split = struct.field(pytree_node=False, default=Split())

    def live(self, layer: int) -> Int[Array, "B"]:
        """Returns the number of live slots of each row."""
        del layer  # equal in all layers
        return self.lengths


def empty(model: Model, batch: int, slots: int) -> KVCache:
    """Returns a cache of zeros. Dead slots must be finite."""
    layers = model.config.num_layers
    shape = (batch, model.local_kv_heads, slots, model.config.kv_head_dim)
    k, v = (tuple(jnp.zeros(shape, model.dtype) for _ in range(layers)) for _ in "kv")
    return KVCache(k, v, jnp.zeros(batch, jnp.int32), model.split)


def zero_after(witness: Int[Array, ""]) -> Int[Array, ""]:
    """Returns 0 with a data dependence on `witness`, a non-negative index or token.

    Added to the index of a write, it keeps XLA from moving the write before the reads that led to
    `witness`. An earlier write would require a copy of the whole cache.
    """
    return jnp.minimum(witness, 0)


def take_path(nodes: Float[Array, "B N K D"], path: Int[Array, "B A"]) -> Float[Array, "B K A D"]:
    """Returns the entries of the nodes on each row's path, in the cache's axis order."""
    return jnp.take_along_axis(nodes, path[:, :, None, None], axis=1).swapaxes(1, 2)


@jax.vmap
def _write(slots: Float[Array, "K S D"], entries: Float[Array, "K A D"], start: Int[Array, ""]):
    return jax.lax.dynamic_update_slice_in_dim(slots, entries, start, axis=1)


def append(cache: KVCache, kv: tuple, path: Int[Array, "B A"], count: Int[Array, "B"]) -> KVCache:
    """Returns the cache with the first `count` nodes of each row's path after its live entries.

    All A entries of the path are written, so that shapes are static; those from `count` on land in
    dead slots. Requires S >= lengths + A: JAX would shift an update beyond the end onto live
    entries.

    Args:
      cache: the committed entries.
      kv: per layer the pair k, v [B, N, K, D] of the nodes.
      path: node ids.
      count: int32 [B], 0..A; must depend on all reads of `cache` in this round (`zero_after`).
    """
    start = cache.lengths + zero_after(count)
    k = tuple(_write(slots, take_path(x, path), start) for slots, (x, _) in zip(cache.k, kv))
    v = tuple(_write(slots, take_path(x, path), start) for slots, (_, x) in zip(cache.v, kv))
    return dataclasses.replace(cache, k=k, v=v, lengths=cache.lengths + count)
