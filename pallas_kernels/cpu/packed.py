"""Products with matrices in the formats of GGUF files, in the native kernel `packed.cc`.

With few rows a product takes the time of reading its matrix. Activations are rounded to 8 bits for
each group of 32 inputs, so that products are sums of integers: a row's result has the same bits in
any number of rows. Files are packed when they are loaded, with the values and scales they have.
"""

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.cpu import build

OUTPUTS = 16  # of a block
ALIGNMENT = 64  # bytes, of arrays that XLA takes
GROUP = 32  # inputs with one scale of rounded activations
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Format:
    """A type of GGUF tensors as it is packed; an element is (value - offset) * scale + minimum.

    Attributes:
      name: name of the type.
      number: number of the type in GGUF files.
      bits: bits of a packed value.
      scaled: inputs with one scale.
      offset: that is subtracted from values.
      has_minima: whether groups have minima.
      is_k: whether scales have two levels, float16 for 256 inputs and 8 bits for `scaled`.
      is_signed: whether the 8-bit scales are signed.
    """

    name: str
    number: int
    bits: int
    scaled: int = 32
    offset: int = 0
    has_minima: bool = False
    is_k: bool = False
    is_signed: bool = False

    @property
    def inputs(self) -> int:
        """Inputs of a unit."""
        return 256 if self.is_k else GROUP

    @property
    def first(self) -> int:
        """Bytes before the 8-bit scales of a unit, or before its values."""
        return 2 * OUTPUTS * (1 + self.has_minima)

    @property
    def head(self) -> int:
        """Bytes before the values of a unit."""
        if not self.is_k:
            return self.first
        scales = OUTPUTS * self.inputs // self.scaled * (1 + self.has_minima)
        return -(-(self.first + scales) // 64) * 64

    @property
    def bytes(self) -> int:
        """Bytes of a unit, which has 16 outputs."""
        return self.head + OUTPUTS * self.inputs * self.bits // 8

    def shape(self, outputs: int, inputs: int) -> tuple[int, int, int]:
        """Returns the shape of a packed matrix."""
        return outputs // OUTPUTS, inputs // self.inputs, self.bytes

    def elements(self, shape: tuple[int, ...]) -> int:
        """Returns the elements of a packed matrix of a shape."""
        return shape[0] * OUTPUTS * shape[1] * self.inputs

    def fits(self, outputs: int, inputs: int) -> bool:
        """Returns whether a matrix can be packed."""
        return outputs % OUTPUTS == 0 and inputs % self.inputs == 0


FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("Q4_0", 2, 4, offset=8),
        Format("Q4_1", 3, 4, has_minima=True),
        Format("Q5_0", 6, 5, offset=16),
        Format("Q5_1", 7, 5, has_minima=True),
        Format("Q8_0", 8, 8, offset=128),
        Format("Q2_K", 10, 4, 16, has_minima=True, is_k=True),
        Format("Q3_K", 11, 4, 16, offset=4, is_k=True, is_signed=True),
        Format("Q4_K", 12, 4, has_minima=True, is_k=True),
        Format("Q5_K", 13, 5, has_minima=True, is_k=True),
        Format("Q6_K", 14, 6, 16, offset=32, is_k=True, is_signed=True),
        Format("IQ4_NL", 20, 8, offset=128),
    )
}


