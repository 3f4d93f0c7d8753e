"""Prefill: texts into a new cache or one that has their beginning, one chunk at a time.

A chunk attends to the cache so far and, under a triangular mask, to itself. Scores of the whole
text are never materialized. Ragged rows are right-padded. Only padding attends to padding, and its
entries are beyond the row's length, where later commits overwrite them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attend import AttendTo
from magicjax.kv_cache.full_cache import KVCache
from magicjax.kv_cache.model_stats import ModelStats, empty_window, update_from_chunk
from magicjax.model import Model, softcap_of
from magicjax.settings import PrefillSettings, Settings, StatsSpec
from pallas_kernels import prefix_mass


def prefill_cache(
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    settings: Settings | PrefillSettings,
    stats_spec: StatsSpec,
    cache: KVCache | None = None,
    layer_inputs: dict[int, Array] | None = None,
) -> tuple[KVCache, Float[Array, "B E"], ModelStats]:
    """Returns the prompts' cache, each row's last hidden state, and attention statistics.

    Given a cache, the number of chunks depends on the lengths, so one program serves all of them.
    Statistics are those of the chunks that run: complete for a window that begins after the cached
    tokens.

    Args:
      model: the model that fills the cache.
      tokens: right-padded. T is a multiple of the chunk and at most the capacity; given a cache,
        T and the capacity are at least `lengths` plus a chunk, because the last chunk may begin at
        any position and is written whole.
      lengths: prompt lengths, at least 1.
      settings: `chunk`, `capacity` and `backend` are read.
      stats_spec: the statistics to keep.
      cache: holds the first `cache.lengths` tokens of each row, fewer than `lengths`. Rows longer
        than the shortest one are computed again from its end; a cache with rings must have one row
        (ValueError). None: an empty cache is made.
      layer_inputs: the result of earlier passes, as in `ModelStats`; None without earlier passes.
    """
    config, chunk, batch = model.config, settings.chunk, tokens.shape[0]
    first: Any = 0
    chunks: Any = tokens.shape[1] // chunk
    if cache is None:
        cache = full_cache.empty(model, batch, settings.capacity)
    else:
        if batch > 1 and any(cache.windows):
            raise ValueError(
                f"a cache of {batch} rows with sliding windows cannot be continued, because its "
                "rings may lack what the shortest row needs: continue row by row"
            )
        first = cache.lengths.min()
        chunks = -(-(lengths.max() - first) // chunk)
    keep_queries = stats_spec.window > 0 or stats_spec.total
    triangle = jnp.tril(jnp.ones((chunk, chunk), bool))

    def run_chunk(i, carry):
        cache, last, stats = carry
        start = first + i * chunk
        part = jax.lax.dynamic_slice(tokens, (0, start), (batch, chunk))
        positions = jnp.minimum(start + jnp.arange(chunk), config.max_positions - 1)
        cache = cache.replace(lengths=jnp.minimum(start, lengths))
        positions = jnp.broadcast_to(positions, part.shape)
        attend = AttendTo(cache, triangle, settings.backend, keep_queries, positions=positions)
        hidden, aux, inputs = model(part, positions, attend, stats_spec.layer_inputs)
        keys_values, queries = zip(*aux, strict=True)
        slot = start + full_cache.zero_after(hidden[:1, 0].argmax(-1)[0])
        count = jnp.clip(lengths - slot, 0, chunk)
        layers = zip(cache.k, cache.v, keys_values, cache.windows, strict=True)
        updated = [_write(k, v, *new, slot, count, bool(window)) for k, v, new, window in layers]
        k, v = zip(*updated, strict=True)
        index = jnp.clip(lengths - 1 - start, 0, chunk - 1)
        ends_here = (lengths > start) & (lengths <= start + chunk)
        chunk_last = jnp.take_along_axis(hidden, index[:, None, None], 1)[:, 0]
        stats = _update(model, stats, queries, k, start, lengths, settings.backend)
        kept = {
            layer: jax.lax.dynamic_update_slice_in_dim(stats.layer_inputs[layer], x, start, 1)
            for layer, x in inputs.items()
        }
        stats = dataclasses.replace(stats, layer_inputs=kept)
        return cache.replace(k=k, v=v), jnp.where(ends_here[:, None], chunk_last, last), stats

    last = jnp.zeros((batch, config.hidden_size), model.dtype)
    stats = _empty_stats(model, cache, stats_spec, tokens.shape[1])
    if layer_inputs is not None:
        stats = dataclasses.replace(stats, layer_inputs=layer_inputs)
    carry = cache, last, stats
    cache, last, stats = jax.lax.fori_loop(0, chunks, run_chunk, carry)
    return dataclasses.replace(cache, lengths=lengths), last, stats


@functools.partial(jax.jit, static_argnames="is_ring")  # traced once for all layers
def _write(k, v, new_k, new_v, slot, count, is_ring: bool) -> tuple[Array, Array]:
    """Returns keys and values of a layer with those of a chunk."""

    def write(slots, entries):
        entries = jax.tree.map(lambda x: x.swapaxes(1, 2), entries)
        if is_ring:
            rows = jnp.broadcast_to(slot, count.shape)
            return full_cache.write_ring(slots, entries, rows, count)
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, 2), slots, entries
        )

    new_k, new_v = full_cache.as_stored((new_k, new_v), k)
    return write(k, new_k), write(v, new_v)


def _empty_stats(model: Model, cache: KVCache, stats_spec: StatsSpec, length: int) -> ModelStats:
    config, batch = model.config, cache.lengths.shape[0]
    queries = total = None
    if stats_spec.window:
        sizes = batch, stats_spec.window, model.local_heads, config.kv_head_dim
        queries = (empty_window(*sizes, model.dtype),) * config.num_layers
    if stats_spec.total:
        dtype = jnp.promote_types(model.dtype, jnp.float32)
        layers = zip(cache.k, cache.windows, strict=True)
        total = tuple(None if w else jnp.zeros(k.shape[:3], dtype) for k, w in layers)
    inputs = {
        layer: jnp.zeros((batch, length, config.hidden_size), model.dtype)
        for layer in stats_spec.layer_inputs
    }
    return ModelStats(queries, total, inputs, model.split)


def _update(
    model: Model,
    stats: ModelStats,
    queries: tuple,
    keys: tuple,
    start,
    lengths: Int[Array, "B"],
    backend: str | None,
) -> ModelStats:
    """Returns the statistics with those of a chunk, whose keys are already in the cache."""
    windows, total = stats.queries, stats.total
    if windows is not None:
        pairs = zip(windows, queries, strict=True)
        windows = tuple(update_from_chunk(old, new, start, lengths) for old, new in pairs)
    if total is not None:
        position = start + jnp.arange(queries[0][0].shape[1])
        seen = jnp.where(position < lengths[:, None], position + 1, 0)
        options: Any = dict(softcap=softcap_of(model.config), backend=backend)
        total = tuple(
            old
            if old is None
            else old
            + model.sum_over_replicas(
                prefix_mass(q, full_cache.elements(k, q.dtype), seen, lse, **options)
            )
            for old, (q, lse), k in zip(total, queries, keys, strict=True)
        )
    return dataclasses.replace(stats, queries=windows, total=total)
