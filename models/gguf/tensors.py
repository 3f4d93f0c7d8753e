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
from models.gguf.blocks import KINDS, Kind, mxfp4
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


class Tiles(NamedTuple):
    """The order of the value heads of a gated delta net in a tensor of a file.

    Value head j of key head i is in place j * Hk + i, and in Hugging Face format in i * H / Hk + j.

    Attributes:
      shape: the sizes of the gated delta net.
      axis: the axis of the heads.
      first: rows before the heads, those of q and k.
    """

    shape: DeltaNetShape
    axis: int = 0
    first: int = 0

    def undone(self, stored: np.ndarray) -> np.ndarray:
        """Returns values or bytes in the order of Hugging Face format."""
        rows = stored.swapaxes(0, self.axis)
        heads = rows[self.first :]
        size = len(heads) // self.shape.value_heads
        tiles = heads.reshape(-1, self.shape.key_heads, size, *rows.shape[1:])
        heads = tiles.swapaxes(0, 1).reshape(heads.shape)
        return np.concatenate([rows[: self.first], heads]).swapaxes(0, self.axis)

    def keeps(self, inputs: int) -> bool:
        """Whether a head has whole blocks of so many inputs, so that they can be reordered."""
        return self.axis == 0 or self.shape.value_dim % inputs == 0


