"""Tensors of GGUF files as those of Hugging Face's directories, or packed for the CPU kernels.

llama.cpp permutes, groups, transposes or shifts some of them. They are memory-mapped, and read when
they are needed.
"""

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import gguf
import numpy as np

from models.gated_delta import DeltaNetShape
from models.gguf.blocks import BLOCK_FORMATS, BlockFormat, mxfp4
from models.hf_tensors import Fused, Interleaved
from models.quantized_checkpoints import MXFP4_GROUP, MXFP4_PARTS
from pallas_kernels.cpu.packed import FORMATS, GROUP, OUTPUTS, pack


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of a GGUF file.

    Attributes:
      file: with the tensor.
      name: in the file.
      shape: numbers of elements, rows first.
      type_name: name of its `gguf.GGMLQuantizationType`.
      offset, size: its bytes in the file.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    size: int

    @property
    def tensor_type(self) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType[self.type_name]

    @property
    def data(self) -> np.ndarray:
        """The bytes of each row, memory-mapped; the memory is free when the array is."""
        mapped = np.memmap(self.file, np.uint8, "r", self.offset, self.size)
        return mapped.reshape(*self.shape[:-1], -1)

    def dequantized(self) -> np.ndarray:
        """Returns the tensor in float32."""
        return gguf.dequantize(self.data, self.tensor_type).astype("<f4", copy=False)


class TiledHeads(NamedTuple):
    """The order of the value heads of a gated delta net in a tensor of a file.

    Value head j of key head i has index j * Hk + i, and in Hugging Face format i * H / Hk + j.

    Attributes:
      shape: the sizes of the gated delta net.
      axis: the axis of the heads.
      rows_before: rows before the heads, those of q and k.
    """

    shape: DeltaNetShape
    axis: int = 0
    rows_before: int = 0

    def untiled(self, tiled: np.ndarray) -> np.ndarray:
        """Returns values or bytes in the order of Hugging Face format."""
        rows = tiled.swapaxes(0, self.axis)
        heads = rows[self.rows_before :]
        size = len(heads) // self.shape.value_heads
        tiles = heads.reshape(-1, self.shape.key_heads, size, *rows.shape[1:])
        heads = tiles.swapaxes(0, 1).reshape(heads.shape)
        return np.concatenate([rows[: self.rows_before], heads]).swapaxes(0, self.axis)

    def can_reorder(self, inputs: int) -> bool:
        """Whether a head has whole blocks of so many inputs, so that they can be reordered."""
        return self.axis == 0 or self.shape.value_dim % inputs == 0