ROUNDED = ("Q4_0", "Q8_0")  # to which other matrices can be rounded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed matrix [O..., inputs].

    Attributes:
      data: uint8 [outputs / 16, units, bytes].
      weight_format: name in `FORMATS`.
      outputs: sizes of the axes O.
    """

    data: Any  # an array of JAX or NumPy
    weight_format: str = dataclasses.field(metadata={"static": True})
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * FORMATS[self.weight_format].inputs


def pack(
    stored: UInt8[np.ndarray, "rows bytes"] | Float[np.ndarray, "rows inputs"],
    weight_format: str,
    order: np.ndarray | None = None,
    to: str | None = None,
    threads: int = 2,
) -> UInt8[np.ndarray, "blocks units bytes"]:
    """Returns a matrix as a GGUF file has it, packed.

    Args:
      stored: the bytes of each row, or its elements in float32.
      weight_format: name of its type in `FORMATS`, or "F32".
      order: the row of the file of each output; None: all rows.
      to: another type, of `ROUNDED`, to which elements are rounded as llama.cpp does; None:
        `weight_format`.
      threads: that pack.

    Raises RuntimeError without the native kernels, and ValueError for rows that do not exist, or
    that the format does not fit.
    """
    import gguf  # takes a third of a second to import, and only files need it

    to = weight_format if to is None else to
    library = build.library()
    if library is None:
        raise RuntimeError(f"a matrix in {to} needs the CPU kernels: {build.unavailable_reason()}")
    ggml_type = gguf.GGMLQuantizationType[weight_format]
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    stored = np.ascontiguousarray(stored).view(np.uint8)
    rows, row_bytes = stored.shape
    order = np.arange(rows) if order is None else order
    if order.size and not 0 <= order.min() <= order.max() < rows:
        raise ValueError(f"order has rows from {order.min()} to {order.max()} of {rows}")
    outputs, inputs = len(order), row_bytes // block_bytes * block_inputs
    if not FORMATS[to].fits(outputs, inputs) or (to != weight_format and to not in ROUNDED):
        raise ValueError(
            f"a matrix [{outputs}, {inputs}] in {weight_format} cannot be packed as {to}"
        )
    packed = _aligned(FORMATS[to].shape(outputs, inputs))
    order = np.ascontiguousarray(order, np.int32)
    library.magicjax_pack(
        ctypes.c_int64(ggml_type),
        ctypes.c_int64(gguf.GGMLQuantizationType[to]),
        ctypes.c_void_p(stored.ctypes.data),
        ctypes.c_void_p(order.ctypes.data),
        ctypes.c_int64(outputs),
        ctypes.c_int64(inputs),
        ctypes.c_int64(row_bytes),
        ctypes.c_void_p(packed.ctypes.data),
        ctypes.c_int(threads),
    )
    return packed


def _aligned(shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
    """Returns an array that JAX uses without a copy, in large pages where there are any.

    NumPy asks for large pages, which are read faster, and XLA does not.
    """
    size = math.prod(shape)
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].reshape(shape)


def take_blocks(
    data: UInt8[Array, "blocks units bytes"], blocks: Int[np.ndarray, "B"]
) -> UInt8[Array, "B units bytes"]:
    """Returns some blocks of 16 outputs of a packed matrix."""
    host = np.asarray(data)
    chosen = _aligned((len(blocks), *host.shape[1:]))
    np.take(host, blocks, axis=0, out=chosen)
    return jax.device_put(chosen)


def products(
    x: Float[Array, "..."], matrices: Sequence[Packed], axes: int, dtype: Any
) -> list[Float[Array, "..."]]:
    """Returns the product of x, rounded to 8 bits, with each matrix.

    Args:
      x: rows [B..., I...] in a dtype of `FLOATS`; rounded once for all matrices.
      matrices: with as many inputs as I.
      axes: the number of axes I.
      dtype: dtype of the results [B..., O...], one of `FLOATS`.
    """
    rows = x.shape[: x.ndim - axes]
    results = [jax.ShapeDtypeStruct((*rows, *matrix.outputs), dtype) for matrix in matrices]
    call = jax.ffi.ffi_call("magicjax_packed_linear", results, vmap_method="sequential")
    numbers = np.array([FORMATS[matrix.weight_format].number for matrix in matrices])
    inputs = np.int64(math.prod(x.shape[x.ndim - axes :]))
    return list(call(x, *(matrix.data for matrix in matrices), inputs=inputs, types=numbers))


def rows(matrix: Packed, numbers: Int[Array, "*B"]) -> Float[Array, "*B inputs"]:
    """Returns rows of a matrix in float32, zeros for numbers that it does not have."""
    result = jax.ShapeDtypeStruct((*numbers.shape, matrix.inputs), jnp.float32)
    call = jax.ffi.ffi_call("magicjax_packed_rows", result, vmap_method="sequential")
    number = np.int64(FORMATS[matrix.weight_format].number)
    return call(matrix.data, numbers.astype(jnp.int32), type=number)


def dequantize(matrix: Packed, xp: Any = jnp) -> Float[Array, "*O inputs"]:
    """Returns the matrix in float32.

    Args:
      matrix: whose data is an array of `xp`.
      xp: jax.numpy or numpy.
    """
    fmt, data = FORMATS[matrix.weight_format], matrix.data
    blocks, units, _ = data.shape

    def float16_scales(first):  # [blocks, units, 1, 16, 1]
        pairs = data[..., first : first + 2 * OUTPUTS].reshape(blocks, units, OUTPUTS, 2)
        values: Any = pairs
        if xp is np:
            values = np.ascontiguousarray(values).view(np.float16)[..., 0]
        else:
            values = jax.lax.bitcast_convert_type(values, jnp.float16)
        return values.astype(np.float32)[:, :, None, :, None]

    def byte_scales(first, dtype):  # [blocks, units, scales, 16, 1]
        count = fmt.inputs // fmt.scaled
        values = data[..., first : first + OUTPUTS * count].astype(dtype).astype(np.float32)
        return values.reshape(blocks, units, count, OUTPUTS, 1)

    scale, minimum = float16_scales(0), float16_scales(2 * OUTPUTS) if fmt.has_minima else 0
    if fmt.is_k:
        scale = scale * byte_scales(fmt.first, np.int8 if fmt.is_signed else np.uint8)
        if fmt.has_minima:
            after = fmt.first + OUTPUTS * fmt.inputs // fmt.scaled
            minimum = -minimum * byte_scales(after, np.uint8)
    # [blocks, units, groups, vectors, 16, 4], of which 4 or 8 vectors have the lowest bits.
    values = data[..., fmt.head :].reshape(blocks, units, -1, fmt.bits, OUTPUTS, 4)
    if fmt.bits < 8:
        low, high = values[..., :4, :, :], values[..., 4:, :, :]
        values = xp.concatenate([low & 15, low >> 4], -3)
        if fmt.bits == 5:
            shifts = np.arange(8, dtype=np.uint8)[:, None, None]
            values = values | ((high >> shifts) & 1) << 4
        if fmt.bits == 6:
            shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None, None]
            upper = [((high[..., i : i + 1, :, :] >> shifts) & 3) << 4 for i in (0, 1)]
            values = values | xp.concatenate(upper, -3)
    values = values.swapaxes(-3, -2).reshape(blocks, units, -1, OUTPUTS, GROUP)
    values = values.astype(np.float32) - fmt.offset
    if fmt.scaled < GROUP:  # [blocks, units, scales, 16, scaled]
        values = values.reshape(blocks, units, -1, OUTPUTS, GROUP // fmt.scaled, fmt.scaled)
        values = values.swapaxes(-3, -2).reshape(blocks, units, -1, OUTPUTS, fmt.scaled)
    dense = values * scale + minimum
    dense = dense.transpose(0, 3, 1, 2, 4).reshape(*matrix.outputs, -1)
    return dense


def round_activations(
    x: Float[np.ndarray, "rows inputs"],
) -> tuple[Int[np.ndarray, "rows inputs"], Float[np.ndarray, "rows groups"]]:
    """Returns x as the kernel rounds it: integers from -127 to 127, and scales of groups of 32."""
    groups = np.asarray(x, np.float32).reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    integers = np.rint(groups * inverse).astype(np.int32)
    return integers.reshape(len(x), -1), (largest / np.float32(127))[..., 0]
