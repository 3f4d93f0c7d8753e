"""Converts GGUF files of llama.cpp to directories in Hugging Face format.

`read_gguf` validates a whole file without reading its weights, and `write_directory` writes them
tensor by tensor. If all matrices of the model's blocks have types of `blocks.KINDS`, they stay
quantized; all others become float32. As in `hf_config`, every setting of the architecture is read,
known to have no effect, or an error.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.traverse_util
import gguf
import numpy as np
from tokenizers import Tokenizer

from models.build import abstract_params, build
from models.decoder import DecoderConfig
from models.families import FAMILIES
from models.gguf.blocks import KINDS, Kind
from models.gguf.tokenizer import read_tokenizer, unsupported
from models.hf_config import read_config, write_config
from models.hf_tensors import Fused, tensors_of
from models.positions import Rope, frequencies

# The family of each architecture.
ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "falcon", "gpt2", "mpt", "phi3")},
    "qwen3moe": "qwen3_moe",
    "starcoder": "gpt_bigcode",
    "starcoder2": "starcoder2",
}
MIXTRAL = "mixtral"  # the family of a "llama" with experts
# Settings of which one value is supported.
FIXED = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "attention.max_alibi_bias": 8.0,
}
HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout")
ENDS = ("eos", "eot", "eom")  # end of text, turn and message
ROPE_FREQS = "rope_freqs.weight"
EXPERT = re.compile(r"experts\.\d+\.")  # in the name of a tensor of Hugging Face


class Weight(NamedTuple):
    """A tensor of a file and its shape in Hugging Face format.

    Attributes:
      shape: of the dequantized tensor.
      stored: as in the file.
      heads: of a matrix whose rows llama.cpp permutes; 0: of another tensor.
      group: (groups, rows of q, k and v in a group) of rows that llama.cpp does not group; None: of
        another tensor.
      transposed: whether llama.cpp transposes it.
      expert: of a tensor that has all experts, the index of the one; None: of another tensor.
      kind: of a matrix that stays quantized, as [outputs, inputs]; None: of another tensor.
    """

    shape: tuple[int, ...]
    stored: gguf.ReaderTensor
    heads: int = 0
    group: tuple[int, tuple[int, ...]] | None = None
    transposed: bool = False
    expert: int | None = None
    kind: Kind | None = None

    def shapes(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of what a directory stores for the tensor `name`."""
        if self.kind is None:
            return {name: ("F32", self.shape)}
        module = name.removesuffix("weight")
        shape = self.shape[::-1] if self.transposed else self.shape
        return {module + part: entry for part, entry in self.kind.shapes(shape).items()}

    def values(self) -> list[np.ndarray]:
        """Returns the arrays of `shapes`."""
        data = self.stored.data if self.expert is None else self.stored.data[self.expert]
        if self.kind is None:
            values = [gguf.dequantize(data, self.stored.tensor_type).astype("<f4")]
        else:
            values = list(self.kind.parts(data).values())
        if self.heads:
            values = [unpermute(part, self.heads) for part in values]
        if self.group is not None:
            values = [grouped(part, *self.group) for part in values]
        if self.transposed and self.kind is None:
            values = [part.T for part in values]
        return [np.ascontiguousarray(part) for part in values]


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """A valid GGUF file.

    Attributes:
      config: of the model.
      weights: by name in Hugging Face format.
      special: bos_token_id, eos_token_id (an id or a list) and pad_token_id; None if not set.
      tokenizer: the tokenizer and the contents of tokenizer_config.json, or None.
    """

    config: DecoderConfig
    weights: Mapping[str, Weight]
    special: Mapping[str, Any]
    tokenizer: tuple[Tokenizer, dict[str, Any]] | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the converted weights."""
        entries = (w.shapes(name).values() for name, w in self.weights.items())
        return sum(_bytes(*entry) for part in entries for entry in part)


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(dtype[1:]) // 8 * math.prod(shape)


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


def read_gguf(path: str | os.PathLike) -> GgufModel:
    """Returns the model in a GGUF file, with its weights memory-mapped.

    Raises ValueError for a file that is not a complete GGUF file, an unsupported architecture,
    setting, tokenizer or tensor type, and missing, unexpected or wrongly shaped tensors.
    """
    reader = _open(path)
    try:
        return _read(reader)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _open(path: str | os.PathLike) -> gguf.GGUFReader:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(
            f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'; pass a .gguf "
            "file or a model's directory"
        )
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        if gguf.GGMLQuantizationType.__name__ in str(error):
            raise ValueError(f"{path} has an unknown tensor type: {error}; {_remedy()}") from error
        raise ValueError(
            f"{path} is not a complete GGUF file (it has {os.path.getsize(path)} bytes): {error}; "
            "download it again"
        ) from error


def _remedy() -> str:
    return "upgrade the package gguf, or load a file with other tensor types, such as Q8_0 or F16"


def _read(reader: gguf.GGUFReader) -> GgufModel:
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(
            f"the file is one of {parts} parts: merge them with llama-gguf-split --merge"
        )
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unsupported("general.architecture", architecture, ARCHITECTURES)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(architecture, metadata, tensors)
    weights = _weights(config, tensors)
    _check_types(weights)
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    ends = list(dict.fromkeys(i for i in ids if i is not None))
    special = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    tokenizer = read_tokenizer(metadata)
    tokens = 0 if tokenizer is None else tokenizer[0].get_vocab_size()
    if tokens > config.vocab_size:
        raise ValueError(
            f"tokenizer.ggml.tokens has {tokens} tokens, and token_embd.weight has "
            f"{config.vocab_size} rows: the file is damaged, or its tokenizer is another model's: "
            "download it again"
        )
    return GgufModel(config, weights, special, tokenizer)


def _config(
    architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, gguf.ReaderTensor]
) -> DecoderConfig:
    prefix = f"{architecture}."
    settings = {
        name.removeprefix(prefix): _decimal(value)
        for name, value in metadata.items()
        if name.startswith(prefix)
    }

    def need(name: str) -> Any:
        if name not in settings:
            raise ValueError(f"{prefix}{name} is missing: the file is damaged or too old")
        return settings.pop(name)

    if "token_embd.weight" not in tensors:
        raise ValueError("token_embd.weight is missing: the file holds no language model")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = settings.pop("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := settings.pop(name, head_dim)) != head_dim:
            raise ValueError(f"{prefix}{name}={size} is not supported: it must be {head_dim}")
    if "rope_factors_short.weight" in tensors:
        raise ValueError(
            "rope_factors_short.weight (LongRoPE) is not supported: load the model's Hugging Face "
            "directory"
        )
    settings.pop("vocab_size", None)  # the embedding has as many rows
    rms = f"{prefix}attention.layer_norm_rms_epsilon" in metadata
    family, kv_heads = ARCHITECTURES[architecture], settings.pop("attention.head_count_kv", heads)
    experts, per_token = (settings.pop(f"expert_{n}count", 0) for n in ("", "used_"))
    if experts and family == "llama":
        family = MIXTRAL
    if bool(experts) != (family in (MIXTRAL, "qwen3_moe")):
        raise ValueError(f"{prefix}expert_count={experts} is not supported for {architecture}")
    fields = {
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_experts": experts,
        "experts_per_token": per_token,
        "num_layers": need("block_count"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": need("context_length"),
        "norm_eps": need(f"attention.layer_norm_{'rms_' if rms else ''}epsilon"),
        "tie_embeddings": "output.weight" not in tensors,
        "out_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if family == "qwen3_moe":
        fields["intermediate_size"] = need("expert_feed_forward_length")
    raw = {"model_type": family} | _of_family(family, fields, settings, tensors)
    if {"rope", "rope_or_alibi"} & set(FAMILIES[family].parts):
        raw["rope_parameters"] = _rope(settings, need, tensors.get(ROPE_FREQS), head_dim)
    for name, value in settings.items():
        if name not in HARMLESS and (name not in FIXED or value != FIXED[name]):
            remedy = f"it must be {FIXED[name]}" if name in FIXED else "it is not known"
            raise ValueError(f"{prefix}{name}={value!r} is not supported: {remedy}")
    config = read_config(raw)
    if (config.num_kv_heads, config.head_dim) != (kv_heads, head_dim):
        raise ValueError(
            f"{prefix}attention.head_count_kv={kv_heads} with heads of size {head_dim} is not "
            f"supported: it must be {config.num_kv_heads}, of size {config.head_dim}"
        )
    return config


def _of_family(
    family: str,
    fields: Mapping[str, Any],
    settings: dict[str, Any],
    tensors: Mapping[str, gguf.ReaderTensor],
) -> dict[str, Any]:
    """Returns the keys of a family's config.json, except the rotary ones; takes from `settings`."""
    keys = {key: FAMILIES[family].fields(key)[-1] for key in FAMILIES[family].keys}
    raw = {key: fields[name] for key, name in keys.items() if name in fields}
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    if "window" in FAMILIES[family].parts:
        raw["sliding_window"] = settings.pop("attention.sliding_window", None)
    if family == "qwen3_moe":  # of which llama.cpp normalizes the weights
        raw |= {"num_experts": fields["num_experts"], "norm_topk_prob": True}
    if family == "gpt_bigcode":
        raw["multi_query"] = kv_heads == 1
    if family == "mpt":
        raw["attn_config"] = {"clip_qkv": settings.pop("attention.clamp_kqv", None)}
    if family == "falcon":
        norms = 1 + ("blk.0.attn_norm_2.weight" in tensors)
        new = norms == 2 or kv_heads not in (1, heads)
        raw |= {"new_decoder_architecture": new, "multi_query": kv_heads == 1}
        raw |= {"num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms}
    return raw


def _decimal(value: Any) -> Any:
    """Returns a float32 as the shortest decimal number: 1e-05 instead of 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(
    settings: dict[str, Any],
    need: Callable[[str], Any],
    freqs: gguf.ReaderTensor | None,
    head_dim: int,
) -> dict[str, Any]:
    """Returns `rope_parameters`; removes the rotary settings."""
    theta = settings.pop("rope.freq_base", 10000.0)
    kind = settings.pop("rope.scaling.type", "none")
    rope = {"rope_theta": theta, "rope_type": "default" if kind == "none" else kind}
    if kind not in ("none", "linear", "yarn"):
        raise unsupported("rope.scaling.type", kind, ("none", "linear", "yarn"))
    if freqs is not None:
        if kind != "none":
            raise ValueError(f"rope.scaling.type={kind!r} with {ROPE_FREQS} is not supported")
        return rope | _llama3(theta, freqs.data, head_dim)
    if kind == "none":
        settings.pop("rope.scaling.factor", None)
        settings.pop("rope.scaling.original_context_length", None)
        return rope
    rope["factor"] = need("rope.scaling.factor")
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow"):
            if (value := settings.pop(f"rope.scaling.yarn_{name}", None)) is not None:
                rope[name] = value
        original = need("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
    return rope


def _llama3(theta: float, divisors: np.ndarray, head_dim: int) -> dict[str, Any]:
    """Returns the settings of Llama 3.1's scaling, of which a file has only the frequencies."""
    rope = Rope(theta, "llama3", float(divisors.max()), original_max_positions=8192)
    expected = frequencies(Rope(theta), head_dim)[0] / frequencies(rope, head_dim)[0]
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(
            f"{ROPE_FREQS} has other divisors than Llama 3.1 to 3.3, which is not supported: load "
            "the model's Hugging Face directory"
        )
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }


