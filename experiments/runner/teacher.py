"""Teacher-forced forwards: what a model would say next at every position of a given text.

Attention goes in chunks of queries against the keys they can see, and logits are reduced to what
is asked chunk by chunk, so neither a T x T nor a T x V array is ever held.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 256


def windowed_attend(sinks: int, window: int | None):
    """Returns an `attend`: position t sees s <= t if s is a sink or at most `window` before t.

    That is what a draft cache shows: `sinks` pinned slots and a ring of `window` tokens, beside the
    token itself. Here keys and values come from layers with that view; in the loop they are the
    target's verified ones, so the real draft agrees a little more. Without a window it is the
    plain causal mask.
    """

    def attend(layer: int, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v: Array):
        del layer
        batch, length, kv_heads, _ = k.shape
        chunk = min(CHUNK, length)
        count = -(-length // chunk)
        span = length if window is None else min(length, window + chunk)
        pinned = 0 if window is None else min(sinks, length)
        grouped = q.reshape(batch, length, kv_heads, -1, q.shape[-1])
        grouped = jnp.pad(grouped, ((0, 0), (0, count * chunk - length), (0, 0), (0, 0), (0, 0)))

        def one(index):
            start = index * chunk
            first = jnp.clip(start - (window or 0), 0, length - span) if window else 0
            here = jax.lax.dynamic_slice_in_dim(grouped, start, chunk, 1)
            keys, values = (
                jnp.concatenate([x[:, :pinned], jax.lax.dynamic_slice_in_dim(x, first, span, 1)], 1)
                for x in (k, v)
            )
            at = jnp.concatenate([jnp.arange(pinned), first + jnp.arange(span)])
            # A pin that the slice holds too must count once: the slice's copy gives way.
            copy = jnp.concatenate([jnp.zeros(pinned, bool), first + jnp.arange(span) < pinned])
            query = (start + jnp.arange(chunk))[:, None]
            visible = (at <= query) & ~copy
            if window is not None:
                visible &= (at < pinned) | (query - at <= window)
            scores = jnp.einsum("btkgd,bskd->bkgts", here, keys, preferred_element_type=jnp.float32)
            # Finite, because the queries that pad the last chunk may see nothing at all.
            scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -1e30)
            weights = jax.nn.softmax(scores).astype(v.dtype)
            return jnp.einsum("bkgts,bskd->btkgd", weights, values)

        out = jax.lax.map(one, jnp.arange(count))  # [count, B, chunk, K, G, D]
        out = jnp.moveaxis(out, 0, 1).reshape(batch, count * chunk, *q.shape[2:])
        return out[:, :length], None

    return attend


@functools.partial(jax.jit, static_argnames=("sinks", "window"))
def _hidden(model, tokens, sinks, window):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, positions, windowed_attend(sinks, window))[0]


@jax.jit
def _greedy(model, hidden):
    def of_chunk(part):
        return model.unembed(part).argmax(-1).astype(jnp.int32)

    batch, length, width = hidden.shape
    chunk = min(CHUNK, length)
    count = -(-length // chunk)
    padded = jnp.pad(hidden, ((0, 0), (0, count * chunk - length), (0, 0)))
    chunks = jnp.moveaxis(padded.reshape(batch, count, chunk, width), 1, 0)
    out = jax.lax.map(of_chunk, chunks)
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1)[:, :length]


def greedy_tokens(
    model: Any, tokens: Int[Array, "B T"], *, sinks: int = 0, window: int | None = None
) -> Int[Array, "B T"]:
    """Returns the most likely token after each prefix of `tokens`, seen through a window or whole.

    Args:
      model: a loaded model.
      tokens: the text.
      sinks, window: as in `windowed_attend`.
    """
    hidden = _hidden(model, jnp.asarray(tokens), sinks, window)
    return _greedy(model, hidden)


def logits(model: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Returns the logits after each prefix of `tokens`: all of them, so for short texts."""
    hidden = _hidden(model, jnp.asarray(tokens), 0, None)
    return _unembed(model, hidden)


@jax.jit
def _unembed(model, hidden):
    return model.unembed(hidden)


def logits_at(
    model: Any, tokens: Int[Array, "B T"], index: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Returns the logits after `tokens[row, :index[row] + 1]`; what stands beyond is not seen."""
    hidden = _hidden(model, jnp.asarray(tokens), 0, None)
    at = jnp.take_along_axis(hidden, jnp.asarray(index)[:, None, None], axis=1)[:, 0]
    return _unembed(model, at)


def log_probs_of(
    model: Any,
    tokens: Int[Array, "B T"],
    index: Int[Array, "B W"],
    following: Int[Array, "B W"],
) -> tuple[Float[Array, "B W"], Bool[Array, "B W"]]:
    """Returns (log-probabilities of given tokens, whether each is the most likely one).

    Args:
      model: a loaded model.
      tokens: the text.
      index: positions in it; only their logits are made, a chunk at a time.
      following: what is asked about: each stands behind `tokens[row, :index + 1]`.
    """
    hidden = _hidden(model, jnp.asarray(tokens), 0, None)
    return _scored(model, hidden, jnp.asarray(index), jnp.asarray(following))


@jax.jit
def _scored(model, hidden, index, following):
    def of_chunk(part):
        at, wanted = part
        chosen = jnp.take_along_axis(hidden, at[..., None], axis=1)
        logits = model.unembed(chosen)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        own = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        return own - jax.nn.logsumexp(logits, axis=-1), logits.argmax(-1) == wanted

    batch, width = index.shape
    chunk = min(CHUNK, width)
    count = -(-width // chunk)
    padding = ((0, 0), (0, count * chunk - width))
    parts = (
        jnp.moveaxis(jnp.pad(x, padding).reshape(batch, count, chunk), 1, 0)
        for x in (index, following)
    )
    out = jax.lax.map(of_chunk, tuple(parts))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :width] for x in out)
