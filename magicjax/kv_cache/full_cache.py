"""A model's KV cache: fixed shape, all committed keys and values that later tokens can see.

A layer with a sliding window has a ring, in which position p is in slot p mod S; another layer with
attention has a slot for each position. A layer without attention has a state (`state_layers`).

The compiled loop writes it in place. XLA can do so because the index of every write depends on the
round's verification result, and therefore on all reads of the round.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Num

from magicjax.kv_cache import state_layers
from magicjax.kv_cache.state_layers import LayerState
from magicjax.model import Model, layer_slots
from pallas_kernels import Quantized, dequantize, quantize
from sharding import KV_HEADS, LAYER_BATCH, Split, logical_axes

Slots = Float[Array, "R K S D"] | Quantized  # of a layer
LayerSlots = tuple[Any, ...]  # the slots of each layer, or None


@struct.dataclass
class KVCache:
    """All committed keys and values that later tokens can see.

    Attributes:
      k, v: one array [R, K, S, D] per layer of `Model.has_kv`, None for others. R is B, or more
        in a part of an engine's batch, whose rows are the first B, read and written in place.
        With `Model.kv_bits` they are `Quantized`, with scales that are powers of two (`as_stored`).
      lengths: int32 [B], the committed tokens. Slots without one hold finite garbage that later
        commits overwrite.
      windows: static; of each layer, None: it sees the whole text. A layer with a window is a ring.
      split: static; the model's division over devices.
      states: the state of each layer without attention, None for others; empty if there is none.
      sources: static; `Model.kv_sources`; empty in what `of_layers` returns.
    """

    k: LayerSlots = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    v: LayerSlots = struct.field(metadata=logical_axes(LAYER_BATCH, KV_HEADS))
    lengths: Int[Array, "B"]
    windows: tuple[int | None, ...] = struct.field(pytree_node=False)
    split: Split = struct.field(pytree_node=False, default=Split())
    states: tuple[LayerState | None, ...] = ()
    sources: tuple[int | None, ...] = struct.field(pytree_node=False, default=())

    def of_layers(self, layers: Sequence[int]) -> Self:
        """Returns the cache with these layers only, whose arrays it shares; all have slots."""
        k, v = select(self.k, layers), select(self.v, layers)
        states = select(self.states, layers) if self.states else ()
        windows = select(self.windows, layers)
        return dataclasses.replace(self, k=k, v=v, windows=windows, states=states, sources=())

    @property
    def committed(self) -> Int[Array, "B"]:
        """The number of committed tokens of each row."""
        return self.lengths

    @property
    def slots(self) -> Any:
        """The keys of any layer with attention, quantized as those of all; None without one."""
        return next((k for k in self.k if k is not None), None)

    def live(self, layer: int) -> Int[Array, "B"]:
        """Returns the number of committed tokens of each row."""
        del layer  # equal in all layers
        return self.lengths

    def with_length(self, length: int) -> Self:
        """Returns the cache with `length` tokens in every row."""
        return dataclasses.replace(self, lengths=jnp.full_like(self.lengths, length))


def select[T](values: tuple[T, ...], layers: Sequence[int]) -> tuple[T, ...]:
    """Returns the values of some layers, given one for each layer."""
    return tuple(values[layer] for layer in layers)


def empty(model: Model, batch: int, slots: int) -> KVCache:
    """Returns a cache of zeros. Dead slots must be finite."""
    windows = model.windows

    def shape_of(layer):
        heads, size = model.local_kv_heads(layer), model.layer_config(layer).kv_head_dim
        return batch, heads, layer_slots(windows[layer], slots), size

    shapes = [shape_of(i) if has_kv else None for i, has_kv in enumerate(model.has_kv)]
    k, v = (tuple(_zeros(shape, model) for shape in shapes) for _ in "kv")
    states: tuple = ()
    if any(model.recurrent):
        delta_net: Any = model.config.delta_net
        empty_state = state_layers.empty(delta_net.part(model.split.shards), batch, model.dtype)
        states = tuple(
            jax.tree.map(jnp.copy, empty_state) if each else None for each in model.recurrent
        )
    lengths = jnp.zeros(batch, jnp.int32)
    return KVCache(k, v, lengths, windows, model.split, states, model.kv_sources)


def _zeros(shape: tuple[int, ...] | None, model: Model) -> Slots | None:
    if shape is None:
        return None
    if model.kv_bits is None:
        return jnp.zeros(shape, model.dtype)
    return Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32), model.kv_bits)


def as_stored(entries: Any, slots: Slots | None) -> Any:
    """Returns a pytree of keys and values in the format of a layer's slots.

    Those of one shape are quantized together, because a step of a small model has hundreds of short
    operations.
    """
    if not isinstance(slots, Quantized):
        return entries
    arrays, tree = jax.tree.flatten(entries)
    parts: list[Any] = [None] * len(arrays)
    for shape in dict.fromkeys(x.shape for x in arrays):
        alike = [i for i, x in enumerate(arrays) if x.shape == shape]
        stacked = jnp.stack([arrays[i] for i in alike])
        stored = quantize(stacked, slots.bits, power_of_two=True)
        for at, i in enumerate(alike):
            parts[i] = jax.tree.map(lambda x, at=at: x[at], stored)
    return jax.tree.unflatten(tree, parts)


def rounded(k: Array, v: Array, slots: Slots) -> tuple[Array, Array]:
    """Returns keys and values with the values that they have in a layer's slots.

    A pass attends to its own tokens with these values, as later passes do once they are stored.
    """
    k_stored, v_stored = as_stored((k, v), slots)
    return elements(k_stored, k.dtype), elements(v_stored, v.dtype)


def elements(slots: Slots, dtype: Any) -> Float[Array, "R K S D"]:
    """Returns the slots as an array; of a quantized layer, in `dtype`, which is exact."""
    return dequantize(slots, dtype) if isinstance(slots, Quantized) else slots


def zero_after(dependency: Int[Array, ""]) -> Int[Array, ""]:
    """Returns 0 with a data dependence on `dependency`, a non-negative index or token.

    Added to the index of a write, it keeps XLA from moving the write before the reads that led to
    `dependency`. An earlier write would require a copy of the whole cache.
    """
    return jnp.minimum(dependency, 0)


def take_path(nodes: Slots, path: Int[Array, "B A"]) -> Slots:
    """Returns the entries [B, K, A, D] of the nodes [B, N, K, D] on each row's path."""

    def take(x):
        index = path.reshape(*path.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1).swapaxes(1, 2)

    return jax.tree.map(take, nodes)


