"""The sparse draft cache: pinned entries and a ring, for each layer, row and KV head.

Like the full cache it has a fixed shape and is written in place, at indices that depend on the
round's verification result.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import CAPACITY_MULTIPLE
from pallas_kernels import Quantized, quantize
from sharding import KV_HEADS, LAYER_BATCH, Split, logical_axes

Pins = tuple[Int[Array, "B K P"], ...]


@struct.dataclass
class DraftCache:
    """A sparse view of the committed tokens: C = P + R slots for each layer, row and head.

    A row of count <= C holds every token in order. Beyond that, slots 0..P-1 hold the pinned
    positions, and ring slot P + (p - P) mod R holds position p, for the newest R positions. A row
    in order has position p >= P in the same slot, so growing past C needs no special case. P may
    differ by layer. R does not, but in layers with a sliding window, which have P = 0.

    Attributes:
      k, v: one array [B, K, C, D] per layer, or `Quantized`.
      pinned: int32 [B, K, P] per layer, the position in each pinned slot.
      count: int32 [B], the number of committed tokens; min(count, C) slots are live.
      windows: static; of each layer, None: it sees the whole text.
      bits: static; of an entry's elements, 8 or 4; None: the model's dtype.
      split: static; the model's division over devices.
    """

    k: tuple[Array | Quantized, ...] = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    v: tuple[Array | Quantized, ...] = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    pinned: Pins = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    count: Int[Array, "B"]
    windows: tuple[int | None, ...] = struct.field(pytree_node=False)
    bits: int | None = struct.field(pytree_node=False, default=None)
    split: Split = struct.field(pytree_node=False, default=Split())

    def capacity(self, layer: int) -> int:
        """Returns C."""
        return self.k[layer].shape[2]

    def live(self, layer: int) -> Int[Array, "B"]:
        """Returns the number of live slots of each row; with a window, of committed tokens."""
        if self.windows[layer] is not None:
            return self.count
        return jnp.minimum(self.count, self.capacity(layer))


def slot_of(position: Int[Array, "*B"], pinned: int, capacity: int) -> Int[Array, "*B"]:
    """Returns the slot of one of the newest R positions, or of any position of a row in order.

    P = 2, C = 5: slots 0 1 2 3 4 2 3 4 2 hold positions 0 1 2 3 4 5 6 7 8.
    """
    ring = capacity - pinned
    return jnp.where(position < pinned, position, pinned + (position - pinned) % ring)


def window_slots(window: int, budget: int) -> int:
    """Returns the slots of a layer with a sliding window in a draft cache.

    They hold the whole window if the budget does. Kernels read 64 adjacent slots of a ring at once.
    """
    return -(-min(window, budget) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def gather(
    cache: KVCache, pinned: Pins, rings: Sequence[int], bits: int | None = None
) -> DraftCache:
    """Returns the draft cache of a full cache: pinned and newest entries, or all if they fit.

    Args:
      cache: all entries, after prefill.
      pinned: the policy's choice per layer, read only in rows longer than C, where positions must
        be distinct and below count - R.
      rings: R of each layer, the slots of the ring.
      bits: 8 or 4 to quantize the entries; None: not quantized.
    """
    count = cache.lengths[:, None]
    ks, vs, pins = [], [], []
    for k, v, chosen, ring in zip(cache.k, cache.v, pinned, rings, strict=True):
        slots, num_pinned = jnp.arange(ring), chosen.shape[-1]
        # The newest position p < count with (p - P) mod R = slot; for count <= C it is P + slot.
        newest = count - 1 - (count - 1 - num_pinned - slots) % ring
        newest = jnp.where(count <= num_pinned + ring, num_pinned + slots, newest)
        chosen = _in_order_while_all_fits(chosen, cache.lengths, ring)
        tail = jnp.broadcast_to(newest[:, None], (*chosen.shape[:2], ring))
        index = jnp.concatenate([chosen, tail], -1)
        ks.append(_take(k, index, bits))
        vs.append(_take(v, index, bits))
        pins.append(chosen)
    static = cache.windows, bits, cache.split
    return DraftCache(tuple(ks), tuple(vs), tuple(pins), cache.lengths, *static)


def repin(cache: DraftCache, full: KVCache, pinned: Pins) -> DraftCache:
    """Returns the draft cache with other pins, read from the full cache, and the same rings.

    Args:
      cache: the draft cache.
      full: all entries; has committed as many tokens as `cache`.
      pinned: as for `gather`.
    """
    ks, vs, pins = [], [], []
    for layer, chosen in enumerate(pinned):
        count = chosen.shape[-1]
        chosen = _in_order_while_all_fits(chosen, cache.count, cache.capacity(layer) - count)

        def write(old, entries, count=count):
            return jax.tree.map(lambda x, new: x.at[:, :, :count].set(new), old, entries)

        ks.append(write(cache.k[layer], _take(full.k[layer], chosen, cache.bits)))
        vs.append(write(cache.v[layer], _take(full.v[layer], chosen, cache.bits)))
        pins.append(chosen)
    return dataclasses.replace(cache, k=tuple(ks), v=tuple(vs), pinned=tuple(pins))


def _in_order_while_all_fits(chosen: Int[Array, "B K P"], count: Int[Array, "B"], ring: int):
    """Returns the pins of long rows, and 0, 1, … P-1 for rows that fit the cache."""
    in_order = jnp.arange(chosen.shape[-1], dtype=jnp.int32)
    fits = count[:, None, None] <= chosen.shape[-1] + ring
    return jnp.where(fits, in_order, chosen).astype(jnp.int32)


def _take(entries: Array, index: Int[Array, "B K C"], bits: int | None) -> Array | Quantized:
    """Returns the entries [B, K, C, D] at positions `index`, of a ring those mod S."""
    index = (index % entries.shape[2])[..., None]
    taken = jnp.take_along_axis(entries, index, axis=2)
    return taken if bits is None else quantize(taken, bits)


def append_ring(
    cache: DraftCache, kv: tuple, path: Int[Array, "B A"], count: Int[Array, "B"]
) -> DraftCache:
    """Returns the draft cache with the first `count` nodes of each path in their slots.

    Nothing else is written, because the slot of a rejected node still holds a live entry. A must
    not exceed R, or a round would overwrite its own entries.

    Args:
      cache: before the round.
      kv: per layer the pair k, v [B, N, K, D] of the nodes.
      path: node ids.
      count: int32 [B], the number of nodes to append, 0..A.
    """
    steps = jnp.arange(path.shape[1])
    rows = jnp.arange(path.shape[0])[:, None]
    position = cache.count[:, None] + steps

    def write(layer, old, nodes):
        num_pinned, capacity = cache.pinned[layer].shape[-1], cache.capacity(layer)
        slots = slot_of(position, num_pinned, capacity)
        slots = jnp.where(steps < count[:, None], slots, capacity)  # out of bounds: dropped
        entries: Any = jnp.take_along_axis(nodes, path[:, :, None, None], axis=1)  # [B,A,K,D]
        if cache.bits is not None:
            entries = quantize(entries, cache.bits)
        return jax.tree.map(
            lambda x, values: x.at[rows, :, slots].set(values, mode="drop"),
            old,
            entries,
        )

    pairs = enumerate(zip(cache.k, cache.v, kv, strict=True))
    written = [(write(i, k, a), write(i, v, b)) for i, (k, v, (a, b)) in pairs]
    k, v = zip(*written, strict=True)
    return dataclasses.replace(cache, k=k, v=v, count=cache.count + count)
