"""Reads GGUF files of llama.cpp.

`read_gguf` validates a whole file without reading its weights, and `write_directory` writes its
config and tokenizer in Hugging Face format, and an index of its tensors. `weights_of` maps the
tensors of such a directory to those of Hugging Face format; they are memory-mapped. `metadata` has
the config, `tensor_mapping` the tensors, `tokenizer` the tokenizer.

On a CPU with the native kernels, matrices stay in the file's types (`packed_types`). Elsewhere,
those of the model's blocks in types of `blocks.BLOCK_FORMATS` become integers with float32 scales,
and gpt-oss's experts stay in MXFP4; all others become float32.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer

from models.decoder_config import DecoderConfig
from models.eagle_checkpoints import tensors_of
from models.gguf.metadata import decoder_config, special_tokens
from models.gguf.tensor_mapping import MTP_PROJECTION, is_read_tiled, map_tensors
from models.gguf.tensors import Experts, FileTensor, Weight
from models.gguf.tokenizer import read_tokenizer
from models.hf_config_writing import write_config
from models.hf_tensors import GGUF_INDEX, check_not_pointer
from models.mtp_checkpoints import PREFIX as MTP_PREFIX
from models.quantized import MatrixFormats, check_fits
from pallas_kernels.cpu.packed import OUTPUTS


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """A valid GGUF file.

    Attributes:
      config: the model's config.
      weights: by name in Hugging Face format.
      special: bos_token_id, eos_token_id (an id or a list) and pad_token_id; None if not set.
      tokenizer: the tokenizer and the contents of tokenizer_config.json, or None.
      tensors: the file's tensors, by name.
    """

    config: DecoderConfig
    weights: Mapping[str, Weight | Experts]
    special: Mapping[str, Any]
    tokenizer: tuple[Tokenizer, dict[str, Any]] | None
    tensors: Mapping[str, FileTensor]


def read_gguf(path: str | os.PathLike) -> GgufModel:
    """Returns the model in a GGUF file, with its weights memory-mapped.

    Raises ValueError for a file that is not a complete GGUF file, an unsupported architecture,
    setting, tokenizer or tensor type, and missing, unexpected or wrongly shaped tensors.
    """
    reader = _open(path)
    try:
        return _read(reader, str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _open(path: str | os.PathLike) -> gguf.GGUFReader:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        check_not_pointer(pathlib.Path(path))
        raise ValueError(
            f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'; pass a .gguf "
            "file or a model's directory"
        )
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        if gguf.GGMLQuantizationType.__name__ in str(error):
            raise ValueError(
                f"{path} has an unknown tensor type: {error}; {_type_remedy()}"
            ) from error
        raise ValueError(
            f"{path} is not a complete GGUF file (it has {os.path.getsize(path)} bytes): {error}; "
            "download it again"
        ) from error


def _type_remedy() -> str:
    return "upgrade the package gguf, or load a file with other tensor types, such as Q8_0 or F16"


def _read(reader: gguf.GGUFReader, path: str) -> GgufModel:
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if (num_files := metadata.get("split.count", 1)) > 1:
        raise ValueError(
            f"the file is one of {num_files} parts: merge them with llama-gguf-split --merge"
        )
    tensors = {
        tensor.name: FileTensor(
            path,
            tensor.name,
            tuple(tensor.shape[::-1].tolist()),
            tensor.tensor_type.name,
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    }
    config = decoder_config(metadata, tensors)
    weights = map_tensors(config, tensors)
    _check_types(weights)
    tokenizer = read_tokenizer(metadata)
    num_tokens = 0 if tokenizer is None else tokenizer[0].get_vocab_size()
    if num_tokens > config.vocab_size:
        raise ValueError(
            f"tokenizer.ggml.tokens has {num_tokens} tokens, and token_embd.weight has "
            f"{config.vocab_size} rows: the file is damaged, or its tokenizer is another model's: "
            "download it again"
        )
    return GgufModel(config, weights, special_tokens(metadata), tokenizer, tensors)


def _block_bytes(tensor: FileTensor) -> int:
    """Returns the bytes of a block of a tensor."""
    return gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]


def _check_types(weights: Mapping[str, Weight | Experts]) -> None:
    """Raises ValueError unless `gguf` can dequantize all types of tensors."""
    sources = (source for weight in weights.values() for source in weight.sources)
    for tensor in {source.tensor_type: source for source in sources}.values():
        try:
            gguf.dequantize(tensor.data[..., : _block_bytes(tensor)], tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{tensor.name} has type {tensor.tensor_type.name}, which the package gguf cannot "
                f"dequantize: {_type_remedy()}"
            ) from error


def write_directory(model: GgufModel, path: str | os.PathLike) -> None:
    """Writes config, tokenizer and index of a model to an existing directory.

    The index has the path of the GGUF file, relative to the directory if the file is in it.
    """
    path = pathlib.Path(path)
    config = {**write_config(model.config), **model.special, "torch_dtype": "float32"}
    config["quantization_config"] = {"quant_method": "gguf"}
    tensors = model.tensors.values()
    file = pathlib.Path(next(iter(tensors)).file).absolute()
    file_path = file.name if file.parent == path.absolute() else str(file)
    entries = [(x.name, x.shape, x.type_name, x.offset, x.size) for x in tensors]
    contents: dict[str, Any] = {"config.json": config, "generation_config.json": model.special}
    contents[GGUF_INDEX] = {"file": file_path, "identity": _identity(file), "tensors": entries}
    if model.tokenizer is not None:
        tokenizer, contents["tokenizer_config.json"] = model.tokenizer
        tokenizer.save(str(path / "tokenizer.json"))
    for name, content in contents.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def weights_of(path: pathlib.Path, config: DecoderConfig) -> dict[str, Weight | Experts]:
    """Returns the tensors of a directory of `write_directory`, by name in Hugging Face format.

    Raises FileNotFoundError if the GGUF file is not there, and ValueError if it has changed.
    """
    text = (path / GGUF_INDEX).read_text(encoding="utf-8")
    index = json.loads(text)
    file = path / index["file"]
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist, and {path} has no weights: pass the GGUF file's new path"
        )
    if _identity(file) != index["identity"]:
        raise ValueError(f"{file} has changed since {path} was written: pass the GGUF file's path")
    return _indexed_weights(str(file), text, config)


def head_names(path: pathlib.Path) -> list[str]:
    """Returns names of a head for multi-token prediction, none if the GGUF file has none.

    They are in Hugging Face format, of a directory of `write_directory`.
    """
    index = json.loads((path / GGUF_INDEX).read_text(encoding="utf-8"))
    return [
        f"{MTP_PREFIX}{name}" for name, *_ in index["tensors"] if MTP_PROJECTION.fullmatch(name)
    ]


def _identity(file: pathlib.Path) -> list[int]:
    """Returns a file's size in bytes and the time of its last change in ns."""
    return [file.stat().st_size, file.stat().st_mtime_ns]


