"""Layers that all families share: norms, the embedding, and the type of `attend`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.linear import mean
from sharding import Split, collectives

# Attention of a layer: (q [B,T,H,D], k [B,T,K,D], v [B,T,K,D]) -> (out [B,T,H,D], what to keep).
# Models that need them also pass softcap, a number, and sinks [H] (`DecoderConfig`).
LayerAttend = Callable[..., tuple[Array, Any]]

# attend(layer) is the attention of a layer as a pytree, because it is an argument of traced blocks.
Attend = Callable[[int], LayerAttend]

# Of a pass: hidden states [B,T,E], `attend`'s aux of each layer, and inputs of layers, by layer
PassResult = tuple[Float[Array, "B T E"], tuple, dict[int, Float[Array, "B T E"]]]

NEVER = -1e30  # logit of a token that is never predicted; finite, so that differences are numbers


class RMSNorm(nn.Module):
    """x divided by its root mean square, scaled; the mean is computed in float32.

    With `plus_one` the scale is 1 + the parameter. It is applied in float32, as with `wide`.
    Without `use_scale` there is none. Mesh axes `axis_names` divide E, of which this device has
    `size`.
    """

    size: int
    eps: float
    dtype: Any
    axis: str | None = None
    backend: str | None = None
    plus_one: bool = False
    wide: bool = False
    use_scale: bool = True
    axis_names: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        upcast = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares = mean(upcast * upcast, self.backend)
        if self.axis_names:
            squares = collectives.psum(squares, self.axis_names)
            squares = squares / collectives.axis_size(self.axis_names)
        upcast = upcast * jax.lax.rsqrt(squares + self.eps)
        if not self.use_scale:
            return upcast.astype(x.dtype)
        start = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        init = nn.with_logical_partitioning(start, (self.axis,))
        scale = self.param("scale", init, (self.size,), self.dtype)
        if self.plus_one or self.wide:
            return (upcast * (self.plus_one + scale.astype(upcast.dtype))).astype(x.dtype)
        return upcast.astype(x.dtype) * scale


class LayerNorm(nn.Module):
    """x minus its mean, divided by its standard deviation, scaled and shifted, in float32."""

    size: int
    eps: float
    dtype: Any
    axis: str | None = None
    backend: str | None = None
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        ones = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, (self.axis,))
        scale = self.param("scale", ones, (self.size,), self.dtype)
        bias = self.param("bias", zeros, (self.size,), self.dtype) if self.use_bias else 0
        upcast = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        upcast = upcast - mean(upcast, self.backend)
        upcast = upcast * jax.lax.rsqrt(mean(upcast * upcast, self.backend) + self.eps)
        return (upcast * scale + bias).astype(x.dtype)


def scaled(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Returns x times a number, in x's dtype; the product is computed in at least float32."""
    if factor == 1:
        return x
    return (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * factor).astype(x.dtype)


def in_every_layer(attention: LayerAttend) -> Attend:
    """Returns the `attend` of a model whose layers all call the same function."""
    attend = jax.tree_util.Partial(attention)
    return lambda layer: attend


def embedding_lookup(
    table: Float[Array, "V E"], tokens: Int[Array, "*B"], split: Split
) -> Float[Array, "*B E"]:
    """Returns rows of an embedding, zeros for tokens from V on.

    An all-reduce combines the parts of several shards.
    """
    if not split.axes:
        return jnp.take(table, tokens, axis=0, mode="fill", fill_value=0)
    local = tokens - collectives.axis_index(split.axes) * table.shape[0]
    is_local = (local >= 0) & (local < table.shape[0])
    rows = jnp.take(table, local.clip(0, table.shape[0] - 1), axis=0)
    return collectives.psum(jnp.where(is_local[..., None], rows, 0), split.axes)