def _write(slots: Slots, entries: Slots, start: Int[Array, "B"]) -> Slots:
    """Returns the slots with the entries of the first B rows from `start` on."""
    index = start[:, None] + jnp.arange(entries.shape[2])
    options: Any = dict(mode="drop", indices_are_sorted=True, unique_indices=True)
    return set_slots(slots, index, entries, **options)


def set_slots(slots: Slots, index: Int[Array, "B A"], entries: Slots, **options: Any) -> Slots:
    """Returns the slots with the entries of the first B rows at `index`.

    On a TPU each head has an index. Otherwise the compiler chooses a layout in which the heads of a
    slot are adjacent, and copies the caches in every pass, because the attention kernel reads them
    in the usual one.
    """
    set_on_tpu = functools.partial(set_heads, **options)
    set_elsewhere = functools.partial(set_rows, **options)

    def put(x, new):
        return jax.lax.platform_dependent(x, index, new, tpu=set_on_tpu, default=set_elsewhere)

    return jax.tree.map(put, slots, entries)


def set_rows(
    x: Num[Array, "R K S *D"], index: Int[Array, "B A"], new: Num[Array, "B K A *D"], **options: Any
) -> Num[Array, "R K S *D"]:
    """Returns an array of slots with new entries of the first B rows; an index has all heads.

    Args:
      x: the slots.
      index: the slot of each entry.
      new: the entries.
      **options: of `jax.numpy.ndarray.at[].set`.
    """
    rows = jnp.arange(len(new))[:, None]
    return x.at[rows, :, index].set(new.swapaxes(1, 2), **options)


def set_heads(
    x: Num[Array, "R K S *D"], index: Int[Array, "B A"], new: Num[Array, "B K A *D"], **options: Any
) -> Num[Array, "R K S *D"]:
    """Returns the result of `set_rows`, with an index for each head."""
    rows, heads = jnp.arange(len(new))[:, None, None], jnp.arange(x.shape[1])[:, None]
    return x.at[rows, heads, index[:, None]].set(new, **options)


def write_ring(
    slots: Slots, entries: Slots, start: Int[Array, "B"], count: Int[Array, "B"]
) -> Slots:
    """Returns a ring with the first `count` entries of each row at positions from `start` on.

    Nothing else is written, because the slot of a rejected node holds an entry that is seen. Of
    more than S entries, the last S are written.
    """
    steps, size = jnp.arange(entries.shape[2]), slots.shape[2]
    live = (steps < count[:, None]) & (steps >= count[:, None] - size)
    index = jnp.where(live, (start[:, None] + steps) % size, size)  # out of bounds: dropped
    return set_slots(slots, index, entries, mode="drop")


