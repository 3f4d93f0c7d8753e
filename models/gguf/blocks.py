"""GGUF's quantized tensors whose blocks are integers with scales, and perhaps minima.

A weight is value * scale + minimum, with a scale and a minimum per row and group of columns. Where
matrices are not packed (`models.gguf.files`), they are read as the tensors `weight_packed`,
`weight_scale` and `weight_min`, of which the first two are those of compressed-tensors'
"pack-quantized". The block formats are those of ggml's `ggml-quants.c`.
"""

from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np

from models.quantized_checkpoints import pack

GgmlType = gguf.GGMLQuantizationType
TWO_BIT_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]  # shifts to the pairs of bits of a byte
IQ4_NL = np.array(gguf.quants.IQ4_NL.kvalues) + 128


class BlockFormat(NamedTuple):
    """A block format.

    Attributes:
      bits: bits of a packed value.
      group: values with one scale.
      read: returns (values from 0 to 2**bits - 1 [R, C], scales [R, G], minima [R, G] or None) of
        the stored bytes [R, N].
      has_minima: whether there are minima.
      dtype: dtype of scales and minima.
    """

    bits: int
    group: int
    read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]]
    has_minima: bool = False
    dtype: str = "F16"

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of the parts of a matrix of shape `shape`."""
        rows, columns = shape
        parts: dict[str, tuple[str, tuple[int, ...]]]
        parts = {"weight_packed": ("I32", (rows, columns * self.bits // 32))}
        for name in ("weight_scale", "weight_min")[: 1 + self.has_minima]:
            parts[name] = self.dtype, (rows, columns // self.group)
        return parts

    def parts(self, stored: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the parts of a matrix, stored as bytes [R, N]."""
        values, scales, minima = self.read(stored)
        if minima is not None:  # constant groups, whose scale must not be zero
            constant = (scales == 0) & (minima != 0)
            scales = np.where(constant, minima, scales)
            values = np.where(np.repeat(constant, self.group, 1), 0, values)
        parts = {"weight_packed": pack(values, self.bits), "weight_scale": scales}
        return parts if minima is None else parts | {"weight_min": minima}


def _float16(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Returns [R, G] of the 16-bit numbers that begin at byte `offset` of blocks [R, G, N]."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")[..., 0]


def _blocks(stored: np.ndarray, size: int) -> np.ndarray:
    return stored.reshape(len(stored), -1, size)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns [R, G * 32] of [R, G, 16]: first the low halves of a block, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def _q4_0(stored):
    blocks = _blocks(stored, 18)
    return _nibbles(blocks[..., 2:]), _float16(blocks, 0), None