class Weight(NamedTuple):
    """A tensor of a file and its shape in Hugging Face format.

    Attributes:
      shape: shape of the dequantized tensor.
      source: the tensor of the file.
      permuted_heads: heads of a matrix whose rows llama.cpp permutes; 0 for other tensors.
      qkv_groups: (groups, rows of q, k and v in a group) of rows that llama.cpp does not group;
        None: of another tensor.
      transposed: whether llama.cpp transposes it.
      expert: index of the expert in a tensor that has all of them; None for other tensors.
      block_format: of a matrix [outputs, inputs] that stays quantized; None for other tensors.
      shift: what llama.cpp adds to all values.
      is_negated_exp: whether the file has minus the exponentials of the values.
      appended: another tensor of the file, whose rows follow; None: there is none.
      tiled_heads: the order of heads in a tensor of a gated delta net that llama.cpp reorders;
        None: of another tensor.
    """

    shape: tuple[int, ...]
    source: FileTensor
    permuted_heads: int = 0
    qkv_groups: tuple[int, tuple[int, ...]] | None = None
    transposed: bool = False
    expert: int | None = None
    block_format: BlockFormat | None = None
    shift: float = 0.0
    is_negated_exp: bool = False
    appended: FileTensor | None = None
    tiled_heads: TiledHeads | None = None

    @property
    def sources(self) -> tuple[FileTensor, ...]:
        return (self.source,) if self.appended is None else (self.source, self.appended)

    @property
    def available_format(self) -> BlockFormat | None:
        """The format of a matrix that can stay quantized; None: its values are dequantized."""
        first, *others = {source.tensor_type for source in self.sources}
        block_format = None if others else BLOCK_FORMATS.get(first)
        tiled = self.tiled_heads
        is_cut = (
            block_format is not None
            and tiled is not None
            and not tiled.can_reorder(block_format.group)
        )
        return None if is_cut else block_format

    def shapes(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of what a directory stores for the tensor `name`."""
        if self.block_format is None:
            return {name: ("F32", self.shape)}
        module = name.removesuffix("weight")
        shape = self.shape[::-1] if self.transposed else self.shape
        return {module + part: entry for part, entry in self.block_format.shapes(shape).items()}

    def values(self) -> list[np.ndarray]:
        """Returns the arrays of `shapes`."""
        sources = [self._values(source) for source in self.sources]
        values = [np.concatenate(x) if len(x) > 1 else x[0] for x in zip(*sources, strict=True)]
        if self.is_negated_exp:
            if max(array.max() for array in values) >= 0:
                raise ValueError(
                    f"{self.source.name} has values not below 0: llama.cpp writes -exp(A_log); "
                    "convert the model again"
                )
            values = [np.log(-array) for array in values]
        if self.shift:
            values = [array - np.float32(self.shift) for array in values]
        if self.permuted_heads:
            values = [unpermute(array, self.permuted_heads) for array in values]
        if self.qkv_groups is not None:
            values = [group_qkv(array, *self.qkv_groups) for array in values]
        if self.tiled_heads is not None:
            values = [self.tiled_heads.untiled(array) for array in values]
        if self.block_format is None:
            values = [
                (array.T if self.transposed else array).reshape(self.shape) for array in values
            ]
        return [np.ascontiguousarray(array) for array in values]

    def _values(self, source: FileTensor) -> list[np.ndarray]:
        """Returns the arrays of one of the sources, as llama.cpp has them."""
        data = source.data if self.expert is None else source.data[self.expert]
        if self.block_format is not None:
            return list(self.block_format.parts(data).values())
        return [gguf.dequantize(data, source.tensor_type).astype("<f4", copy=False)]

    @property
    def packed_type(self) -> str | None:
        """The type in which the CPU kernels multiply the matrix; None if they do not."""
        type_name = self.source.type_name
        is_matrix = len(self.source.shape) == 2 and not self.shift and self.expert is None
        if not is_matrix or self.appended is not None or type_name not in FORMATS:
            return None
        fits = FORMATS[type_name].fits(OUTPUTS, self.source.shape[1])
        can_reorder = self.tiled_heads is None or self.tiled_heads.can_reorder(GROUP)
        return type_name if fits and can_reorder else None

    def packed(self, fused: Fused | Interleaved | None, to: str) -> np.ndarray:
        """Returns the packed matrix, of type `to`, of a parameter, which may have some rows."""
        rows = np.arange(self.source.shape[0])
        rows = unpermute(rows, self.permuted_heads) if self.permuted_heads else rows
        rows = rows if self.qkv_groups is None else group_qkv(rows, *self.qkv_groups)
        tiled = self.tiled_heads
        rows = rows if tiled is None or tiled.axis else tiled.untiled(rows)
        rows = rows if fused is None else fused.part(rows)
        columns = tiled if tiled is not None and tiled.axis else None
        if columns is not None and columns.shape.has_tiles(to):
            columns = None
        values, type_name = self.source.data, self.source.type_name
        if type_name not in FORMATS or (
            columns and not columns.can_reorder(FORMATS[type_name].inputs)
        ):
            values, type_name = self.source.dequantized(), "F32"
        return pack(values if columns is None else columns.untiled(values), type_name, rows, to)


class Experts(NamedTuple):
    """A tensor of Hugging Face format that has all experts (gpt-oss).

    Attributes:
      shape: shape of the dequantized tensor, [experts, inputs, outputs] or [experts, outputs].
      sources: tensors of the file, [experts, outputs, inputs] or [experts, outputs]; the outputs of
        several alternate in the tensor.
      is_mxfp4: whether it stays quantized.
    """

    shape: tuple[int, ...]
    sources: tuple[FileTensor, ...]
    is_mxfp4: bool = False

    def shapes(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of what a directory stores for the tensor `name`."""
        if not self.is_mxfp4:
            return {name: ("F32", self.shape)}
        experts, inputs, outputs = self.shape
        groups = experts, outputs, inputs // MXFP4_GROUP
        blocks, scales = (name + part for part in MXFP4_PARTS)
        return {blocks: ("U8", (*groups, MXFP4_GROUP // 2)), scales: ("U8", groups)}

    def values(self) -> list[np.ndarray]:
        """Returns the arrays of `shapes`."""
        if self.is_mxfp4:
            codes, scales = zip(*(mxfp4(source.data) for source in self.sources), strict=True)
            return [_interleaved(codes), _interleaved(scales)]
        data = [source.dequantized() for source in self.sources]
        values = _interleaved(data)
        return [np.ascontiguousarray(values.swapaxes(1, 2)) if values.ndim == 3 else values]


def _interleaved(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns [experts, outputs of all parts, ...] of [experts, outputs, ...]."""
    experts, _, *rest = parts[0].shape
    return np.stack(parts, 2).reshape(experts, -1, *rest)


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows [heads * D, ...] in the order of Hugging Face's rotation.

    llama.cpp rotates adjacent rows of a head, and stores first and second halves interleaved.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def group_qkv(values: np.ndarray, groups: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Returns rows q, k, v of a group after those of another (Falcon), from all q, all k, all v."""
    parts = np.split(values, np.cumsum([groups * size for size in sizes])[:-1])
    shaped = [x.reshape(groups, size, *x.shape[1:]) for x, size in zip(parts, sizes, strict=True)]
    return np.concatenate(shaped, 1).reshape(values.shape)


class MappedTensors(Mapping[str, np.ndarray]):
    """The tensors of a GGUF file as Hugging Face's directories have them, read when needed."""

    def __init__(self, weights: Mapping[str, Weight | Experts]):
        self._weights = {part: (name, x) for name, x in weights.items() for part in x.shapes(name)}
        self._cached = threading.local()

    def __getitem__(self, name: str) -> np.ndarray:
        weight_name, weight = self._weights[name]
        cached = self._cached.__dict__  # the parts of a tensor are read one after the other
        if weight_name not in cached:
            cached.clear()
            cached[weight_name] = dict(
                zip(weight.shapes(weight_name), weight.values(), strict=True)
            )
        return cached[weight_name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