def append(cache: KVCache, kv: tuple, path: Int[Array, "B A"], count: Int[Array, "B"]) -> KVCache:
    """Returns the cache with the first `count` nodes of each row's path after its live entries.

    In a layer without a window, all A entries of the path are written at once; those from `count`
    on land in dead slots.

    Args:
      cache: the committed entries.
      kv: per layer the pair k, v [B, N, K, D] of the nodes, or the `StateNodes`.
      path: node ids.
      count: int32 [B], 0..A; must depend on all reads of `cache` in this round (`zero_after`).

    Raises:
      TypeError: the cache is a view, such as a `PagedCache`.
    """
    start = cache.lengths + zero_after(count)
    stored = iter(as_stored([pair for pair in kv if isinstance(pair, tuple)], cache.slots))
    kv = tuple(next(stored) if isinstance(nodes, tuple) else nodes for nodes in kv)

    def write(k, v, new, window):
        return _append(k, v, *new, path, start, count, bool(window))

    def advance(state, new):
        return _commit(state, new, path, count)

    return _updated(cache, kv, write, advance, cache.lengths + count)


_commit = jax.jit(state_layers.commit)  # traced once for all layers


def write_chunk(
    cache: KVCache, kv: tuple, start: Int[Array, ""], count: Int[Array, "B"]
) -> KVCache:
    """Returns the cache with the keys, values and states of a chunk of prompts; same lengths.

    Args:
      cache: the tokens before.
      kv: as for `append`, of the chunk's tokens; of a layer with a state, the state after them.
      start: the position of the first token; must depend on all reads of `cache` (`zero_after`).
      count: int32 [B], the tokens of each row; the others are padding.
    """

    def write(k, v, new, window):
        return _write_chunk(k, v, *new, start, count, bool(window))

    return _updated(cache, kv, write, lambda state, new: new, cache.lengths)


def _updated(cache: KVCache, kv: tuple, write: Any, advance: Any, lengths: Array) -> KVCache:
    """Returns the cache after `write` of each layer with attention and `advance` of the others."""
    _check_writable(cache)
    layers = zip(cache.k, cache.v, kv, cache.windows, strict=True)
    updated = [(k, v) if k is None else write(k, v, new, w) for k, v, new, w in layers]
    k, v = zip(*updated, strict=True)
    states = tuple(
        state if state is None else advance(state, new)
        for state, new in zip(cache.states, kv[: len(cache.states)], strict=True)
    )
    return dataclasses.replace(cache, k=k, v=v, states=states, lengths=lengths)


def _check_writable(cache: KVCache) -> None:
    """Raises TypeError for a view of a cache, whose other arrays would not follow its keys."""
    if type(cache) is not KVCache:
        raise TypeError(f"a {type(cache).__name__} is only read: pass the KVCache that it views")


@functools.partial(jax.jit, static_argnames="is_ring")  # traced once for all layers
def _write_chunk(k, v, new_k, new_v, slot, count, is_ring: bool) -> tuple[Array, Array]:
    """Returns keys and values of a layer with those of a chunk."""

    def write(slots, entries):
        entries = jax.tree.map(lambda x: x.swapaxes(1, 2), entries)
        if is_ring:
            return write_ring(slots, entries, jnp.broadcast_to(slot, count.shape), count)
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, 2), slots, entries
        )

    new_k, new_v = as_stored((new_k, new_v), k)
    return write(k, new_k), write(v, new_v)


@functools.partial(jax.jit, static_argnames="is_ring")  # traced once for all layers
def _append(k, v, new_k, new_v, path, start, count, is_ring: bool) -> tuple[Array, Array]:
    """Returns keys and values of a layer with the nodes of the path."""

    def write(slots, nodes):
        entries = take_path(nodes, path)
        if is_ring:
            return write_ring(slots, entries, start, count)
        return _write(slots, entries, start)

    return write(k, new_k), write(v, new_v)


def restore(before: KVCache, after: KVCache) -> KVCache:
    """Returns the cache `before` commits, given the one after them, whose arrays it shares.

    Commits overwrite entries of rings that may be seen again, and states: these are those from
    before.
    """
    _check_writable(before)

    def layers(old, new):
        return tuple(x if w else y for w, x, y in zip(before.windows, old, new, strict=True))

    return dataclasses.replace(before, k=layers(before.k, after.k), v=layers(before.v, after.v))


def without_old_states(cache: KVCache) -> KVCache:
    """Returns the cache with empty states in rows without tokens, which may have another text's."""
    has_text = cache.lengths > 0

    def clear(x):
        return jnp.where(has_text.reshape(-1, *[1] * (x.ndim - 1)), x, 0)

    return dataclasses.replace(cache, states=jax.tree.map(clear, cache.states))
