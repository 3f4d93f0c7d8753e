"""Prefill: texts into a new cache or one that has their beginning, one chunk at a time.

A chunk attends to the cache so far and, under a triangular mask, to itself. Scores of the whole
text are never materialized. Ragged rows are right-padded. Only padding attends to padding, and its
entries are beyond the row's length, where later commits overwrite them. No state has padding.
"""

import dataclasses
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
        than the shortest one are computed again from its end; a cache with rings or states must
        have one row (ValueError). States must be those of so many tokens; those of rows without
        tokens are not read. None: an empty cache is made.
      layer_inputs: the result of earlier passes, as in `ModelStats`; None without earlier passes.
    """
    config, chunk, batch = model.config, settings.chunk, tokens.shape[0]
    first: Any = 0
    chunks: Any = tokens.shape[1] // chunk
    if cache is None:
        cache = full_cache.empty(model, batch, settings.capacity)
    else:
        if batch > 1 and (any(cache.windows) or cache.states):
            raise ValueError(
                f"a cache of {batch} rows with sliding windows or states cannot be continued, "
                "because it may lack what the shortest row needs: continue row by row"
            )
        cache = full_cache.without_old_states(cache)
        first = cache.lengths.min()
        chunks = -(-(lengths.max() - first) // chunk)
    keep_queries = stats_spec.window > 0 or stats_spec.total
    causal_mask = jnp.tril(jnp.ones((chunk, chunk), bool))

    def run_chunk(i, carry):
        cache, last, stats = carry
        start = first + i * chunk
        chunk_tokens = jax.lax.dynamic_slice(tokens, (0, start), (batch, chunk))
        positions = jnp.minimum(start + jnp.arange(chunk), config.max_positions - 1)
        cache = cache.replace(lengths=jnp.minimum(start, lengths))
        positions = jnp.broadcast_to(positions, chunk_tokens.shape)
        chunk_lengths = jnp.clip(lengths - start, 0, chunk)
        options: Any = dict(chain=chunk_lengths, positions=positions)
        attend = AttendTo(cache, causal_mask, settings.backend, keep_queries, **options)
        hidden, aux, inputs = model(chunk_tokens, positions, attend, stats_spec.layer_inputs)
        keys_values, queries = zip(*aux, strict=True)
        slot = start + full_cache.zero_after(hidden[:1, 0].argmax(-1)[0])
        count = jnp.clip(lengths - slot, 0, chunk)
        cache = full_cache.write_chunk(cache, keys_values, slot, count)
        index = jnp.clip(lengths - 1 - start, 0, chunk - 1)
        ends_here = (lengths > start) & (lengths <= start + chunk)
        chunk_last = jnp.take_along_axis(hidden, index[:, None, None], 1)[:, 0]
        stats = _update(model, stats, queries, cache.k, start, chunk, lengths, settings.backend)
        new_inputs = {
            layer: jax.lax.dynamic_update_slice_in_dim(stats.layer_inputs[layer], x, start, 1)
            for layer, x in inputs.items()
        }
        stats = dataclasses.replace(stats, layer_inputs=new_inputs)
        return cache, jnp.where(ends_here[:, None], chunk_last, last), stats

    last = jnp.zeros((batch, config.hidden_size), model.dtype)
    stats = _empty_stats(model, cache, stats_spec, tokens.shape[1])
    if layer_inputs is not None:
        stats = dataclasses.replace(stats, layer_inputs=layer_inputs)
    carry = cache, last, stats
    cache, last, stats = jax.lax.fori_loop(0, chunks, run_chunk, carry)
    return dataclasses.replace(cache, lengths=lengths), last, stats


def _empty_stats(model: Model, cache: KVCache, stats_spec: StatsSpec, length: int) -> ModelStats:
    config, batch = model.config, cache.lengths.shape[0]
    queries = total = None
    if stats_spec.window:
        sizes = batch, stats_spec.window, model.local_heads
        queries = tuple(
            empty_window(*sizes, model.layer_config(layer).kv_head_dim, model.dtype)
            if has_kv
            else None
            for layer, has_kv in enumerate(model.has_kv)
        )
    if stats_spec.total:
        dtype = jnp.promote_types(model.dtype, jnp.float32)
        layers = zip(cache.k, model.pinnable, strict=True)
        total = tuple(jnp.zeros(k.shape[:3], dtype) if read else None for k, read in layers)
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
    chunk: int,
    lengths: Int[Array, "B"],
    backend: str | None,
) -> ModelStats:
    """Returns the statistics with those of a chunk, whose keys are already in the cache."""
    windows, total = stats.queries, stats.total
    if windows is not None:
        pairs = zip(windows, queries, strict=True)
        windows = tuple(old and update_from_chunk(old, new, start, lengths) for old, new in pairs)
    if total is not None:
        position = start + jnp.arange(chunk)
        seen = jnp.where(position < lengths[:, None], position + 1, 0)
        options: Any = dict(softcap=softcap_of(model.config), backend=backend)

        def mass(k, q, lse):
            return prefix_mass(q, full_cache.elements(k, q.dtype), seen, lse, **options)

        total = tuple(
            old if old is None else old + model.sum_over_replicas(mass(k, *layer_queries))
            for old, layer_queries, k in zip(total, queries, keys, strict=True)
        )
    return dataclasses.replace(stats, queries=windows, total=total)
