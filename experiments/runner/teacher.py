"""Teacher-forced passes: a model's predictions at every position of a text.

Attention processes chunks of queries with the keys that they can see, and logits are reduced chunk
by chunk, so that no T x T or T x V array is stored.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

import models
from magicjax.kv_cache import full_cache, state_layers
from magicjax.kv_cache.attend import AttendTo
from models import LayerAttend
from models.gated_delta import DeltaNetInputs
from pallas_kernels.scores import capped

CHUNK = 256


def _map_chunks(function: Callable, *arrays: Array) -> Any:
    """Applies a function to chunks of the arrays [B, T, ...] along T, one chunk after the other.

    The last chunk is padded with zeros; its padding is removed from the results [B, chunk, ...].
    """
    batch, length = arrays[0].shape[:2]
    chunk = min(CHUNK, length)
    count = -(-length // chunk)

    def split(x):
        padding = [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, padding).reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(batch, count * chunk, *x.shape[3:])[:, :length]

    results = jax.lax.map(lambda chunks: function(*chunks), tuple(map(split, arrays)))
    return jax.tree.map(join, results)


def attend_of(model: Any, sinks: int = 0, window: int | None = None):
    """Returns the `attend` of a model: `windowed_attention` within each layer's own window.

    Layers with a sliding window have no sinks: they see the newest tokens of a draft cache. Layers
    with a state see the whole text, as those of a draft do.
    """
    attention = functools.cache(windowed_attention)  # equal layers share a trace

    def attend(layer: int) -> LayerAttend:
        if model.recurrent[layer]:
            return Partial(_run_states)
        layer_window = model.windows[layer]
        if layer_window is None:
            return attention(sinks, window)
        newest = layer_window - 1
        return attention(0, newest if window is None else min(newest, window))

    return attend


def _run_states(inputs: DeltaNetInputs) -> tuple[Float[Array, "B T H Dv"], None]:
    """Returns the outputs of a layer with a state, which is empty before the text."""
    rows, length, _ = inputs.x.shape
    state = state_layers.empty(inputs.shape, rows, inputs.x.dtype)
    return state_layers.run_chain(inputs, state, jnp.full(rows, length))[0], None


def windowed_attention(pins: int, window: int | None) -> LayerAttend:
    """Returns the attention of a layer with pins and a window.

    Position t sees s <= t if s < pins or s is at most `window` before t.

    This is the view of a draft cache with `pins` pinned slots and a ring of `window` tokens, plus
    the current token. Here the keys and values themselves are computed with that view, whereas the
    decoding loop uses the target's verified ones, so the real draft agrees slightly more often.
    Without a window the mask is causal.
    """

    def attention(
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        softcap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
    ):
        batch, length, kv_heads, _ = k.shape
        chunk = min(CHUNK, length)
        span = length if window is None else min(length, window + chunk)
        pinned = 0 if window is None else min(pins, length)
        grouped = q.reshape(batch, length, kv_heads, -1, q.shape[-1])
        indices = jnp.broadcast_to(jnp.arange(length), (batch, length))

        def attend_chunk(queries, indices):
            start = indices[0, 0]
            first = 0 if window is None else jnp.clip(start - window, 0, length - span)
            keys, values = (
                jnp.concatenate([x[:, :pinned], jax.lax.dynamic_slice_in_dim(x, first, span, 1)], 1)
                for x in (k, v)
            )
            position = jnp.concatenate([jnp.arange(pinned), first + jnp.arange(span)])
            # A sink that is also in the slice counts once: its copy in the slice is masked.
            copy = jnp.concatenate([jnp.zeros(pinned, bool), first + jnp.arange(span) < pinned])
            query = (start + jnp.arange(chunk))[:, None]
            visible = (position <= query) & ~copy
            if window is not None:
                visible &= (position < pinned) | (query - position <= window)
            scores = jnp.einsum(
                "btkgd,bskd->bkgts", queries, keys, preferred_element_type=jnp.float32
            )
            # Finite, because the padding queries of the last chunk may see no position.
            scores = jnp.where(visible, capped(scores * q.shape[-1] ** -0.5, softcap), -1e30)
            if sinks is not None:
                sink_scores = sinks.astype(scores.dtype).reshape(kv_heads, -1, 1, 1)
                sink_scores = jnp.broadcast_to(sink_scores, (*scores.shape[:-1], 1))
                scores = jnp.concatenate([scores, sink_scores], -1)
            weights = jax.nn.softmax(scores)[..., : len(position)].astype(v.dtype)
            return jnp.einsum("bkgts,bskd->btkgd", weights, values)

        return _map_chunks(attend_chunk, grouped, indices).reshape(q.shape), None

    return Partial(attention)


@functools.partial(jax.jit, static_argnames=("sinks", "window"))
def _hidden(model, tokens, sinks=0, window=None):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, positions, attend_of(model, sinks, window))[0]


@jax.jit
def _greedy(model, hidden):
    return _map_chunks(lambda chunk: model.unembed(chunk).argmax(-1).astype(jnp.int32), hidden)


def greedy_tokens(
    model: Any, tokens: Int[Array, "B T"], *, sinks: int = 0, window: int | None = None
) -> Int[Array, "B T"]:
    """Returns the most likely token after each prefix of `tokens`.

    `sinks` and `window` limit what a position sees, as in `windowed_attention`; None: all before.
    """
    return _greedy(model, _hidden(model, jnp.asarray(tokens), sinks, window))


def last_hidden_states(
    model: Any, tokens: Int[Array, "1 T"], count: int, *, in_float32: bool = False
) -> Float[Array, "1 count E"]:
    """Returns the hidden states of the last `count` tokens, for `unembed`.

    It attends to a KV cache, chunk by chunk, which takes a fraction of the time of a pass without
    one.

    Args:
      model: the model that reads the text.
      tokens: the text.
      count: of the last tokens.
      in_float32: with the same weights, but activations in float32.
    """
    length = tokens.shape[1]
    padded = jnp.pad(jnp.asarray(tokens), ((0, 0), (0, -length % CHUNK)))
    cache = full_cache.empty(model, 1, padded.shape[1])
    if in_float32 and model.kv_bits is None:
        arrays = dict(k=cache.k, v=cache.v, states=cache.states)
        in_32_bits = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
        cache = dataclasses.replace(cache, **in_32_bits)
    hiddens = []
    for start in range(0, padded.shape[1], CHUNK):
        chunk = padded[:, start : start + CHUNK]
        hidden, cache = _read_chunk(model, cache, chunk, in_float32=in_float32)
        hiddens.append(hidden[:, max(0, length - count - start) : length - start])
    return jnp.concatenate(hiddens, axis=1)


@functools.partial(jax.jit, static_argnames=("in_float32",), donate_argnames=("cache",))
def _read_chunk(model, cache, tokens, *, in_float32):
    """Returns the hidden states of the next tokens of a text, and the cache with them."""
    model, size = _float32(model) if in_float32 else model, tokens.shape[1]
    steps = jnp.arange(size)
    positions = cache.lengths[:, None] + steps
    causal_mask, count = steps <= steps[:, None], jnp.full(1, size, jnp.int32)
    attend = AttendTo(cache, causal_mask, None, chain=count, positions=positions)
    hidden, scored, _ = model(tokens, positions, attend)
    new = tuple(pair for pair, _ in scored)
    start = cache.lengths[0] + full_cache.zero_after(hidden[0, -1].argmax())
    cache = full_cache.write_chunk(cache, new, start, count)
    return hidden, dataclasses.replace(cache, lengths=cache.lengths + size)


def _float32(model: Any) -> Any:
    """Returns the model with the same weights, but activations in float32 between products."""
    # Products of 16-bit blocks with float32 activations are in float32.
    params = models.cast_params(model.params, jnp.float32)
    return dataclasses.replace(model, module=model.module.clone(dtype=jnp.float32), params=params)


@functools.partial(jax.jit, static_argnames=("in_float32",))
def unembed(
    model: Any, hidden: Float[Array, "B T E"], *, in_float32: bool = False
) -> Float[Array, "B T V"]:
    """Returns the logits of hidden states."""
    return (_float32(model) if in_float32 else model).unembed(hidden)


def logits(model: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Returns the logits after each prefix of `tokens`. The result is large: use short texts."""
    return unembed(model, _hidden(model, jnp.asarray(tokens)))
