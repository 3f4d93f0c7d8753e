"""`Quantized`: keys or values in 8 or 4 bits, with one scale for each token and head.

A decoding step reads the whole cache and computes little, so a cache of half the bytes is read in
half the time. Scales that stand beside their token let a token be written or moved by itself.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

LARGEST = {8: 127, 4: 7}  # of the integers, by bits; symmetric, so -128 and -8 are not used


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array [..., D] whose last axis is held in integers; the leaves share the leading axes.

    Attributes:
      values: [..., D] in 8 bits. In 4 bits [..., D/2]: byte i has element i in its lower half and
        element D/2 + i in its upper half.
      scales: what a step of the integers is worth, [...].
      bits: 8 or 4.
    """

    values: Int8[Array, "*leading D"] | Int8[Array, "*leading D/2"]
    scales: Float[Array, "*leading"]
    bits: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for, [..., D]."""
        return (*self.values.shape[:-1], self.values.shape[-1] * 8 // self.bits)

    @property
    def ndim(self) -> int:
        return self.values.ndim


def quantize(x: Float[Array, "*leading D"], bits: int) -> Quantized:
    """Returns x rounded to integers of 8 or 4 bits times a scale for each vector of D.

    The scale is max|x| / 127 (8 bits) or max|x| / 7 (4 bits), in float32; an element is off by at
    most half of it. A vector of zeros stays zeros. x must be finite.

    Raises:
      ValueError: other bits, an x that is no floating array, or an odd D with 4 bits.
    """
    if bits not in LARGEST:
        raise ValueError(f"bits={bits} is not supported: use one of {sorted(LARGEST)}")
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{list(x.shape)}: it must be a floating array [..., D]")
    if bits == 4 and x.shape[-1] % 2:
        raise ValueError(
            f"x has an odd head size D={x.shape[-1]}, and 4 bits go two to a byte: use bits=8"
        )
    x = x.astype(jnp.float32)
    largest = LARGEST[bits]
    scales = jnp.abs(x).max(-1, initial=0) / largest
    steps = jnp.round(x / jnp.where(scales == 0, 1, scales)[..., None])
    values = jnp.clip(steps, -largest, largest).astype(jnp.int8)
    if bits == 4:
        low, high = jnp.split(values, 2, axis=-1)
        values = (high << 4) | (low & 0xF)
    return Quantized(values, scales, bits)


def dequantize(quantized: Quantized, dtype: jnp.dtype) -> Float[Array, "*leading D"]:
    """Returns the array that `quantized` stands for; the product is rounded to dtype once."""
    values = quantized.values
    if quantized.bits == 4:  # shifting an int8 to the right repeats its sign
        values = jnp.concatenate([(values << 4) >> 4, values >> 4], axis=-1)
    wide = jnp.promote_types(dtype, jnp.float32)
    return (values.astype(wide) * quantized.scales[..., None].astype(wide)).astype(dtype)
