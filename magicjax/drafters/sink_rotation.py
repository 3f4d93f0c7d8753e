"""A sparse draft that never sees farther than its cache: for texts beyond the trained context.

The ring keeps its absolute rotation, because scores depend on distances only. The sinks would be
too far away, so their keys are kept as they were before rotation, and turned again after every
commit as if they lay just before the ring (StreamingLLM, arXiv 2309.17453, section 3.2).
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
from models.rope import frequencies, turn

SinkKeys = tuple[Float[Array, "B K P D"], ...]


LARGEST_CHUNK = 256


def chunk_of(ring: int, room: int) -> int:
    """Returns how many tokens a step of the prefill has.

    The largest power of two that the ring holds, and whose tokens see no farther back than `room`
    beyond the cache. What a token sees depends on it, so it must not depend on other rows.
    """
    size = 1
    while 2 * size <= min(ring, room, LARGEST_CHUNK):
        size *= 2
    return size


def prefill_window(
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    settings: Any,
    sinks: int,
    ring: int,
) -> tuple[DraftCache, SinkKeys]:
    """Returns (the cache behind the prompts, the sinks' keys before rotation).

    A token sees the sinks, the ring as it was before its chunk, and its chunk; no cache of the
    whole prompt is ever made.

    Args:
      model: with rotary positions.
      tokens: right-padded.
      lengths: of the prompts.
      settings: `backend` is read.
      sinks, ring: P and R.
    """
    config, batch = model.config, tokens.shape[0]
    room = config.max_positions - sinks - ring
    chunk = chunk_of(ring, room)
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % chunk)))
    shape = batch, model.own_kv_heads, sinks + ring, config.head_dim
    k, v = (tuple(jnp.zeros(shape, model.dtype) for _ in range(config.num_layers)) for _ in "kv")
    in_order = jnp.broadcast_to(jnp.arange(sinks, dtype=jnp.int32), (*shape[:2], sinks))
    cache = DraftCache(k, v, (in_order,) * config.num_layers, jnp.zeros(batch, jnp.int32))
    raw = tuple(x[:, :, :sinks] for x in k)
    triangle = jnp.tril(jnp.ones((chunk, chunk), bool))
    path = jnp.broadcast_to(jnp.arange(chunk), (batch, chunk))

    def run_chunk(i, carry):
        cache, raw = carry
        start = i * chunk
        part = jax.lax.dynamic_slice(tokens, (0, start), (batch, chunk))
        positions = jnp.broadcast_to(start + jnp.arange(chunk), part.shape)
        hidden, kept = model(part, positions, AttendTo(cache, triangle, settings.backend))
        new = tuple(pair for pair, _ in kept)
        witness = hidden[0, 0].argmax(-1).astype(jnp.int32)  # an int64 in 64-bit mode
        count = jnp.clip(lengths - start, 0, chunk) + full_cache.zero_after(witness)
        return settle(model, append_ring(cache, new, path, count), raw, cache.count)

    return jax.lax.fori_loop(0, tokens.shape[1] // chunk, run_chunk, (cache, raw))


def settle(
    model: Model, cache: DraftCache, raw: SinkKeys, before: Int[Array, "B"]
) -> tuple[DraftCache, SinkKeys]:
    """Returns (the cache with its sinks just before the ring, the sinks' keys before rotation).

    Args:
      model: whose cache it is.
      cache: after a commit; keys of positions committed just now have their absolute rotation.
      raw: the sinks' keys, of those committed before.
      before: int32 [B], the count before the commit.
    """
    sinks = raw[0].shape[2]
    place = jnp.arange(sinks)
    fresh = (place >= before[:, None]) & (place < cache.count[:, None])
    shift = jnp.maximum(cache.count - cache.capacity(0), 0)
    rope: Any = model.config.rope  # type: ignore[union-attr]  # `SmallModel.check` saw to it
    inverse, _ = frequencies(rope, model.config.head_dim)
    back = -place[:, None] * inverse
    ahead = ((shift[:, None] + place)[..., None] * inverse)[:, None]

    def turned(keys: Any, angles) -> Any:
        return turn(keys, jnp.cos(angles), jnp.sin(angles)).astype(keys.dtype)

    keys, kept = [], []
    k: Any
    for k, old in zip(cache.k, raw, strict=True):
        own = jnp.where(fresh[:, None, :, None], turned(k[:, :, :sinks], back), old)
        keys.append(k.at[:, :, :sinks].set(turned(own, ahead)))
        kept.append(own)
    return dataclasses.replace(cache, k=tuple(keys)), tuple(kept)
