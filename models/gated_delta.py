"""Gated delta nets: linear attention with a state in place of keys and values (Qwen3-Next).

Of a token with key k and value v, a head's state S [Dk, Dv] becomes

    S = a S + k d^T   where   d = beta (v - (a S)^T k),

and its output is S^T q. The decay a and beta are between 0 and 1 and depend on the token. q, k and
v come from a short causal convolution. As attention is, all that depends on other tokens is left to
`attend`: the module projects, and `attend` convolves and runs the recurrence.
Source: Gated Delta Networks (arXiv 2412.06464).
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from models.layers import LayerAttend, RMSNorm
from models.linear import Projection, project
from models.quantized import MatrixFormats
from pallas_kernels.cpu.packed import FORMATS
from sharding import EMBED, HEADS, Split, collectives

EPS = 1e-6  # of the length to which q and k are divided


@dataclasses.dataclass(frozen=True)
class DeltaNetShape:
    """The shapes of the gated delta nets of a decoder.

    Attributes:
      key_heads: heads of q and k.
      value_heads: H, heads of v and of the state; a multiple of `key_heads`, each of which serves
        adjacent ones.
      key_dim: Dk, the size of a head of q and k.
      value_dim: Dv, the size of a head of v.
      conv_width: W, the tokens that the convolution reads, its own included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            least = 2 if field.name == "conv_width" else 1
            if (value := getattr(self, field.name)) < least:
                raise ValueError(f"{field.name}={value} of a gated delta net: at least {least}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads={self.value_heads} of a gated delta net is not a multiple of "
                f"key_heads={self.key_heads}"
            )

    @property
    def channels(self) -> int:
        """C, the elements of q, k and v of a token, in the order of `channels_of`."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def channels_of(self, q: Array, k: Array, v: Array) -> Float[Array, "*B C"]:
        """Returns the channels of q, k [..., Hk * Dk] and v [..., H * Dv].

        Those of a key head and of the values that it serves are adjacent, so that a mesh divides
        them as it divides the heads.
        """
        by_head = [x.reshape(*x.shape[:-1], self.key_heads, -1) for x in (q, k, v)]
        return jnp.concatenate(by_head, -1).reshape(*q.shape[:-1], -1)

    def part(self, shards: int) -> "DeltaNetShape":
        """Returns the shapes on one of `shards` devices, which divide the heads."""
        key_heads, value_heads = self.key_heads // shards, self.value_heads // shards
        return dataclasses.replace(self, key_heads=key_heads, value_heads=value_heads)

    def has_tiles(self, weight_format: Any) -> bool:
        """Whether an output matrix of a format has its inputs in the order of GGUF files.

        There value head j of key head i is in place j * Hk + i. Packed units of 256 inputs have
        several heads, so that the matrix cannot be reordered: its inputs are. A matrix that is not
        in the order of GGUF files is not packed in such a format.
        """
        is_k = isinstance(weight_format, str) and FORMATS[weight_format].is_k
        return is_k and self.value_dim % FORMATS[weight_format].inputs != 0

    def state_bytes(self, itemsize: int) -> int:
        """Returns the bytes of a row's state in one layer, given those of an activation."""
        state = self.value_heads * self.key_dim * self.value_dim * max(4, itemsize)
        return state + (self.conv_width - 1) * self.channels * itemsize


@struct.dataclass
class DeltaNetInputs:
    """What a gated delta net passes to `attend`, which returns ([B, T, H, Dv], what to keep).

    Attributes:
      x: [B, T, C], q, k and v before the convolution (`DeltaNetShape.channels_of`).
      log_decay: [B, T, H], the logarithm of a, at least float32.
      beta: [B, T, H], at least float32.
      kernel: [C, W], of the convolution; the last element is the token's own.
      shape: static.
    """

    x: Float[Array, "B T C"]
    log_decay: Float[Array, "B T H"]
    beta: Float[Array, "B T H"]
    kernel: Float[Array, "C W"]
    shape: DeltaNetShape = struct.field(pytree_node=False)

    def heads(self, convolved: Float[Array, "B T C"]) -> tuple[Array, Array, Array]:
        """Returns q, k [B, T, Hk, Dk] and v [B, T, H, Dv] of the convolution's outputs."""
        s, x = self.shape, nn.silu(convolved)
        x = x.reshape(*x.shape[:2], s.key_heads, -1)
        q, k, v = jnp.split(x, (s.key_dim, 2 * s.key_dim), -1)

        def normalized(x: Array) -> Array:
            return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + EPS)

        v = v.reshape(*v.shape[:2], s.value_heads, s.value_dim)
        return normalized(q) * s.key_dim**-0.5, normalized(k), v


