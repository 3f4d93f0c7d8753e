"""A reference `attend` without a cache: each token sees itself and earlier ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from models.gated_delta import DeltaNetInputs


def attend_of(config, shift: int = 0):
    """Returns the `attend` of a model, of one without windows if the config is None.

    `shift` is added to the windows of layers, for controls.
    """

    @functools.cache
    def attention_of(window):
        return Partial(functools.partial(attention, window))

    def attention(window, q, *keys_values, softcap=None, sinks=None):
        if isinstance(q, DeltaNetInputs):
            return delta_net(q), None
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in keys_values)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        distance = np.subtract.outer(*[np.arange(scores.shape[-1])] * 2)
        sees = (distance >= 0) & (distance < (window + shift if window else np.inf))
        scores = jnp.where(sees, scores, -jnp.inf)
        if sinks is not None:
            own = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, own], -1)
        weights = jax.nn.softmax(scores)[..., : k.shape[1]]
        return jnp.einsum("bhts,bshd->bthd", weights, v), None

    return lambda layer: attention_of(None if config is None else config.windows[layer])


def delta_net(inputs: DeltaNetInputs):
    """Returns the outputs [B, T, H, Dv] of a gated delta net, token by token."""
    s = inputs.shape
    padded = jnp.pad(inputs.x, ((0, 0), (s.conv_width - 1, 0), (0, 0)))
    length = inputs.x.shape[1]
    mixed = sum(padded[:, i : i + length] * inputs.kernel[:, i] for i in range(s.conv_width))
    q, k, v = inputs.heads(mixed)
    q, k = (jnp.repeat(x, s.value_heads // s.key_heads, 2) for x in (q, k))

    def step(state, token):
        q, k, v, log_decay, beta = token
        state = state * jnp.exp(log_decay)[..., None, None]
        update = beta[..., None] * (v - jnp.einsum("bhdv,bhd->bhv", state, k))
        state = state + k[..., None] * update[:, :, None]
        return state, jnp.einsum("bhdv,bhd->bhv", state, q)

    empty = jnp.zeros((len(v), s.value_heads, s.key_dim, s.value_dim), v.dtype)
    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, v, inputs.log_decay, inputs.beta))
    return jax.lax.scan(step, empty, tokens)[1].swapaxes(0, 1)
