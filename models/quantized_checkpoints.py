"""Layouts of quantized matrices in checkpoints: AWQ, GPTQ, compressed-tensors, fp8.

A matrix is stored as several tensors: `<module>.qweight`, `.qzeros` and `.scales` in AWQ and GPTQ.
Readers unpack them and make integers signed (0 to 15 become -8 to 7), so that a matrix is
(values - zeros) * scales, with a scale and a zero point per output and group of inputs. Bits and
groups follow from the shapes. Matrices that a checkpoint does not quantize are those that it
stores in floating point, so lists of ignored modules are not read.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.quantized import WeightFormat, rounded_format

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
BITS = (4, 8)
AWQ_SLOTS = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each column
SCALES = ("scales", "weight_scale", "weight_scale_inv")
WORDS = ("qweight", "qzeros", "g_idx", "weight_packed", "weight_g_idx", "weight_zero_point")
# The dtypes of each component of a matrix, by the last part of its name.
COMPONENT_DTYPES = {
    **dict.fromkeys(WORDS, ("I32",)),
    **dict.fromkeys((*SCALES, "weight_min"), ("F16", "BF16", "F32", "F64")),
    "weight": ("I8", "F8_E4M3"),
    "weight_shape": ("I32", "I64"),
    "_blocks": ("U8",),
    "_scales": ("U8",),
}
MXFP4_PARTS = ("_blocks", "_scales")  # the ends of names
SUFFIXES = frozenset(COMPONENT_DTYPES) - {"weight", *MXFP4_PARTS}
IN_CACHE = 2**16  # elements that are dequantized at once, in float64 half a megabyte
MXFP4_GROUP = 32  # inputs that share an exponent
# Twice the value of each code of E2M1, which are integers.
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
ACTIVATIONS = ("input_scale", "input_zero_point")  # activations are not quantized
# Settings of compressed-tensors that change the computation.
UNSUPPORTED_SETTINGS = ("sparsity_config", "transform_config")
CACHE_SETTING = "kv_cache_scheme"  # of a cache in float8, whose scales are ignored, too


class Matrix(NamedTuple):
    """A quantized matrix, (values - zeros) * scales.

    Attributes:
      values: [O, I], int8 (-8 to 7 with 4 bits) or float8.
      scales: [O, G], each of I / G inputs.
      zeros: [O, G], int8, or float64 of a GGUF file's minima; or None.
      bits: bits of a value, 4 or 8.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    bits: int

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Matrix":
        """Returns the matrix with changed outputs, the first axis of all arrays."""
        zeros = None if self.zeros is None else change(self.zeros)
        return Matrix(change(self.values), change(self.scales), zeros, self.bits)

    def dequantized(self) -> np.ndarray:
        """Returns [O, I] in float32."""
        block_dtype = (
            np.float32 if self.zeros is None else np.promote_types(self.zeros.dtype, np.float32)
        )
        dense = np.empty(self.values.shape, np.float32)
        step = max(1, IN_CACHE // self.values.shape[1])
        for rows in (slice(first, first + step) for first in range(0, len(dense), step)):
            scales = self.scales[rows].astype(np.float32)
            block = self.values[rows].astype(block_dtype).reshape(*scales.shape, -1)
            if self.zeros is not None:
                block -= self.zeros[rows, :, None]
            block *= scales[..., None]
            dense[rows] = block.reshape(dense[rows].shape)
        return dense


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint stores quantized matrices.

    Attributes:
      method: one of `METHODS`.
      zero_offset: what GPTQ subtracts from zero points.
      symmetric: whether GPTQ's zero points are half the range, which is zero as a signed value.
      block: outputs and inputs of a block with one scale, or None.
      group: the inputs that share a scale in AWQ and GPTQ, as the settings name them, or None.
    """

    method: str
    zero_offset: int = 0
    symmetric: bool = False
    block: tuple[int, int] | None = None
    group: int | None = None


def read_quantization_config(settings: Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Returns the quantization of `quantization_config` in config.json; None without one.

    Raises ValueError for a quantization that is not supported.
    """
    if not settings:
        return None
    method = settings.get("quant_method")
    if method == "awq":
        layout = settings.get("version") or settings.get("format") or "gemm"
        if str(layout).lower() != "gemm":
            raise _unsupported("awq with version", layout, ("gemm",))
        if settings.get("backend") == "llm-awq":
            raise ValueError(
                "quantization_config has backend='llm-awq', which is not supported: load a "
                "checkpoint of AutoAWQ, or the unquantized one"
            )
        return QuantizationConfig(method, group=_group(settings))
    if method == "gptq":
        layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise _unsupported("gptq with checkpoint_format", layout, ("gptq", "gptq_v2"))
        symmetric = settings.get("sym") is True
        offset = int(layout == "gptq")
        return QuantizationConfig(
            method, zero_offset=offset, symmetric=symmetric, group=_group(settings)
        )
    if method == "fp8":
        block = settings.get("weight_block_size")
        return QuantizationConfig(method, block=tuple(block) if block else None)
    if method in ("gguf", "mxfp4"):  # gguf: the directory of a GGUF file
        return QuantizationConfig(method)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    raise ValueError(
        f"{_unsupported('quant_method', method, METHODS)}; if its weights are not quantized, as "
        "after an adapter has been merged into them, remove quantization_config from config.json"
    )


def _group(settings: Mapping[str, Any]) -> int | None:
    """Returns the group size of all matrices; None: matrices differ, or have one group (-1)."""
    size = settings.get("group_size")
    return size if isinstance(size, int) and size > 0 and not settings.get("dynamic") else None


def _unsupported(name: str, value: Any, supported: tuple[str, ...]) -> ValueError:
    return ValueError(
        f"quantization_config has {name}={value!r}, which is not supported: it must be one of "
        f"{', '.join(supported)}; or load the unquantized checkpoint"
    )


def _compressed_tensors(settings: Mapping[str, Any]) -> QuantizationConfig:
    groups = (settings.get("config_groups") or {}).values()
    formats = {group.get("format") or settings.get("format") for group in groups}
    for fmt in sorted(map(str, formats)):
        if fmt not in FORMATS:
            raise _unsupported("format", fmt, FORMATS)
    for name in UNSUPPORTED_SETTINGS:
        value = settings.get(name)
        dense = name == "sparsity_config" and value and value.get("format") == "dense"
        if value and not dense:
            raise ValueError(
                f"quantization_config has {name}={value!r}, which is not supported: "
                "load a checkpoint without it"
            )
    blocks = {_block((group.get("weights") or {}).get("block_structure")) for group in groups}
    if len(blocks) > 1:
        texts = " and ".join(sorted(str(block and list(block)) for block in blocks))
        raise ValueError(
            f"quantization_config has groups with different block_structure, {texts}, which is not "
            "supported: load the unquantized checkpoint"
        )
    return QuantizationConfig("compressed-tensors", block=next(iter(blocks), None))


def _block(structure: str | Sequence[int] | None) -> tuple[int, int] | None:
    """Returns the sides of a block, which are a list or a text such as "128x128"."""
    if not structure:
        return None
    try:
        rows, columns = map(int, structure.split("x") if isinstance(structure, str) else structure)
    except ValueError:
        raise ValueError(
            f"quantization_config has block_structure={structure!r}: it must be two numbers, such "
            "as [128, 128]"
        ) from None
    return rows, columns


def gather(stored: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns (the other tensors, the components of quantized matrices).

    Args:
      stored: anything, by the name of a tensor.

    Components are by the name of the matrix, which ends in ".weight" except in MXFP4, and the last
    part of their name. Scales alone, as AutoAWQ stores for some activations, are other tensors.
    """
    plain, matrices = dict(stored), dict[str, dict[str, Any]]()
    for name in stored:
        module, _, suffix = name.rpartition(".")
        if name.endswith(MXFP4_PARTS):
            end = next(end for end in MXFP4_PARTS if name.endswith(end))
            matrices.setdefault(name.removesuffix(end), {})[end] = plain.pop(name)
        elif suffix in SUFFIXES:
            matrices.setdefault(f"{module}.weight", {})[suffix] = plain.pop(name)
        elif suffix in ACTIVATIONS:
            del plain[name]
    for name, components in list(matrices.items()):
        if name in plain:
            components["weight"] = plain.pop(name)
        elif set(components) == {"scales"}:
            plain[f"{name.removesuffix('weight')}scales"] = matrices.pop(name)["scales"]
    return plain, matrices


def missing_components(components: Mapping[str, Any]) -> list[str]:
    """Returns the last part of the names of tensors that a quantized matrix lacks."""
    if any(suffix in components for suffix in MXFP4_PARTS):
        needed = list(MXFP4_PARTS)
    elif "qweight" in components:
        needed = ["qzeros", "scales"]
    elif "weight_packed" in components:
        needed = ["weight_scale"]
    else:
        needed = [
            "weight",
            "weight_scale_inv" if "weight_scale_inv" in components else "weight_scale",
        ]
    return [name for name in needed if name not in components]


def component_dtypes(suffix: str, components: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the dtypes that a component of a quantized matrix may have, given all of them."""
    if suffix == "weight_zero_point" and "weight" in components:
        return ("I8",)  # not packed
    return COMPONENT_DTYPES[suffix]


def matrix_format(
    quantization: QuantizationConfig | None, components: Mapping[str, Any], shape: tuple[int, ...]
) -> WeightFormat:
    """Returns the format of a quantized matrix, without reading it.

    Args:
      quantization: the checkpoint's.
      components: the shape and dtype of each component, as `gather` returns them.
      shape: shape of the matrix, [outputs, inputs].
    """
    assert quantization is not None  # `gather` found parts
    inputs = shape[1]
    if "_blocks" in components:
        return WeightFormat(8, MXFP4_GROUP)
    scale = next((components[name].shape for name in SCALES if name in components), ())
    groups = scale[quantization.method not in ("awq", "gptq")] if len(scale) == 2 else 1
    if quantization.group is not None:
        _check_group(quantization.group, groups, inputs)
    if groups < 1 or inputs % groups:
        raise ValueError(f"its {inputs} inputs are not a multiple of its {groups} groups")
    bits, is_float = 8, False
    if "qweight" in components:
        zeros = not quantization.symmetric
        bits = 4 if quantization.method == "awq" else _bits(components["qweight"].shape[0], inputs)
    else:
        zeros = "weight_zero_point" in components or "weight_min" in components
        if "weight_packed" in components:
            bits = _bits(components["weight_packed"].shape[1], inputs)
        else:
            is_float = components["weight"].dtype == "F8_E4M3"
    return WeightFormat(bits, None if groups == 1 else inputs // groups, zeros, is_float)


def _check_group(size: int, groups: int, inputs: int) -> None:
    """Raises ValueError if a matrix has other groups of equal sizes than those of the settings."""
    size = min(size, inputs)
    if inputs % size:
        raise ValueError(
            f"its {inputs} inputs are not a multiple of group_size={size}: a smaller last group is "
            "not supported; load the unquantized checkpoint"
        )
    if groups * size != inputs and groups and inputs % groups == 0:
        raise ValueError(
            f"it has {groups} groups for {inputs} inputs, and quantization_config has "
            f"group_size={size}: set group_size to {inputs // groups}"
        )


def chosen_format(
    name: str,
    formats: Sequence[tuple[WeightFormat | None, int]],
    weights: WeightFormat | str | None,
) -> WeightFormat | None:
    """Returns the format of a matrix in a module, None if it is floating-point.

    Args:
      name: name of the matrix.
      formats: (format, number of inputs) of the matrix in the files; a format of None is
        floating-point. Several for matrices that have one format in the module: those of experts,
        or of layers.
      weights: as `parse_weights` returns it, not `NONE`.

    Raises ValueError for matrices that no format holds, and if the matrix cannot be `weights`.
    """
    weight_formats = [(fmt, inputs) for fmt, inputs in formats if fmt is not None]
    if not weight_formats:
        return weights if isinstance(weights, WeightFormat) and weights.is_rounding else None
    common_format = _common_format(weight_formats)
    is_partial = len(weight_formats) < len(formats)
    if weights is None:
        if common_format is not None and not is_partial:
            return common_format
        mixture = "has integers in some layers or experts and float8 in others"
        if common_format is not None:
            mixture = f"is quantized ({common_format}) in some layers or experts only"
        raise ValueError(
            f"{name} {mixture}, which have one format here: pass weights='none' or 'int8'"
        )
    exact = None
    if common_format is not None and isinstance(weights, WeightFormat):
        exact = with_smaller_groups(common_format, weights)
    if exact is None or (is_partial and not exact.is_rounding):
        return rounded_format(weights)
    return exact


def _common_format(formats: Iterable[tuple[WeightFormat, int]]) -> WeightFormat | None:
    """Returns the format that holds matrices of several formats and inputs exactly.

    Returns None for a mixture of integers and float8.
    """
    weight_formats = {fmt for fmt, _ in formats}
    if len({fmt.is_float for fmt in weight_formats}) > 1:
        return None
    group = None
    if any(fmt.group is not None for fmt in weight_formats):
        group = math.gcd(*(fmt.group or inputs for fmt, inputs in formats))
    return WeightFormat(
        bits=max(fmt.bits for fmt in weight_formats),
        group=group,
        zeros=any(fmt.zeros for fmt in weight_formats),
        is_float=any(fmt.is_float for fmt in weight_formats),
    )


def with_smaller_groups(fmt: WeightFormat, weights: WeightFormat) -> WeightFormat | None:
    """Returns a checkpoint's format with the groups of `weights`, which divide its own.

    Returns None if `weights` is another format; its zero points may be omitted.
    """
    if (weights.bits, weights.is_float) != (fmt.bits, fmt.is_float) or weights.zeros > fmt.zeros:
        return None
    if fmt.group is not None and (weights.group is None or fmt.group % weights.group):
        return None
    return dataclasses.replace(fmt, group=weights.group)


def holds(weight_format: WeightFormat, matrix: Matrix) -> bool:
    """Returns whether a format holds a matrix exactly."""
    is_float = not np.issubdtype(matrix.values.dtype, np.integer)
    if weight_format.is_float != is_float or (matrix.zeros is not None and not weight_format.zeros):
        return False
    groups = weight_format.groups(matrix.values.shape[1])
    return matrix.bits <= weight_format.bits and groups % matrix.scales.shape[1] == 0


def parameters(
    matrix: Matrix, weight_format: WeightFormat, shape: tuple[int, ...], inputs: int
) -> dict[str, np.ndarray]:
    """Returns the parameters of a quantized projection.

    Args:
      matrix: has the format `weight_format`, or one that it holds exactly.
      weight_format: the module's format.
      shape: shape of the weight, [O..., I...].
      inputs: the number of axes I.
    """
    groups = weight_format.groups(matrix.values.shape[1])
    outputs = shape[: len(shape) - inputs]

    def grouped(x):
        x = np.repeat(x.T.astype(np.float32), groups // x.shape[1], 0)
        return x.reshape(groups, *outputs)

    values = {"weight": matrix.values.astype(weight_format.dtype).reshape(shape)}
    values["scale"] = grouped(matrix.scales)
    if weight_format.zeros:
        zeros = np.zeros_like(matrix.scales) if matrix.zeros is None else matrix.zeros
        values["zero"] = grouped(zeros)
    return values


def read_matrix(
    quantization: QuantizationConfig | None,
    components: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
) -> Matrix:
    """Returns a quantized matrix.

    Args:
      quantization: the checkpoint's.
      components: the stored tensors by the last part of their names, as `gather` returns them.
      shape: shape of the matrix, [outputs, inputs].

    Raises ValueError for missing or wrongly shaped components, and for groups of inputs that are
    not contiguous.
    """
    assert quantization is not None  # `gather` found parts
    inputs = shape[1]
    if "qweight" in components:
        matrix = (
            _read_awq(components)
            if quantization.method == "awq"
            else _read_gptq(components, quantization, inputs)
        )
    elif "_blocks" in components:
        matrix = _read_mxfp4(components)
    elif "weight_packed" in components:
        matrix = _read_packed(components, shape)
    else:
        matrix = _read_unpacked(components, quantization.block)
    _check(matrix, shape)
    for name in ("g_idx", "weight_g_idx"):
        if name in components:
            _check_order(name, components[name], inputs // matrix.scales.shape[1])
    return matrix


def _check(matrix: Matrix, shape: tuple[int, ...]) -> None:
    outputs, inputs = shape
    groups = matrix.scales.shape[-1]
    grouped = (outputs, groups)
    zeros = grouped if matrix.zeros is None else matrix.zeros.shape
    if matrix.values.shape != shape or not matrix.scales.shape == zeros == grouped:
        raise ValueError(
            f"it has values of shape {matrix.values.shape}, scales of {matrix.scales.shape} and "
            f"zero points of {zeros}, expected {shape} and twice ({outputs}, groups)"
        )
    if inputs % groups:
        raise ValueError(f"its {inputs} inputs are not a multiple of its {groups} groups")


def _check_order(name: str, groups: np.ndarray, size: int) -> None:
    if not np.array_equal(groups, np.arange(len(groups)) // size):
        raise ValueError(
            f"{name} orders its inputs by activation (act-order), which is not supported: load a "
            "checkpoint with desc_act=false"
        )


def _read_mxfp4(components: Mapping[str, np.ndarray]) -> Matrix:
    """Returns the matrix of all experts [X * O, I], whose groups have a power of two as scale."""
    blocks, exponents = components["_blocks"], components["_scales"]  # [X, O, G, 16], [X, O, G]
    groups = blocks.shape[-2]
    values = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], -1)
    scales = np.ldexp(np.float32(0.5), exponents.astype(np.int32) - 127)
    return Matrix(values.reshape(-1, groups * MXFP4_GROUP), scales.reshape(-1, groups), None, 8)


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the unsigned integers in the last axis of int32 words, the lowest bits first."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def pack(unsigned: np.ndarray, bits: int) -> np.ndarray:
    """Returns the last axis in int32 words, the inverse of `_unpack`; padded with zeros."""
    per_word = 32 // bits
    padding = [(0, 0)] * (unsigned.ndim - 1) + [(0, -unsigned.shape[-1] % per_word)]
    padded = np.pad(unsigned, padding).astype(np.uint8)
    packed = padded if bits == 8 else padded[..., ::2] | (padded[..., 1::2] << 4)
    return np.ascontiguousarray(packed, np.uint8).view("<i4")


def _signed(unsigned: np.ndarray, bits: int) -> np.ndarray:
    return (unsigned ^ (1 << (bits - 1))).view(np.int8) if bits == 8 else unsigned.view(np.int8) - 8


def _read_awq(components: Mapping[str, np.ndarray]) -> Matrix:
    """AutoAWQ's layout "gemm": words of 8 outputs, interleaved."""

    def columns(words):
        slots = _unpack(words, 4).reshape(len(words), -1, 8)[..., AWQ_SLOTS]
        return _signed(slots.reshape(len(words), -1), 4).T

    return Matrix(
        columns(components["qweight"]), components["scales"].T, columns(components["qzeros"]), 4
    )


def _read_gptq(
    components: Mapping[str, np.ndarray], quantization: QuantizationConfig, inputs: int
) -> Matrix:
    """AutoGPTQ's layout: values in words of inputs, zero points in words of outputs."""
    words = components["qweight"]
    bits = _bits(len(words), inputs)
    values, stored = _signed(_unpack(words.T, bits), bits), _unpack(components["qzeros"], bits)

    def zeros(offset: int) -> np.ndarray:
        return _signed(((stored + offset) & (2**bits - 1)).T, bits)

    offset, other = quantization.zero_offset, 1 - quantization.zero_offset
    if not quantization.symmetric:
        _check_offset(values, zeros(offset), zeros(other), offset)
        return Matrix(values, components["scales"].T, zeros(offset), bits)
    if zeros(offset).any() and zeros(other).any():  # some files name the other format
        raise ValueError(
            "it has zero points, and quantization_config has sym=true: set it to false"
        )
    return Matrix(values, components["scales"].T, None, bits)


def _check_offset(values: np.ndarray, zeros: np.ndarray, others: np.ndarray, offset: int) -> None:
    """Raises ValueError if zero points must be read as those of the other format.

    The weights of a matrix have a mean near 0, and one step more or less moves it by a scale.
    """
    if len(values) != len(zeros) or values.shape[1] % zeros.shape[1]:
        return  # `_check` reports it
    means = values.reshape(*zeros.shape, -1).mean(-1)
    here, there = (means - x for x in (zeros, others))
    error = here.std() / here.size**0.5
    if abs(here.mean()) > max(0.75, 5 * error) and abs(there.mean()) < 0.25:
        formats = "gptq_v2", "gptq"
        raise ValueError(
            f"its weights have a mean of {here.mean():.2f} scales with zero points as in the "
            f"format {formats[offset]!r}, and of {there.mean():.2f} as in {formats[1 - offset]!r}: "
            f"set checkpoint_format of quantization_config to {formats[1 - offset]!r}"
        )


def _bits(words: int, values: int) -> int:
    """Returns the bits of a value, of which `words` hold `values`."""
    for bits in BITS:
        if words == -(-values * bits // 32):
            return bits
    raise ValueError(
        f"{words} words of 32 bits for {values} values are not supported: load a checkpoint with "
        f"values of {' or '.join(map(str, BITS))} bits, or the unquantized one"
    )


def _read_packed(components: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Matrix:
    """compressed-tensors' "pack-quantized": words of inputs; zero points in words of outputs.

    `weight_min` instead of zero points is a matrix of a GGUF file: values from 0, times the scale,
    plus the minimum.
    """
    outputs, inputs = shape
    words, scales, zeros = components["weight_packed"], components["weight_scale"], None
    bits = _bits(words.shape[1], inputs)
    values = _signed(_unpack(words, bits)[:, :inputs], bits)
    if "weight_zero_point" in components:
        zeros = _unpack(components["weight_zero_point"].T, bits)[:, :outputs]
        zeros = _signed(zeros, bits).T
    if "weight_min" in components:
        minima = components["weight_min"].astype(np.float64)
        zeros = -(2 ** (bits - 1)) - np.divide(minima, scales, where=scales != 0, out=minima)
    return Matrix(values, scales, zeros, bits)


def _read_unpacked(components: Mapping[str, np.ndarray], block: tuple[int, int] | None) -> Matrix:
    """int8 or float8 values, with a scale per matrix, output, group or block."""
    values = components["weight"]
    outputs, inputs = values.shape
    scales = components["weight_scale_inv" if "weight_scale_inv" in components else "weight_scale"]
    if block is not None and scales.ndim == 2:
        rows, columns = block
        if inputs % columns:
            raise ValueError(
                f"its {inputs} inputs are not a multiple of the {columns} of a block, which is not "
                "supported: load the unquantized checkpoint"
            )
        scales = np.repeat(scales, rows, 0)[:outputs]
    zeros = components.get("weight_zero_point")
    zeros = None if zeros is None else _per_output(zeros, outputs)
    return Matrix(values, _per_output(scales, outputs), zeros, 8)


def _per_output(x: np.ndarray, outputs: int) -> np.ndarray:
    """Returns [O, G] of a scalar, [1], [O, 1] or [O, G]."""
    return np.broadcast_to(x, (outputs, 1)) if x.size == 1 else x.reshape(outputs, -1)