def _q4_1(stored):
    blocks = _blocks(stored, 20)
    return _nibbles(blocks[..., 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(stored):
    blocks = _blocks(stored, 34)
    return (blocks[..., 2:] ^ 128).reshape(len(stored), -1), _float16(blocks, 0), None


def _iq4_nl(stored):
    blocks = _blocks(stored, 18)
    return IQ4_NL[_nibbles(blocks[..., 2:])].astype(np.uint8), _float16(blocks, 0), None


def _five_bit(packed):
    """Returns [R, G * 32] of [R, G, 20]: 4 bytes with the fifth bits, and 16 as in `_nibbles`."""
    fifth_bits = np.unpackbits(packed[..., :4], axis=-1, bitorder="little")
    return _nibbles(packed[..., 4:]) | fifth_bits.reshape(len(packed), -1) << 4


def _q5_0(stored):
    blocks = _blocks(stored, 22)
    return _five_bit(blocks[..., 2:]) + np.uint8(128 - 16), _float16(blocks, 0), None


def _q5_1(stored):
    blocks = _blocks(stored, 24)
    return _five_bit(blocks[..., 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _scaled(blocks, offset, integers):
    """Returns [R, G * N] of integers [R, G, N] times the 16-bit numbers that begin at `offset`."""
    products = _float16(blocks, offset)[..., None] * integers.astype(np.float32)
    return products.reshape(len(blocks), -1)


def _six_bit_scales(blocks):
    """Returns scales and minima of Q4_K and Q5_K: 6-bit integers times two 16-bit numbers."""
    low, high, both = (blocks[..., offset : offset + 4] for offset in (4, 8, 12))
    scales = np.concatenate([low & 63, (both & 15) | (low >> 6 << 4)], -1)
    minima = np.concatenate([high & 63, (both >> 4) | (high >> 6 << 4)], -1)
    return _scaled(blocks, 0, scales), -_scaled(blocks, 2, minima)


def _q4_k(stored):
    """Blocks of 256: 8 groups."""
    blocks = _blocks(stored, 144)
    return _nibbles(blocks[..., 16:].reshape(len(stored), -1, 32)), *_six_bit_scales(blocks)


def _q5_k(stored):
    """Blocks of 256: 8 groups, whose fifth bits are bits of 32 bytes."""
    blocks = _blocks(stored, 176)
    values = _nibbles(blocks[..., 48:].reshape(len(stored), -1, 32))
    fifth_bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return values | fifth_bits.reshape(values.shape) << 4, *_six_bit_scales(blocks)


def _two_bit(packed):
    """Returns [R, G, 256] of [R, G, 64]: in each half four times 32 values, the low bits first."""
    halves = packed.reshape(*packed.shape[:2], 2, 1, 32)
    return (halves >> TWO_BIT_SHIFTS & 3).reshape(*packed.shape[:2], 256)


def _q2_k(stored):
    """Blocks of 256: 16 groups, whose 4-bit scales and minima multiply two 16-bit numbers."""
    blocks = _blocks(stored, 84)
    values, scales_and_minima = _two_bit(blocks[..., 16:80]), blocks[..., :16]
    minima = -_scaled(blocks, 82, scales_and_minima >> 4)
    return values.reshape(len(stored), -1), _scaled(blocks, 80, scales_and_minima & 15), minima


def _q3_k(stored):
    """Blocks of 256: 16 groups, whose 6-bit scales, minus 32, multiply a 16-bit number.

    The third bits of values, minus 4, are bits of 32 bytes.
    """
    blocks = _blocks(stored, 110)
    third_bits = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = _two_bit(blocks[..., 32:96]) | third_bits.reshape(*blocks.shape[:2], 256) << 2
    low, high = blocks[..., 96:104], blocks[..., None, 104:108]
    low_bits = np.concatenate([low & 15, low >> 4], -1)
    scales = low_bits | (high >> TWO_BIT_SHIFTS & 3).reshape(low_bits.shape) << 4
    values = values.reshape(len(stored), -1) + np.uint8(8 - 4)
    return values, _scaled(blocks, 108, scales.astype(np.int8) - 32), None


def _q6_k(stored):
    """Blocks of 256: 16 groups, whose 8-bit scales multiply a 16-bit number; values minus 32.

    Each half of a block has 64 bytes with 4 bits of two values, and 32 with 2 bits of four.
    """
    blocks = _blocks(stored, 210)
    low = blocks[..., :128].reshape(len(stored), -1, 2, 64)
    high = blocks[..., 128:192].reshape(len(stored), -1, 2, 1, 32)
    low_bits = np.concatenate([low & 15, low >> 4], -1).reshape(*low.shape[:-1], 4, 32)
    values = (low_bits | (high >> TWO_BIT_SHIFTS & 3) << 4) + np.uint8(128 - 32)
    scales = _scaled(blocks, 208, blocks[..., 192:208].view(np.int8))
    return values.reshape(len(stored), -1), scales, None


def mxfp4(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes [..., G, 16] and scales [..., G] of bytes [..., N], as gpt-oss has them.

    A block is the exponent of 32 values and 16 bytes: the first half of the codes in the low
    halves, the others in the high ones. In gpt-oss's files a byte has two adjacent codes.
    """
    blocks = stored.reshape(*stored.shape[:-1], -1, 17)
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1)
    return codes[..., ::2] | codes[..., 1::2] << 4, blocks[..., 0]


BLOCK_FORMATS = {
    GgmlType.Q4_0: BlockFormat(4, 32, _q4_0),
    GgmlType.Q4_1: BlockFormat(4, 32, _q4_1, has_minima=True),
    GgmlType.Q5_0: BlockFormat(8, 32, _q5_0),
    GgmlType.Q5_1: BlockFormat(8, 32, _q5_1, has_minima=True),
    GgmlType.Q8_0: BlockFormat(8, 32, _q8_0),
    GgmlType.IQ4_NL: BlockFormat(8, 32, _iq4_nl),
    GgmlType.Q2_K: BlockFormat(4, 16, _q2_k, has_minima=True, dtype="F32"),
    GgmlType.Q3_K: BlockFormat(4, 16, _q3_k, dtype="F32"),
    GgmlType.Q4_K: BlockFormat(4, 32, _q4_k, has_minima=True, dtype="F32"),
    GgmlType.Q5_K: BlockFormat(8, 32, _q5_k, has_minima=True, dtype="F32"),
    GgmlType.Q6_K: BlockFormat(8, 16, _q6_k, dtype="F32"),
}