def _weights(config: DecoderConfig, tensors: Mapping[str, gguf.ReaderTensor]) -> dict[str, Weight]:
    """Returns the tensors of a config; raises ValueError with all mismatches."""
    names = gguf.get_tensor_name_map(_arch(config.family), config.num_layers)
    shapes = flax.traverse_util.flatten_dict(abstract_params(build(config))["params"])
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    weights, problems, used = {}, [], {ROPE_FREQS}
    for tensor in tensors_of(config):
        if tensor.name in weights:  # of several parameters
            continue
        hf_name = EXPERT.sub("experts.", tensor.name)
        name = str(names.get_name(hf_name, (".weight", ".bias")))
        used.add(name)
        if name not in tensors:
            problems.append(f"missing {name}")
            continue
        parameter = shapes[tensor.path].value.shape
        shape, expected = tensor.stored_shape(parameter), tensor.matrix_shape(parameter)
        if tensor.expert is not None:
            expected = (parameter[0], *expected)
        if (found := tuple(tensors[name].shape[::-1].tolist())) != expected:
            problems.append(f"{name} has shape {found}, expected {expected}")
        group = None
        if isinstance(tensor.fused, Fused) and config.family == "falcon":
            group = tensor.fused.groups, tensor.fused.sizes
        is_llama = config.family in ("llama", MIXTRAL)
        permuted = heads.get(tensor.name.split(".")[-2], 0) if is_llama else 0
        weights[tensor.name] = Weight(
            shape, tensors[name], permuted, group, tensor.transposed, tensor.expert
        )
    problems += [f"unexpected {name}" for name in tensors if name not in used]
    if problems:
        raise ValueError(
            f"the tensors do not match the metadata ({len(problems)} problems):\n  "
            + "\n  ".join(problems)
        )
    matrices = [tensor.name for tensor in tensors_of(config) if tensor.is_block_matrix]
    if not all(weights[name].stored.tensor_type in KINDS for name in matrices):
        return weights  # a module has one format, and some matrices have none
    return {
        name: weight._replace(kind=KINDS.get(weight.stored.tensor_type))
        for name, weight in weights.items()
    }


