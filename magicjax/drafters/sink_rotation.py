"""Sinks that move with the ring, for texts beyond the draft model's trained context.

Scores depend on distances only, so the ring keeps its absolute rotation. The sinks would be too far
away: their keys are stored before rotation and rotated again after every commit, to the positions
just before the ring (StreamingLLM, arXiv 2309.17453, section 3.2). With 2 sinks and a ring of 3,
a row of 9 tokens has the ring 6 7 8, and its sinks 0 1 are rotated to positions 4 5.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attend import AttendTo
from magicjax.kv_cache.sparse_cache import DraftCache, append_ring
from magicjax.model import Model
from magicjax.settings import Settings
from models.positions import frequencies, rotate_pairs

SinkKeys = tuple[Float[Array, "B K P D"], ...]  # for each layer, before rotation

LARGEST_CHUNK = 256


def prefill_chunk(ring: int, spare: int) -> int:
    """Returns the tokens of a prefill step: the largest power of two that fits.

    It must fit the ring, and `spare`, the positions that the model has beyond the cache. What a
    token sees depends on the chunk, so the chunk must not depend on other rows.
    """
    size = 1
    while 2 * size <= min(ring, spare, LARGEST_CHUNK):
        size *= 2
    return size


def prefill_sliding_window(
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    settings: Settings,
    sinks: int,
    ring: int,
) -> tuple[DraftCache, SinkKeys]:
    """Returns the cache after the prompts, and the sinks' keys before rotation.

    A token sees the sinks, the ring before its chunk, and its chunk up to itself. The whole prompt
    is never cached.

    Args:
      model: with rotary positions.
      tokens: right-padded.
      lengths: prompt lengths.
      settings: only `backend` is read.
      sinks, ring: P and R.
    """
    config, batch = model.config, tokens.shape[0]
    chunk = prefill_chunk(ring, config.max_positions - sinks - ring)
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % chunk)))
    shape = batch, model.local_kv_heads(0), sinks + ring, config.head_dim  # of every layer
    k, v = (tuple(jnp.zeros(shape, model.dtype) for _ in range(config.num_layers)) for _ in "kv")
    sink_positions = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.int32), (*shape[:2], sinks))
    pinned = (sink_positions,) * config.num_layers
    count = jnp.zeros(batch, jnp.int32)
    cache = DraftCache(k, v, pinned, count, model.windows, split=model.split)
    unrotated = tuple(x[:, :, :sinks] for x in k)
    causal_mask = jnp.tril(jnp.ones((chunk, chunk), bool))
    path = jnp.broadcast_to(jnp.arange(chunk), (batch, chunk))

    def run_chunk(i, carry):
        cache, unrotated = carry
        start = i * chunk
        chunk_tokens = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
        positions = jnp.broadcast_to(start + jnp.arange(chunk), chunk_tokens.shape)
        attend = AttendTo(cache, causal_mask, settings.backend, positions=positions)
        hidden, aux, _ = model(chunk_tokens, positions, attend)
        kv = tuple(pair for pair, _ in aux)
        dependency = hidden[0, 0].argmax(-1).astype(jnp.int32)  # an int64 in 64-bit mode
        count = jnp.clip(lengths - start, 0, chunk) + full_cache.zero_after(dependency)
        return rotate_sinks(model, append_ring(cache, kv, path, count), unrotated, cache.count)

    chunks = -(-lengths.max() // chunk)
    return jax.lax.fori_loop(0, chunks, run_chunk, (cache, unrotated))


def rotate_sinks(
    model: Model, cache: DraftCache, unrotated: SinkKeys, count_before: Int[Array, "B"]
) -> tuple[DraftCache, SinkKeys]:
    """Returns the cache with its sinks just before the ring, and the sinks' keys before rotation.

    Args:
      model: the model that fills the cache.
      cache: after a commit; newly committed keys have their absolute rotation.
      unrotated: keys of the sinks that were committed before.
      count_before: the tokens of each row before the commit.
    """
    sinks = unrotated[0].shape[2]
    position = jnp.arange(sinks)
    is_new = (position >= count_before[:, None]) & (position < cache.count[:, None])
    shift = jnp.maximum(cache.count - cache.capacity(0), 0)
    rope: Any = model.config.rope  # type: ignore[union-attr]  # `SmallModel.check` requires it
    inverse, _ = frequencies(rope, model.config.head_dim)
    to_zero = -position[:, None] * inverse
    to_ring = ((shift[:, None] + position)[..., None] * inverse)[:, None]

    def rotated(keys: Any, angles) -> Any:
        return rotate_pairs(keys, jnp.cos(angles), jnp.sin(angles)).astype(keys.dtype)

    rotated_keys, unrotated_keys = [], []
    k: Any
    for k, old in zip(cache.k, unrotated, strict=True):
        keys = jnp.where(is_new[:, None, :, None], rotated(k[:, :, :sinks], to_zero), old)
        rotated_keys.append(k.at[:, :, :sinks].set(rotated(keys, to_ring)))
        unrotated_keys.append(keys)
    return dataclasses.replace(cache, k=tuple(rotated_keys)), tuple(unrotated_keys)
