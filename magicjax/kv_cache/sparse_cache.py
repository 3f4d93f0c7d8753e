"""The sparse draft cache: pinned entries and a ring, for each layer, row and KV head.

Like the full cache it has a fixed shape and is written in place, at indices that depend on the
round's verification result.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from magicjax.kv_cache.full_cache import KVCache, LayerSlots, Slots, elements, select, set_slots
from magicjax.kv_cache.state_layers import LayerState
from magicjax.model import CAPACITY_MULTIPLE
from pallas_kernels import Quantized, quantize
from sharding import KV_HEADS, LAYER_BATCH, Split, logical_axes

Pins = tuple[Any, ...]  # int32 [B, K, P] of each layer, or None


@struct.dataclass
class DraftCache:
    """A sparse view of the committed tokens: C = P + R slots for each layer, row and head.

    A row of count <= C holds every token in order. Beyond that, slots 0..P-1 hold the pinned
    positions, and ring slot P + (p - P) mod R holds position p, for the newest R positions. A row
    in order has position p >= P in the same slot, so growing past C needs no special case. P may
    differ by layer. R does not, but in layers with a sliding window, which have P = 0.

    Attributes:
      k, v: one array [B, K, C, D] per layer, or `Quantized`; None for a layer with a state.
      pinned: int32 [B, K, P] per layer, the position in each pinned slot; None likewise.
      count: int32 [B], the number of committed tokens; min(count, C) slots are live.
      windows: static; of each layer, None: it sees the whole text.
      bits: static; of an entry's elements, 8 or 4; None: the model's dtype.
      split: static; the model's division over devices.
      states: those of the full cache, which a draft continues; empty between rounds.
      sources: static; as those of the full cache.
    """

    k: LayerSlots = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    v: LayerSlots = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    pinned: Pins = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    count: Int[Array, "B"]
    windows: tuple[int | None, ...] = struct.field(pytree_node=False)
    bits: int | None = struct.field(pytree_node=False, default=None)
    split: Split = struct.field(pytree_node=False, default=Split())
    states: tuple[LayerState | None, ...] = ()
    sources: tuple[int | None, ...] = struct.field(pytree_node=False, default=())

    def of_layers(self, layers: Sequence[int]) -> "DraftCache":
        """Returns the cache with these layers only, whose arrays it shares."""
        k, v = select(self.k, layers), select(self.v, layers)
        pinned, windows = select(self.pinned, layers), select(self.windows, layers)
        states = select(self.states, layers) if self.states else ()
        fields = dict(k=k, v=v, pinned=pinned, windows=windows, states=states, sources=())
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    @property
    def committed(self) -> Int[Array, "B"]:
        """The number of committed tokens of each row."""
        return self.count

    def capacity(self, layer: int) -> int:
        """Returns C."""
        return self.k[layer].shape[2]

    def live(self, layer: int) -> Int[Array, "B"]:
        """Returns the number of live slots of each row; with a window or a state, of tokens."""
        if self.windows[layer] is not None or self.k[layer] is None:
            return self.count
        return jnp.minimum(self.count, self.capacity(layer))

    def with_length(self, length: int) -> "DraftCache":
        """Returns the cache with `length` tokens in every row."""
        return dataclasses.replace(self, count=jnp.full_like(self.count, length))


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
    cache: KVCache,
    pinned: Pins,
    rings: Sequence[int],
    bits: int | None = None,
    dtype: Any = None,
) -> DraftCache:
    """Returns the draft cache of a full cache: pinned and newest entries, or all if they fit.

    Args:
      cache: all entries, after prefill.
      pinned: the policy's choice per layer, read only in rows longer than C, where positions must
        be distinct and below count - R.
      rings: R of each layer, the slots of the ring.
      bits: 8 or 4 to quantize the entries; None: not quantized.
      dtype: dtype of entries that are quantized in the full cache only; the model's.
    """
    layers = zip(cache.k, cache.v, pinned, rings, strict=True)
    gathered = [
        layer[:3] if layer[0] is None else _gather(*layer, bits, dtype, cache.lengths)
        for layer in layers
    ]
    k, v, pins = zip(*gathered, strict=True)
    options: Any = dict(bits=bits, split=cache.split, sources=cache.sources)
    return DraftCache(k, v, pins, cache.lengths, cache.windows, **options)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))  # traced once for all layers
def _gather(k, v, chosen, ring: int, bits: int | None, dtype, lengths) -> tuple[Any, Any, Array]:
    """Returns keys, values and pins of a layer of the draft cache."""
    count, ring_slots, num_pinned = lengths[:, None], jnp.arange(ring), chosen.shape[-1]
    # The newest position p < count with (p - P) mod R = slot; for count <= C it is P + slot.
    newest = count - 1 - (count - 1 - num_pinned - ring_slots) % ring
    newest = jnp.where(count <= num_pinned + ring, num_pinned + ring_slots, newest)
    chosen = _pins_or_in_order(chosen, lengths, ring)
    ring_index = jnp.broadcast_to(newest[:, None], (*chosen.shape[:2], ring))
    index = jnp.concatenate([chosen, ring_index], -1)
    return _take(k, index, bits, dtype), _take(v, index, bits, dtype), chosen


def repin(cache: DraftCache, full: KVCache, pinned: Pins) -> DraftCache:
    """Returns the draft cache with other pins, read from the full cache, and the same rings.

    Args:
      cache: the draft cache.
      full: all entries; has committed as many tokens as `cache`.
      pinned: the policy's new choice per layer, with the conditions of `gather`.
    """
    layers = zip(cache.k, cache.v, full.k, full.v, pinned, strict=True)
    repinned = [
        (None,) * 3 if layer[0] is None else _repin(*layer, cache.bits, cache.count)
        for layer in layers
    ]
    k, v, pins = zip(*repinned, strict=True)
    return dataclasses.replace(cache, k=k, v=v, pinned=pins)


@functools.partial(jax.jit, static_argnums=5)  # traced once for all layers
def _repin(k, v, full_k, full_v, chosen, bits: int | None, count) -> tuple[Any, Any, Array]:
    """Returns keys, values and pins of a layer with other pins."""
    num_pinned = chosen.shape[-1]
    chosen = _pins_or_in_order(chosen, count, k.shape[2] - num_pinned)

    def write(old, full):
        entries = _take(full, chosen, bits, None if bits else old.dtype)
        return jax.tree.map(lambda x, new: x.at[:, :, :num_pinned].set(new), old, entries)

    return write(k, full_k), write(v, full_v), chosen


def _pins_or_in_order(chosen: Int[Array, "B K P"], count: Int[Array, "B"], ring: int):
    """Returns the pins of long rows, and 0, 1, … P-1 for rows that fit the cache."""
    in_order = jnp.arange(chosen.shape[-1], dtype=jnp.int32)
    fits = count[:, None, None] <= chosen.shape[-1] + ring
    return jnp.where(fits, in_order, chosen).astype(jnp.int32)


def _take(
    slots: Slots, index: Int[Array, "B K C"], bits: int | None, dtype: Any
) -> Array | Quantized:
    """Returns the entries [B, K, C, D] at positions `index`, of a ring those mod S."""
    index = index % slots.shape[2]

    def take(x):
        return jnp.take_along_axis(x, index[..., None] if x.ndim == 4 else index, axis=2)

    entries = elements(jax.tree.map(take, slots), dtype or jnp.float32)
    return entries if bits is None else quantize(entries, bits)


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
    layers = zip(cache.k, cache.v, kv, cache.pinned, strict=True)
    updated = [
        (k, v)
        if pins is None
        else _append(k, v, *new, pins.shape[-1], cache.bits, path, cache.count, count)
        for k, v, new, pins in layers
    ]
    k, v = zip(*updated, strict=True)
    return dataclasses.replace(cache, k=k, v=v, count=cache.count + count)


@functools.partial(jax.jit, static_argnums=(4, 5))  # traced once for all layers
def _append(k, v, new_k, new_v, num_pinned: int, bits, path, before, count) -> tuple[Any, Any]:
    """Returns keys and values of a layer with the nodes of the path."""
    steps, capacity = jnp.arange(path.shape[1]), k.shape[2]
    slots = slot_of(before[:, None] + steps, num_pinned, capacity)
    slots = jnp.where(steps < count[:, None], slots, capacity)  # out of bounds: dropped

    def write(old, nodes):
        entries: Any = jnp.take_along_axis(nodes, path[:, :, None, None], axis=1)  # [B,A,K,D]
        if bits is not None:
            entries = quantize(entries, bits)
        entries = jax.tree.map(lambda x: x.swapaxes(1, 2), entries)
        return set_slots(old, slots, entries, mode="drop")

    return write(k, new_k), write(v, new_v)
