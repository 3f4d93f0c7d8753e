"""Layers that all families share: norms, linear maps, and the type of `attend`.

Weights keep their logical axes (width, heads, head size) unflattened, so that one table of logical
axes determines their sharding.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import quantized
from models.quantized import WeightFormat
from sharding import Split, collectives

# attend(layer, q [B,T,H,D], k [B,T,K,D], v [B,T,K,D]) -> (out [B,T,H,D], what to keep)
Attend = Callable[[int, Array, Array, Array], tuple[Array, Any]]

NEVER = -1e30  # logit of a token that is never predicted; finite, so that differences are numbers
DEVIATIONS = 3  # of random quantized weights, that the largest value stands for


def dot_precision(dtype: Any) -> jax.lax.Precision | None:
    """Returns the precision of products; by default a GPU would round float32 to TF32."""
    return jax.lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None


def at_least_two_rows(product: Callable[[Array], Array], x: Array, axes: int) -> Array:
    """Returns product(x), with a second row of zeros if that is faster.

    On a CPU, XLA converts the whole 16-bit weight of a matrix-vector product to float32 in every
    call. With two rows it is a matrix product, which reads 16 bits: SmolLM2-135M in bfloat16 takes
    127 instead of 560 ms for a token on two shared cores.

    Args:
      product: of x with a weight; keeps the first axes.
      x: [*B, *I].
      axes: the number of contracted axes I.
    """
    rows = x.shape[: x.ndim - axes]
    if not rows or math.prod(rows) > 1 or x.dtype.itemsize >= 4:
        return product(x)

    def two_rows(x):
        return product(jnp.concatenate([x, jnp.zeros_like(x)]))[:1]

    return jax.lax.platform_dependent(x, cpu=two_rows, default=product)


class RMSNorm(nn.Module):
    """x divided by its root mean square, scaled; the mean is computed in float32."""

    size: int
    eps: float
    dtype: Any
    axis: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        scale = self.param("scale", init, (self.size,), self.dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * scale


class LayerNorm(nn.Module):
    """x minus its mean, divided by its standard deviation, scaled and shifted, in float32."""

    size: int
    eps: float
    dtype: Any
    axis: str | None = None
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        ones = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, (self.axis,))
        scale = self.param("scale", ones, (self.size,), self.dtype)
        bias = self.param("bias", zeros, (self.size,), self.dtype) if self.use_bias else 0
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide - jnp.mean(wide, -1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (wide * scale + bias).astype(x.dtype)


class Projection(nn.Module):
    """A linear map over the last `len(inputs)` axes, its weight shaped inputs + outputs.

    Attributes:
      inputs, outputs: (size, logical axis) of each contracted axis, and of each output axis.
      axis_names: mesh axes that divide the contracted axes.
      weights: the format of a quantized weight. Its scales, and zero points if there are any, are
        float32 [G, outputs...]; a mesh that divides the inputs divides the G groups.
    """

    inputs: tuple[tuple[int, str | None], ...]
    outputs: tuple[tuple[int, str | None], ...]
    use_bias: bool
    dtype: Any
    axis_names: tuple[str, ...] = ()
    weights: WeightFormat | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = tuple(size for size, _ in self.inputs + self.outputs)
        axes = tuple(axis for _, axis in self.inputs + self.outputs)
        n = len(self.inputs)
        contracted = tuple(range(x.ndim - n, x.ndim)), tuple(range(n))
        precision = dot_precision(self.dtype)
        if self.weights is None:
            scaled = nn.initializers.variance_scaling(
                1.0, "fan_in", "normal", in_axis=range(n), out_axis=range(n, len(shape))
            )
            init = nn.with_logical_partitioning(scaled, axes)
            weight = self.param("weight", init, shape, self.dtype)

            def product(x):
                return jax.lax.dot_general(x, weight, (contracted, ((), ())), precision=precision)
        else:
            parts = self._quantized(shape, axes)

            def product(x):
                return quantized.product(x, *parts, precision)

        out = collectives.psum(at_least_two_rows(product, x, n), self.axis_names)
        if self.use_bias:
            init = nn.with_logical_partitioning(nn.initializers.zeros, axes[n:])
            out = out + self.param("bias", init, shape[n:], self.dtype)
        return out

    def _quantized(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> tuple[Array, Array, Array | None]:
        """Returns weight [O..., I...], scale and zero point (or None), at first random.

        Args:
          shape, axes: of the unquantized weight, [I..., O...].
        """
        form, n = self.weights, len(self.inputs)
        assert form is not None
        inputs = math.prod(shape[:n])
        groups = (form.groups(inputs), *shape[n:])
        group_axes = (None if form.group is None else axes[0], *axes[n:])

        def values(key, shape, dtype):
            deviations = jax.random.truncated_normal(key, -DEVIATIONS, DEVIATIONS, shape)
            return jnp.rint(deviations * (form.largest / DEVIATIONS)).astype(dtype)

        scaled = nn.initializers.constant(DEVIATIONS / form.largest / math.sqrt(inputs))
        init = nn.with_logical_partitioning(values, axes[n:] + axes[:n])
        weight = self.param("weight", init, shape[n:] + shape[:n], form.dtype)
        init = nn.with_logical_partitioning(scaled, group_axes)
        scale = self.param("scale", init, groups, jnp.float32)
        if not form.zeros:
            return weight, scale, None
        init = nn.with_logical_partitioning(nn.initializers.zeros, group_axes)
        return weight, scale, self.param("zero", init, groups, jnp.float32)


def embedding_lookup(
    table: Float[Array, "V E"], tokens: Int[Array, "*B"], split: Split
) -> Float[Array, "*B E"]:
    """Returns rows of an embedding; an all-reduce combines the parts of several shards."""
    if not split.axes:
        return jnp.take(table, tokens, axis=0)
    local = tokens - collectives.axis_index(split.axes) * table.shape[0]
    is_local = (local >= 0) & (local < table.shape[0])
    rows = jnp.take(table, local.clip(0, table.shape[0] - 1), axis=0)
    return collectives.psum(jnp.where(is_local[..., None], rows, 0), split.axes)
