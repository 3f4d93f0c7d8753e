"""Prefill: prompts into a cache, a chunk at a time, ragged rows right-padded.

A chunk attends to the cache so far and, under a triangle, to itself; no score matrix of the whole
prompt is ever stored. Padded tokens are seen by padded tokens only, and their entries lie beyond
the row's length, where later commits overwrite them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attend import AttendTo
from magicjax.kv_cache.attention_stats import Seen, Watch, no_queries, of_chunk
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from pallas_kernels import prefix_mass


def prefill_cache(
    model: Model, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], settings, watch: Watch
) -> tuple[KVCache, Float[Array, "B E"], Seen]:
    """Returns (the cache of the prompts, each row's last hidden state, what was watched).

    Args:
      model: whose cache it is.
      tokens: right-padded; T is a multiple of the chunk and at most the capacity.
      lengths: of the prompts, at least 1.
      settings: `chunk`, `capacity` and `backend` are read.
      watch: what to keep of attention.
    """
    config, chunk = model.config, settings.chunk
    batch, width = tokens.shape
    triangle = jnp.tril(jnp.ones((chunk, chunk), bool))
    dtype = model.dtype
    cache = full_cache.empty(
        config.num_layers,
        batch,
        model.own_kv_heads,
        settings.capacity,
        config.head_dim,
        dtype,
        model.stages,
    )

    def run_chunk(i, carry):
        cache, last, seen = carry
        start = i * chunk
        part = jax.lax.dynamic_slice(tokens, (0, start), (batch, chunk))
        positions = jnp.minimum(start + jnp.arange(chunk), config.max_positions - 1)
        cache = cache.replace(lengths=jnp.minimum(start, lengths))
        attend = AttendTo(cache, triangle, settings.backend, watch.window > 0 or watch.total)
        hidden, kept = model(part, jnp.broadcast_to(positions, part.shape), attend)
        new, queries = zip(*kept, strict=True)
        at = start + full_cache.zero_after(hidden[:1, 0].argmax(-1)[0])
        k = tuple(_write(old, n, at) for old, (n, _) in zip(cache.k, new))
        v = tuple(_write(old, n, at) for old, (_, n) in zip(cache.v, new))
        place = jnp.clip(lengths - 1 - start, 0, chunk - 1)
        ends_here = (lengths > start) & (lengths <= start + chunk)
        here = jnp.take_along_axis(hidden, place[:, None, None], 1)[:, 0]
        seen = _see(model, seen, queries, k, start, lengths, settings.backend)
        return cache.replace(k=k, v=v), jnp.where(ends_here[:, None], here, last), seen

    last = jnp.zeros((batch, config.hidden_size), dtype)
    seen = _nothing_seen(model, cache, watch)
    cache, last, seen = jax.lax.fori_loop(0, width // chunk, run_chunk, (cache, last, seen))
    return cache.replace(lengths=lengths), last, seen


def _nothing_seen(model: Model, cache: KVCache, watch: Watch) -> Seen:
    config, batch = model.config, cache.lengths.shape[0]
    queries = total = None
    if watch.window:
        of_layer = no_queries(batch, watch.window, model.own_heads, config.head_dim, model.dtype)
        queries = (of_layer,) * config.num_layers
    if watch.total:
        dtype = jnp.promote_types(model.dtype, jnp.float32)
        total = tuple(jnp.zeros(k.shape[:3], dtype) for k in cache.k)
    return Seen(queries, total, model.stages)


def _see(
    model: Model,
    seen: Seen,
    queries: tuple,
    keys: tuple,
    start,
    lengths: Int[Array, "B"],
    backend: str | None,
) -> Seen:
    """Returns what was watched up to a chunk, its own queries and keys included."""
    windows, total = seen.queries, seen.total
    if windows is not None:
        pairs = zip(windows, queries, strict=True)
        windows = tuple(of_chunk(old, new, start, lengths) for old, new in pairs)
    if total is not None:
        position = start + jnp.arange(queries[0][0].shape[1])
        sees = jnp.where(position < lengths[:, None], position + 1, 0)
        total = tuple(
            old + model.of_all_queries(prefix_mass(q, k, sees, lse, backend=backend))
            for old, (q, lse), k in zip(total, queries, keys, strict=True)
        )
    return dataclasses.replace(seen, queries=windows, total=total)


def _write(slots: Float[Array, "B K S D"], new: Float[Array, "B T K D"], start) -> Array:
    return jax.lax.dynamic_update_slice(slots, new.swapaxes(1, 2), (0, 0, start, 0))