def _arch(family: str) -> gguf.MODEL_ARCH:
    family = "llama" if family == MIXTRAL else family
    architecture = next(name for name, known in ARCHITECTURES.items() if known == family)
    return next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _check_types(weights: Mapping[str, Weight]) -> None:
    """Raises ValueError unless `gguf` can dequantize all types of tensors."""
    for tensor in {
        weight.stored.tensor_type: weight.stored for weight in weights.values()
    }.values():
        try:
            gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{tensor.name} has type {tensor.tensor_type.name}, which the package gguf cannot "
                f"dequantize: {_remedy()}"
            ) from error


def write_directory(model: GgufModel, path: str | os.PathLike) -> None:
    """Writes a model to an existing directory in Hugging Face format."""
    path = pathlib.Path(path)
    config = {**write_config(model.config), **model.special, "torch_dtype": "float32"}
    if any(weight.kind is not None for weight in model.weights.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    contents: dict[str, Any] = {"config.json": config, "generation_config.json": model.special}
    if model.tokenizer is not None:
        tokenizer, contents["tokenizer_config.json"] = model.tokenizer
        tokenizer.save(str(path / "tokenizer.json"))
    for name, content in contents.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _write_weights(path / "model.safetensors", model.weights)


def _write_weights(path: pathlib.Path, weights: Mapping[str, Weight]) -> None:
    """Writes a safetensors file; `safetensors` itself needs all tensors in memory.

    The format: the header's length in 8 bytes, the header as JSON with each tensor's dtype, shape
    and byte range, and the tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        for part, (dtype, shape) in weight.shapes(name).items():
            start, end = end, end + _bytes(dtype, shape)
            header[part] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights.values():
            for values in weight.values():
                file.write(values.data)
