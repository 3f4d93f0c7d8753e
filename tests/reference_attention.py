"""A reference `attend` without a cache: each token sees itself and earlier ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial


def attend_of(config, shift: int = 0):
    """Returns the `attend` of a model, of one without windows if the config is None.

    `shift` is added to the windows of layers, for controls.
    """

    @functools.cache
    def attention_of(window):
        return Partial(functools.partial(attention, window))

    def attention(window, q, k, v, softcap=None, sinks=None):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
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
