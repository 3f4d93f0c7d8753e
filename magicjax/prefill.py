"""Prefill: prompts into a cache, a chunk at a time, ragged rows right-padded.

A chunk attends to the cache so far and, under a triangle, to itself; no score matrix of the whole
prompt is ever stored. Padded tokens are seen by padded tokens only, and their entries lie beyond
the row's length, where later commits overwrite them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from magicjax import cache as caches
from magicjax.attention import attend_to
from magicjax.cache import KVCache
from magicjax.model import Model


def prefill_cache(
    model: Model, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], settings
) -> tuple[KVCache, Float[Array, "B E"]]:
    """Returns (the cache of the prompts, the hidden state of each row's last token).

    Args:
      model: whose cache it is.
      tokens: right-padded; T is a multiple of the chunk and at most the capacity.
      lengths: of the prompts, at least 1.
      settings: `chunk`, `capacity` and `backend` are read.
    """
    config, chunk = model.config, settings.chunk
    batch, width = tokens.shape
    triangle = jnp.tril(jnp.ones((chunk, chunk), bool))
    dtype = jax.tree.leaves(model.params)[0].dtype
    cache = caches.empty(
        config.num_layers, batch, config.num_kv_heads, settings.capacity, config.head_dim, dtype
    )

    def run_chunk(i, carry):
        cache, last = carry
        start = i * chunk
        part = jax.lax.dynamic_slice(tokens, (0, start), (batch, chunk))
        positions = jnp.minimum(start + jnp.arange(chunk), config.max_positions - 1)
        cache = cache.replace(lengths=jnp.minimum(start, lengths))
        hidden, new = model(
            part,
            jnp.broadcast_to(positions, part.shape),
            attend_to(cache, triangle, settings.backend),
        )
        at = start + caches.zero_after(hidden[:1, 0].argmax(-1)[0])
        k = tuple(_write(old, n, at) for old, (n, _) in zip(cache.k, new))
        v = tuple(_write(old, n, at) for old, (_, n) in zip(cache.v, new))
        place = jnp.clip(lengths - 1 - start, 0, chunk - 1)
        ends_here = (lengths > start) & (lengths <= start + chunk)
        here = jnp.take_along_axis(hidden, place[:, None, None], 1)[:, 0]
        return KVCache(k, v, cache.lengths), jnp.where(ends_here[:, None], here, last)

    last = jnp.zeros((batch, config.hidden_size), dtype)
    cache, last = jax.lax.fori_loop(0, width // chunk, run_chunk, (cache, last))
    return cache.replace(lengths=lengths), last


def _write(slots: Float[Array, "B K S D"], new: Float[Array, "B T K D"], start) -> Array:
    return jax.lax.dynamic_update_slice(slots, new.swapaxes(1, 2), (0, 0, start, 0))
