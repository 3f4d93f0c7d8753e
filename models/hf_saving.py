"""Writes checkpoints in Hugging Face's directory format. A round trip is bit-exact.

Quantized matrices are written in the layout of compressed-tensors.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import numpy as np
import safetensors.numpy

from models import eagle_checkpoints, mtp_checkpoints
from models.eagle import EagleConfig
from models.eagle_checkpoints import tensors_of, to_stored
from models.families import FAMILIES
from models.hf_config_writing import write_config
from models.hf_parameters import parameter_shapes
from models.hf_tensors import UNEMBEDDING, Tensor
from models.huggingface import INDEX, QUANTIZATION, SINGLE
from models.mtp import MtpConfig
from models.quantized import MatrixFormats, WeightFormat
from models.quantized_checkpoints import Matrix, pack


def save_checkpoint(
    path: str | os.PathLike,
    module: nn.Module,
    params: Any,
    *,
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a directory of Hugging Face format, atomically.

    Args:
      path: the directory to create.
      module, params: a module and its parameters; values keep their dtype and are unboxed.
      eos_token_ids, bos_token_id, pad_token_id: for config.json and generation_config.json.
      tokenizer: an object with `save_pretrained`.
      max_shard_bytes: larger weights are split over several files with an index.
      overwrite: replace an existing directory.

    Raises FileExistsError if `path` exists and `overwrite` is False, and ValueError if the
    parameters are not the module's, its family cannot express its config, or matrices are quantized
    and are in types of GGUF files, have zero points that are not integers, or are transposed in the
    family (GPT-2).
    """
    path = pathlib.Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another path, or pass overwrite=True")
    if module.weights and FAMILIES[module.config.family].transposed:
        raise ValueError(
            f"quantized matrices of family={module.config.family!r} cannot be written: the family "
            "stores them transposed, which compressed-tensors does not read; load the model with "
            "weights='none' to save it"
        )
    if module.weights.is_packed:
        raise ValueError(
            f"matrices in {module.weights} cannot be written: Hugging Face's format does not have "
            "these types; load the model with weights='none' to save it"
        )
    if module.config.embeds_all:
        raise ValueError(
            f"an output matrix of {module.config.draft_vocab_size} tokens cannot be written: load "
            "the model without draft_vocab to save it"
        )
    values = _named_params(module, params)
    special = {
        "bos_token_id": bos_token_id,
        "eos_token_id": _int_or_list(eos_token_ids),
        "pad_token_id": pad_token_id,
    }
    config = module.config
    if isinstance(config, MtpConfig):
        raw = mtp_checkpoints.write_config(write_config(config.layer))
    elif isinstance(config, EagleConfig):
        raw = eagle_checkpoints.write_config(config, write_config(config.layer))
    else:
        raw = write_config(config)
    raw = {**raw, **special, "torch_dtype": module.dtype.name}
    if module.weights:
        raw[QUANTIZATION] = _quantization_config(module.weights, [t for t, _ in values if t.inputs])
    with _replacing(path) as partial:
        _write_json(partial / "config.json", raw)
        _write_json(partial / "generation_config.json", special)
        _write_tensors(partial, values, module.weights, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def _module(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0]


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _int_or_list(ids: Sequence[int]) -> int | list[int] | None:
    ids = [int(i) for i in ids]
    return ids[0] if len(ids) == 1 else ids or None


def _named_params(module: nn.Module, params: Any) -> list[tuple[Tensor, dict[str, Any]]]:
    """Returns the parameters of each tensor, in file order; raises unless they are the module's.

    A quantized matrix has several.
    """
    boxes = parameter_shapes(module.config, module.weights)
    shapes = {path: box.value.shape for path, box in boxes.items()}
    flat = flax.traverse_util.flatten_dict(nn.meta.unbox(params)["params"])
    problems = [f"missing {'/'.join(p)}" for p in shapes if p not in flat]
    problems += [f"unexpected {'/'.join(p)}" for p in flat if p not in shapes]
    problems += [
        f"{'/'.join(p)} has shape {flat[p].shape}, expected {shapes[p]}"
        for p in shapes
        if p in flat and tuple(flat[p].shape) != tuple(shapes[p])
    ]
    if problems:
        raise ValueError("the parameters are not the module's:\n  " + "\n  ".join(problems))
    pairs = []
    for tensor in tensors_of(module.config):
        *parents, last = tensor.path
        names = (last, "scale", "zero") if last == "weight" else (last,)
        paths = {name: (*parents, name) for name in names}
        values = {name: flat[path] for name, path in paths.items() if path in flat}
        if tensor.expert is not None:  # scales and zero points have their groups first
            leading = {n: (slice(None),) * (n in ("scale", "zero")) for n in values}
            values = {n: x[(*leading[n], tensor.expert)] for n, x in values.items()}
        pairs.append((tensor, values))
    return pairs


def _write_tensors(
    path: pathlib.Path,
    values: list[tuple[Tensor, dict[str, Any]]],
    formats: MatrixFormats,
    max_shard_bytes: int,
) -> None:
    stored: dict[str, list[tuple[Tensor, dict[str, Any]]]] = {}  # a tensor may have several
    for tensor, arrays_of in values:
        stored.setdefault(tensor.name, []).append((tensor, arrays_of))
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, pairs in stored.items():
        nbytes = sum(value.nbytes for _, arrays_of in pairs for value in arrays_of.values())
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE
        arrays: dict[str, np.ndarray] = {}
        for name in shard:
            tensors, parameters = zip(*stored[name], strict=True)
            arrays |= _stored(tensors, jax.device_get(parameters), formats)
        # Hugging Face requires the framework's name in the metadata.
        safetensors.numpy.save_file(arrays, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(arrays, file)
        total += sum(array.nbytes for array in arrays.values())
    if len(shards) > 1:
        _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _stored(
    tensors: Sequence[Tensor], values: Sequence[dict[str, Any]], formats: MatrixFormats
) -> dict[str, np.ndarray]:
    """Returns the arrays, by name, of a tensor with the parameters of `tensors`."""
    first = tensors[0]
    if len(values[0]) == 1:
        parameters = [np.asarray(x[tensor.path[-1]]) for tensor, x in zip(tensors, values)]
        return to_stored(tensors, parameters)
    weight_format = formats.of(str(first.matrix))
    assert isinstance(weight_format, WeightFormat)
    if first.experts is not None:
        raise ValueError(
            f"{first.name} has the matrices of all experts, which compressed-tensors cannot store "
            "quantized: load it with weights='none' to save it"
        )
    matrices = [_matrix_of(x, weight_format) for x in values]
    try:
        arrays = _compressed_arrays(_fused(first, matrices))
    except ValueError as error:
        raise ValueError(f"{first.name} cannot be written: {error}") from error
    return {f"{_module(first)}.{suffix}": array for suffix, array in arrays.items()}


def _fused(tensor: Tensor, matrices: Sequence[Matrix]) -> Matrix:
    """Returns the matrix of all outputs that a tensor has."""
    if tensor.fused is None:
        return matrices[0]
    fused = tensor.fused

    def joined(arrays):
        return fused.join(arrays, (-1, arrays[0].shape[1]))

    values, scales, zeros, _ = zip(*matrices, strict=True)
    zero = None if zeros[0] is None else joined(zeros)
    return Matrix(joined(values), joined(scales), zero, matrices[0].bits)


def _matrix_of(parameters: Mapping[str, Any], weight_format: WeightFormat) -> Matrix:
    """Returns the matrix of the parameters of a quantized projection.

    Args:
      parameters: weight, scale and perhaps zero, on the host.
      weight_format: the matrix's format.
    """
    scale = np.asarray(parameters["scale"])
    outputs = math.prod(scale.shape[1:])
    values = np.asarray(parameters["weight"]).reshape(outputs, -1)
    zeros = np.asarray(parameters["zero"]).reshape(-1, outputs).T if weight_format.zeros else None
    stored = values if weight_format.is_float else values.astype(np.int8)
    return Matrix(stored, scale.reshape(-1, outputs).T, zeros, weight_format.bits)


def _compressed_arrays(matrix: Matrix) -> dict[str, np.ndarray]:
    """Returns what compressed-tensors stores for a matrix, by the last part of the names.

    Raises ValueError for zero points that are not integers.
    """
    values, scales = np.ascontiguousarray(matrix.values), np.ascontiguousarray(matrix.scales)
    if values.dtype != np.int8:
        return {"weight": values, "weight_scale": scales}
    packed = {
        "weight_packed": pack(_unsigned(values, matrix.bits), matrix.bits),
        "weight_scale": scales,
        "weight_shape": np.array(values.shape, np.int64),
    }
    if matrix.zeros is not None:
        zeros = np.rint(matrix.zeros).astype(np.int8)
        if (zeros != matrix.zeros).any():
            raise ValueError(
                "its zero points are not integers (minima of a GGUF file), which "
                "compressed-tensors does not store: load it with weights='none' to save it"
            )
        words = pack(_unsigned(zeros.T, matrix.bits), matrix.bits)
        packed["weight_zero_point"] = np.ascontiguousarray(words.T)
    return packed


def _unsigned(signed: np.ndarray, bits: int) -> np.ndarray:
    return (signed + np.int8(8)).view(np.uint8) if bits == 4 else signed.view(np.uint8) ^ 128


def _quantization_config(formats: MatrixFormats, tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Returns the `quantization_config` of compressed-tensors.

    Args:
      formats: formats of the quantized matrices.
      tensors: tensors of linear maps.
    """
    modules: dict[Any, list[str]] = {None: []}
    for tensor in tensors:
        weight_format = formats.of(tensor.matrix) if tensor.matrix else None
        modules.setdefault(weight_format, []).append(_module(tensor))
    # transformers has an output matrix even if embeddings are tied.
    plain = [*modules.pop(None), UNEMBEDDING.removesuffix(".weight")]
    groups: dict[str, Any] = {}
    for i, (weight_format, names) in enumerate(modules.items()):
        targets = ["Linear"] if len(modules) == 1 else list(dict.fromkeys(names))
        stored_format = "float-quantized" if weight_format.is_float else "pack-quantized"
        groups[f"group_{i}"] = {
            "targets": targets,
            "weights": _settings(weight_format),
            "format": stored_format,
        }
    stored_formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": stored_formats.pop() if len(stored_formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(dict.fromkeys(plain)),
    }


def _settings(weight_format: WeightFormat) -> dict[str, Any]:
    """Returns the settings of weights in a group of `quantization_config`."""
    return {
        "num_bits": weight_format.bits,
        "type": "float" if weight_format.is_float else "int",
        "symmetric": not weight_format.zeros,
        "strategy": "channel" if weight_format.group is None else "group",
        "group_size": weight_format.group,
        "dynamic": False,
    }


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary directory, which replaces `path` if the body succeeds."""
    mark = uuid.uuid4().hex[:8]
    partial = path.parent / f".{path.name}.{mark}.partial"
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            old = path.parent / f".{path.name}.{mark}.old"
            path.rename(old)
            partial.rename(path)
            shutil.rmtree(old)
        else:
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
