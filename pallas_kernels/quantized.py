"""`Quantized`: keys or values in 8 or 4 bits, with one scale for each token and head.

A decoding step is bound by reading the cache, so half the bytes take half the time. Because each
token has its scale, tokens can be written and moved independently.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

LARGEST = {8: 127, 4: 7}  # integer by bits; the range is symmetric, without -128 and -8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array [..., D] stored as integers with a scale for each vector of D.

    Attributes:
      values: [..., D] in 8 bits. In 4 bits [..., D/2]: byte i has element i in its lower half and
        element D/2 + i in its upper half.
      scales: the value of an integer step, [...].
      bits: 8 or 4.
    """

    values: Int8[Array, "*leading D"] | Int8[Array, "*leading D/2"]
    scales: Float[Array, "*leading"]
    bits: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized array, [..., D]."""
        return (*self.values.shape[:-1], self.values.shape[-1] * 8 // self.bits)

    @property
    def ndim(self) -> int:
        return self.values.ndim


def quantize(x: Float[Array, "*leading D"], bits: int, *, power_of_two: bool = False) -> Quantized:
    """Returns x quantized to 8 or 4 bits with a scale for each vector of D.

    The scale is max|x| / 127 (8 bits) or max|x| / 7 (4 bits), in float32; the error of an element
    is at most half of it. A vector of zeros stays zeros. x must be finite.

    With `power_of_two` it is the next power of two. Then the elements are exact in every
    floating-point dtype (in float16 with scales of 2 ** -24 to 512), quantizing them again changes
    nothing, and a product of a kernel has the same bits with integers and a scale as with elements.

    Raises:
      ValueError: unsupported bits, x is not a floating array, or D is odd with 4 bits.
    """
    if bits not in LARGEST:
        raise ValueError(f"bits={bits} is not supported: use one of {sorted(LARGEST)}")
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{list(x.shape)}: it must be a floating array [..., D]")
    if bits == 4 and x.shape[-1] % 2:
        raise ValueError(
            f"x has an odd head size D={x.shape[-1]}, but a byte stores two elements of 4 bits: "
            "use bits=8"
        )
    x = x.astype(jnp.float32)
    largest = LARGEST[bits]
    scales = jnp.abs(x).max(-1, initial=0) / largest
    if power_of_two:
        mantissa, exponent = jnp.frexp(scales)  # in [0.5, 1)
        scales = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5)) * (scales > 0)
    steps = jnp.round(x / jnp.where(scales == 0, 1, scales)[..., None])
    values = jnp.clip(steps, -largest, largest).astype(jnp.int8)
    if bits == 4:
        low, high = jnp.split(values, 2, axis=-1)
        values = (high << 4) | (low & 0xF)
    return Quantized(values, scales, bits)


def leaves(entries: Array | Quantized) -> tuple[Array, Array | None]:
    """Returns the entries, and their scales if they are integers."""
    return (entries.values, entries.scales) if isinstance(entries, Quantized) else (entries, None)


def dequantize(quantized: Quantized, dtype: jnp.dtype) -> Float[Array, "*leading D"]:
    """Returns the dequantized array; the product is rounded to dtype once."""
    values = quantized.values
    if quantized.bits == 4:  # a right shift of an int8 extends its sign
        values = jnp.concatenate([(values << 4) >> 4, values >> 4], axis=-1)
    product_dtype = jnp.promote_types(dtype, jnp.float32)
    return (
        values.astype(product_dtype) * quantized.scales[..., None].astype(product_dtype)
    ).astype(dtype)