@functools.lru_cache(maxsize=8)
def _indexed_weights(file: str, index: str, config: DecoderConfig) -> dict[str, Weight | Experts]:
    tensors = {
        name: FileTensor(file, name, tuple(shape), *others)
        for name, shape, *others in json.loads(index)["tensors"]
    }
    return map_tensors(config, tensors)


def packed_types(path: pathlib.Path, config: DecoderConfig, to: str | None = None) -> MatrixFormats:
    """Returns the types of the matrices that are packed; none of a model with experts are.

    Args:
      path: a directory of `write_directory`.
      config: the model's config.
      to: the type to which matrices of blocks are rounded; None: all stay as in the file.

    Raises ValueError for a matrix of a block that does not fit `to`.
    """
    if config.num_experts is not None:
        return MatrixFormats()
    weights, types = weights_of(path, config), []
    for tensor in tensors_of(config):
        weight = weights[tensor.name]
        if tensor.matrix is None or not isinstance(weight, Weight):
            continue
        rows = np.arange(weight.source.shape[0])
        rows = rows if tensor.fused is None else tensor.fused.part(rows)
        type_name = weight.packed_type
        if weight.tiled_heads is None and is_read_tiled(config, tensor, type_name):
            type_name = None  # a file without tiling
        if to is not None and tensor.is_block_matrix:
            check_fits(to, tensor.matrix, len(rows), weight.source.shape[1])
            type_name = to
        if type_name is not None and len(rows) % OUTPUTS == 0:
            types.append((tensor.matrix, type_name))
    return MatrixFormats(tuple(types))