class Weight(NamedTuple):
    """A tensor of a file and its shape in Hugging Face format.

    Attributes:
      shape: shape of the dequantized tensor.
      stored: as in the file.
      heads: number of heads of a matrix whose rows llama.cpp permutes; 0 for other tensors.
      group: (groups, rows of q, k and v in a group) of rows that llama.cpp does not group; None: of
        another tensor.
      transposed: whether llama.cpp transposes it.
      expert: index of the expert in a tensor that has all of them; None for other tensors.
      kind: the form [outputs, inputs] of a matrix that stays quantized; None for other tensors.
      added: what llama.cpp adds to all values.
      is_log: whether the file has minus the exponentials of the values.
      after: another tensor of the file, whose rows follow; None: there is none.
      tiles: the order of heads in a tensor of a gated delta net that llama.cpp reorders; None: of
        another tensor.
    """

    shape: tuple[int, ...]
    stored: FileTensor
    heads: int = 0
    group: tuple[int, tuple[int, ...]] | None = None
    transposed: bool = False
    expert: int | None = None
    kind: Kind | None = None
    added: float = 0.0
    is_log: bool = False
    after: FileTensor | None = None
    tiles: Tiles | None = None

    @property
    def sources(self) -> tuple[FileTensor, ...]:
        return (self.stored,) if self.after is None else (self.stored, self.after)

    @property
    def whole_kind(self) -> Kind | None:
        """The form of a matrix that can stay quantized; None: its values are dequantized."""
        first, *others = {source.tensor_type for source in self.sources}
        kind = None if others else KINDS.get(first)
        cut = kind is not None and self.tiles is not None and not self.tiles.keeps(kind.group)
        return None if cut else kind

    def shapes(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of what a directory stores for the tensor `name`."""
        if self.kind is None:
            return {name: ("F32", self.shape)}
        module = name.removesuffix("weight")
        shape = self.shape[::-1] if self.transposed else self.shape
        return {module + part: entry for part, entry in self.kind.shapes(shape).items()}

    def values(self) -> list[np.ndarray]:
        """Returns the arrays of `shapes`."""
        sources = [self._values(source) for source in self.sources]
        values = [np.concatenate(x) if len(x) > 1 else x[0] for x in zip(*sources, strict=True)]
        if self.is_log:
            if max(part.max() for part in values) >= 0:
                raise ValueError(
                    f"{self.stored.name} has values not below 0: llama.cpp writes -exp(A_log); "
                    "convert the model again"
                )
            values = [np.log(-part) for part in values]
        if self.added:
            values = [part - np.float32(self.added) for part in values]
        if self.heads:
            values = [unpermute(part, self.heads) for part in values]
        if self.group is not None:
            values = [grouped(part, *self.group) for part in values]
        if self.tiles is not None:
            values = [self.tiles.undone(part) for part in values]
        if self.kind is None:
            values = [(part.T if self.transposed else part).reshape(self.shape) for part in values]
        return [np.ascontiguousarray(part) for part in values]

    def _values(self, source: FileTensor) -> list[np.ndarray]:
        """Returns the arrays of one of the sources, as llama.cpp has them."""
        data = source.data if self.expert is None else source.data[self.expert]
        if self.kind is not None:
            return list(self.kind.parts(data).values())
        return [gguf.dequantize(data, source.tensor_type).astype("<f4", copy=False)]

    @property
    def packed_type(self) -> str | None:
        """The type in which the CPU kernels multiply the matrix; None if they do not."""
        kind = self.stored.type_name
        is_matrix = len(self.stored.shape) == 2 and not self.added and self.expert is None
        if not is_matrix or self.after is not None or kind not in FORMATS:
            return None
        fits = FORMATS[kind].fits(OUTPUTS, self.stored.shape[1])
        return kind if fits and (self.tiles is None or self.tiles.keeps(GROUP)) else None

    def packed(self, fused: Fused | Interleaved | None, to: str) -> np.ndarray:
        """Returns the packed matrix, of type `to`, of a parameter, which may have some rows."""
        rows = np.arange(self.stored.shape[0])
        rows = unpermute(rows, self.heads) if self.heads else rows
        rows = rows if self.group is None else grouped(rows, *self.group)
        rows = rows if self.tiles is None or self.tiles.axis else self.tiles.undone(rows)
        rows = rows if fused is None else fused.part(rows)
        columns = self.tiles if self.tiles is not None and self.tiles.axis else None
        if columns is not None and columns.shape.has_tiles(to):
            columns = None
        stored, kind = self.stored.data, self.stored.type_name
        if kind not in FORMATS or (columns and not columns.keeps(FORMATS[kind].inputs)):
            stored, kind = self.stored.dequantized(), "F32"
        return pack(stored if columns is None else columns.undone(stored), kind, rows, to)


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
            return [_alternating(codes), _alternating(scales)]
        data = [source.dequantized() for source in self.sources]
        values = _alternating(data)
        return [np.ascontiguousarray(values.swapaxes(1, 2)) if values.ndim == 3 else values]


def _alternating(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns [experts, outputs of all parts, ...] of [experts, outputs, ...]."""
    experts, _, *rest = parts[0].shape
    return np.stack(parts, 2).reshape(experts, -1, *rest)


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows [heads * D, ...] in the order of Hugging Face's rotation.

    llama.cpp rotates adjacent rows of a head, and stores first and second halves interleaved.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def grouped(values: np.ndarray, groups: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Returns rows q, k, v of a group after those of another (Falcon), from all q, all k, all v."""
    parts = np.split(values, np.cumsum([groups * size for size in sizes])[:-1])
    shaped = [x.reshape(groups, size, *x.shape[1:]) for x, size in zip(parts, sizes, strict=True)]
    return np.concatenate(shaped, 1).reshape(values.shape)


class MappedTensors(Mapping[str, np.ndarray]):
    """The tensors of a GGUF file as Hugging Face's directories have them, read when needed."""

    def __init__(self, weights: Mapping[str, Weight | Experts]):
        self._owners = {part: (n, w) for n, w in weights.items() for part in w.shapes(n)}
        self._last = threading.local()

    def __getitem__(self, part: str) -> np.ndarray:
        name, weight = self._owners[part]
        last = self._last.__dict__  # the parts of a tensor are read one after the other
        if name not in last:
            last.clear()
            last[name] = dict(zip(weight.shapes(name), weight.values(), strict=True))
        return last[name][part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)
