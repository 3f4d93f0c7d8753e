"""Key/value caches of fixed shape: the target's, which holds everything, and the sparse draft's.

Both are written in place inside the compiled loop. What makes that legal for XLA is that every
write happens at an index that depends on the round's verdict, and so on every read of the round.
"""

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
    """

    k: Layers
    v: Layers
    lengths: Int[Array, "B"]


@struct.dataclass
class DraftCache:
    """A sparse view of the committed tokens: C = P + R slots for each layer, row and head.

    A row of count <= C holds every token in order. Beyond that, slots 0..P-1 hold the pinned
    positions and position p lives in ring slot P + (p - P) mod R for the newest R positions. In
    order, position p >= P lies in that very slot, so growing past C needs no special case.

    Attributes:
      k, v: one array [B, K, C, D] for each layer.
      pinned: which position each pinned slot holds, int32 [B, K, P] for each layer.
      count: int32 [B], how many tokens the row has committed; min(count, C) slots are live.
    """

    k: Layers
    v: Layers
    pinned: tuple[Int[Array, "B K P"], ...]
    count: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2]

    @property
    def lengths(self) -> Int[Array, "B"]:
        """Returns how many slots of each row are live."""
        return jnp.minimum(self.count, self.capacity)


def empty(layers: int, batch: int, heads: int, slots: int, head_dim: int, dtype) -> KVCache:
    """Returns a cache of zeros; zeros, because a dead slot must be finite."""
    shape = (batch, heads, slots, head_dim)
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(layers)) for _ in "kv")
    return KVCache(k, v, jnp.zeros(batch, jnp.int32))


def num_bytes(cache: KVCache | DraftCache) -> int:
    """Returns the bytes of keys and values (shapes suffice: abstract arrays are fine)."""
    return sum(x.size * x.dtype.itemsize for x in (*cache.k, *cache.v))


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
    return KVCache(k, v, cache.lengths + kept)


def slot_of(position: Int[Array, "*B"], pinned: int, capacity: int) -> Int[Array, "*B"]:
    """Returns the slot of a position that is among the newest R, or of any while all fit.

    P = 2, C = 5: positions 0 1 2 3 4 5 6 7 8 live in slots 0 1 2 3 4 2 3 4 2.
    """
    ring = capacity - pinned
    return jnp.where(position < pinned, position, pinned + (position - pinned) % ring)


def gather(cache: KVCache, pinned: tuple[Int[Array, "B K P"], ...], capacity: int) -> DraftCache:
    """Returns the draft cache of what `cache` holds: the pins and the newest R, or all that fits.

    Args:
      cache: the target's entries after prefill.
      pinned: the policy's choice for each layer; read only in rows longer than C, where it must
        name distinct positions below count - R.
      capacity: C.
    """
    num_pinned = pinned[0].shape[-1]
    ring = capacity - num_pinned
    count = cache.lengths[:, None]
    slots = jnp.arange(ring)
    # The newest position p < count with (p - P) mod R = slot; for count <= C it is P + slot.
    newest = count - 1 - (count - 1 - num_pinned - slots) % ring
    newest = jnp.where(count <= capacity, num_pinned + slots, newest)
    ks, vs, pins = [], [], []
    for k, v, chosen in zip(cache.k, cache.v, pinned):
        in_order = jnp.broadcast_to(jnp.arange(num_pinned), chosen.shape)
        chosen = jnp.where(count[..., None] <= capacity, in_order, chosen)
        tail = jnp.broadcast_to(newest[:, None], (*chosen.shape[:2], ring))
        index = jnp.minimum(jnp.concatenate([chosen, tail], -1), k.shape[2] - 1)[..., None]
        ks.append(jnp.take_along_axis(k, index, axis=2))
        vs.append(jnp.take_along_axis(v, index, axis=2))
        pins.append(chosen.astype(jnp.int32))
    return DraftCache(tuple(ks), tuple(vs), tuple(pins), cache.lengths)


def append_ring(
    cache: DraftCache, new: tuple, path: Int[Array, "B A"], kept: Int[Array, "B"]
) -> DraftCache:
    """Returns the draft cache with the first `kept` nodes of each path at their slots.

    Nothing else is written: a slot that a rejected node would take still holds a live entry.
    A must not exceed R, or a round would overwrite its own entries.
    """
    num_pinned, capacity = cache.pinned[0].shape[-1], cache.capacity
    steps = jnp.arange(path.shape[1])
    slots = slot_of(cache.count[:, None] + steps, num_pinned, capacity)
    slots = jnp.where(steps < kept[:, None], slots, capacity)  # beyond the end: dropped
    rows = jnp.arange(path.shape[0])[:, None]

    def write(old, nodes):
        entries = jnp.take_along_axis(nodes, path[:, :, None, None], axis=1)  # [B,A,K,D]
        return old.at[rows, :, slots].set(entries, mode="drop", unique_indices=False)

    k = tuple(write(old, n) for old, (n, _) in zip(cache.k, new))
    v = tuple(write(old, n) for old, (_, n) in zip(cache.v, new))
    return DraftCache(k, v, cache.pinned, cache.count + kept)