class GatedDeltaNet(nn.Module):
    """Projections, decays and gates of a gated delta net, around the recurrence in `attend`.

    A mesh divides its heads, and with them the states.
    """

    config: Any  # a `DecoderConfig`
    dtype: Any
    split: Split = Split()
    weights: MatrixFormats = MatrixFormats()
    backend: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "B T E"], attend: LayerAttend) -> tuple[Array, Any]:
        c = self.config
        s: DeltaNetShape = c.delta_net.part(self.split.shards)
        embed = ((c.hidden_size, EMBED),)
        key_heads = ((s.key_heads, HEADS), (s.key_dim, None))
        value_heads = ((s.value_heads, HEADS), (s.value_dim, None))
        outputs: dict[str, Any] = dict(q=key_heads, k=key_heads, v=value_heads, z=value_heads)
        outputs |= dict.fromkeys("ba", value_heads[:1])

        def projection(inputs, outputs, name, **options):
            options |= dict(weights=self.weights.of(name), backend=self.backend)
            return Projection(inputs, outputs, False, self.dtype, name=name, **options)

        q, k, v, z, b, a = project(
            x, *(projection(embed, axes, name) for name, axes in outputs.items())
        )
        mixed = s.channels_of(*(y.reshape(*y.shape[:2], -1) for y in (q, k, v)))
        state_dtype = jnp.promote_types(self.dtype, jnp.float32)
        log_rate = self._vector("log_rate", nn.initializers.zeros, value_heads[:1])
        step = self._vector("step_bias", nn.initializers.ones, value_heads[:1])
        rate = nn.softplus(a.astype(state_dtype) + step.astype(state_dtype))
        out, aux = attend(
            DeltaNetInputs(
                mixed,
                -jnp.exp(log_rate.astype(state_dtype)) * rate,
                nn.sigmoid(b.astype(state_dtype)),
                self._kernel(),
                s,
            )
        )
        norm = RMSNorm(s.value_dim, c.norm_eps, self.dtype, None, self.backend, name="norm")
        gate = nn.silu(z.astype(state_dtype))
        out = (norm(out.astype(self.dtype)) * gate).astype(self.dtype)
        if s.has_tiles(self.weights.of("out")):
            tiles = out.reshape(*out.shape[:2], s.key_heads, -1, s.value_dim).swapaxes(2, 3)
            out = tiles.reshape(out.shape)
        return projection(value_heads, embed, "out", axis_names=self.split.axes)(out), aux

    def _kernel(self) -> Float[Array, "C W"]:
        """Returns the convolution of this device's channels; all devices have the whole parameter.

        The parameter has the channels of q, k and v one after the other, as the matrix of a
        convolution with one input channel for each output.
        """
        s: DeltaNetShape = self.config.delta_net
        axes = (s.channels, None), (1, None), (s.conv_width, None)
        whole = self._vector("conv", nn.initializers.normal(0.5), axes)[:, 0].T
        keys = s.key_heads * s.key_dim
        q, k, v = (
            collectives.local_slice(channels, (), self.split.axes)
            for channels in jnp.split(whole, (keys, 2 * keys), -1)
        )
        return s.part(self.split.shards).channels_of(q, k, v).T

    def _vector(self, name: str, init: Any, axes: tuple[tuple[int, str | None], ...]) -> Array:
        shape, names = zip(*axes, strict=True)
        return self.param(name, nn.with_logical_partitioning(init, names), shape, self.dtype)
