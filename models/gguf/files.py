"""Reads GGUF files of llama.cpp.

`read_gguf` validates a whole file without reading its weights, and `write_directory` writes its
config and tokenizer in Hugging Face format, and an index of its tensors. `weights_of` maps the
tensors of such a directory to those of Hugging Face format; they are memory-mapped.

On a CPU with the native kernels, matrices stay in the file's types (`packed_types`). Elsewhere,
those of the model's blocks in types of `blocks.KINDS` become integers with float32 scales, and
gpt-oss's experts stay in MXFP4; all others become float32. Every setting of the architecture is
read, known to have no effect, or an error.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.traverse_util
import gguf
import numpy as np
from tokenizers import Tokenizer

from models.build import abstract_params, build
from models.decoder_config import DecoderConfig
from models.eagle_checkpoints import tensors_of
from models.families import FAMILIES
from models.gguf.blocks import Type
from models.gguf.tensors import Experts, FileTensor, Tiles, Weight
from models.gguf.tokenizer import Type as TokenType
from models.gguf.tokenizer import read_tokenizer, unsupported
from models.hf_config import read_config
from models.hf_config_parts import FULL, SLIDING
from models.hf_config_writing import write_config
from models.hf_tensors import GGUF_INDEX, Fused, Tensor, check_not_pointer, mismatch
from models.mtp import MtpConfig
from models.mtp_checkpoints import PREFIX as MTP
from models.positions import Rope, frequencies
from models.quantized import MatrixFormats, check_fits
from pallas_kernels.cpu.packed import OUTPUTS

# The family of each architecture.
ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "falcon", "gpt2", "mpt", "phi3")},
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "qwen3moe": "qwen3_moe",
    **{name: name for name in ("smollm3", "olmo2", "granite")},
    "starcoder": "gpt_bigcode",
    "starcoder2": "starcoder2",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gemma4": "gemma4_text",
}
MIXTRAL = "mixtral"  # the family of a "llama" with experts
PERMUTED = ("llama", MIXTRAL, "smollm3", "granite")  # families whose q and k llama.cpp permutes
# Names in llama.cpp's map of what has the scales of a router (Gemma 4).
SCALED = {"router.scale": "router.proj", "router.per_expert_scale": "experts.down_proj"}
# Families whose value heads of gated delta nets llama.cpp reorders.
TILED = ("qwen3_5_text", "qwen3_5_moe_text")
# Layers of Gemma's largest models, whose queries have another scale.
LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}
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
# Ends of turns that files may not name, and by whose text llama.cpp finds them.
END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|call|>")
ROPE_FREQS = "rope_freqs.weight"
PATTERN = "attention.sliding_window_pattern"
SECTIONS = "rope.dimension_sections"
# The first tensor of a head for multi-token prediction, in a block of its own after the model's.
HEAD = re.compile(r"blk\.(\d+)\.nextn\.eh_proj\.weight")
HEAD_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
_GEMMA_4 = (
    *("attention.key_length", "attention.key_length_swa", "rope.freq_base", "rope.freq_base_swa"),
    *("attention.sliding_window", PATTERN, "attention.head_count_kv", "feed_forward_length"),
)
# Sizes that must be equal.
_GEMMA_4_SIZES = {
    "attention.value_length": "attention.key_length",
    "attention.value_length_swa": "attention.key_length_swa",
    "rope.dimension_count_swa": "attention.key_length_swa",
}
_ENDS = {FULL: "", SLIDING: "_swa"}  # of names of settings
EXPERT = re.compile(r"experts\.\d+\.")  # in the name of a tensor of Hugging Face


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
            raise ValueError(f"{path} has an unknown tensor type: {error}; {_remedy()}") from error
        raise ValueError(
            f"{path} is not a complete GGUF file (it has {os.path.getsize(path)} bytes): {error}; "
            "download it again"
        ) from error


def _remedy() -> str:
    return "upgrade the package gguf, or load a file with other tensor types, such as Q8_0 or F16"


def _read(reader: gguf.GGUFReader, path: str) -> GgufModel:
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(
            f"the file is one of {parts} parts: merge them with llama-gguf-split --merge"
        )
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unsupported("general.architecture", architecture, ARCHITECTURES)
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
    config = _config(architecture, metadata, tensors)
    weights = _weights(config, tensors)
    _check_types(weights)
    ends = _ends(metadata)
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
    return GgufModel(config, weights, special, tokenizer, tensors)


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that end a text or a turn, the one of the text first."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    types = metadata.get("tokenizer.ggml.token_type") or ()
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    for i, (token, kind) in enumerate(zip(tokens, types)):
        if kind == TokenType.CONTROL and token in END_TOKENS:
            ids.append(i)
    return list(dict.fromkeys(i for i in ids if i is not None))


def _config(
    architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, FileTensor]
) -> DecoderConfig:
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): x for name, x in metadata.items() if name.startswith(prefix)}
    raw = _of_gemma_4(own, tensors) if architecture == "gemma4" else {}
    settings = {name: _decimal(_of_all_layers(prefix + name, value)) for name, value in own.items()}

    def need(name: str) -> Any:
        if name not in settings:
            raise ValueError(f"{prefix}{name} is missing: the file is damaged or too old")
        return settings.pop(name)

    if "token_embd.weight" not in tensors:
        raise ValueError("token_embd.weight is missing: the file holds no language model")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = settings.pop("attention.key_length", hidden // heads)
    family, kv_heads = ARCHITECTURES[architecture], settings.pop("attention.head_count_kv", heads)
    rotated = settings.pop("rope.dimension_count", head_dim)
    sizes = {"attention.value_length": settings.pop("attention.value_length", head_dim)}
    if "partial_rotary_factor" not in FAMILIES[family].defaults:
        sizes["rope.dimension_count"] = rotated
    for name, size in sizes.items():
        if size != head_dim:
            raise ValueError(f"{prefix}{name}={size} is not supported: it must be {head_dim}")
    if "rope_factors_short.weight" in tensors:
        raise ValueError(
            "rope_factors_short.weight (LongRoPE) is not supported: load the model's Hugging Face "
            "directory"
        )
    settings.pop("vocab_size", None)  # the embedding has as many rows
    rms = f"{prefix}attention.layer_norm_rms_epsilon" in metadata
    experts, per_token = (settings.pop(f"expert_{n}count", 0) for n in ("", "used_"))
    if experts and family == "llama":
        family = MIXTRAL
    if bool(experts) != ("num_experts" in FAMILIES[family].keys.values()):
        raise ValueError(f"{prefix}expert_count={experts} is not supported for {architecture}")
    own_size = "expert_" if experts and family != MIXTRAL else ""
    if own_size:
        settings.pop("feed_forward_length", None)  # of layers without experts
    heads_of_mtp = settings.pop("nextn_predict_layers", 0)
    if heads_of_mtp > 1:
        raise ValueError(f"{prefix}nextn_predict_layers={heads_of_mtp} is not supported: at most 1")
    fields = {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": need(f"{own_size}feed_forward_length"),
        "num_experts": experts,
        "experts_per_token": per_token,
        "num_layers": need("block_count") - heads_of_mtp,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": need("context_length"),
        "norm_eps": need(f"attention.layer_norm_{'rms_' if rms else ''}epsilon"),
        "tie_embeddings": "output.weight" not in tensors,
        "out_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    raw |= {"model_type": family} | _of_family(family, fields, settings, tensors)
    if "delta_net" in FAMILIES[family].parts:
        raw |= _of_delta_net(family, rotated, settings, need)
    if {"rope", "rope_or_alibi", "two_ropes"} & set(FAMILIES[family].parts):
        raw["rope_parameters"] = _rope(settings, need, tensors.get(ROPE_FREQS), head_dim)
        if family == "gpt_oss" and raw["rope_parameters"]["rope_type"] == "yarn":
            raw["rope_parameters"]["truncate"] = False
        if "partial_rotary_factor" in FAMILIES[family].defaults:
            raw["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
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
    tensors: Mapping[str, FileTensor],
) -> dict[str, Any]:
    """Returns the keys of a family's config.json, except the rotary ones; takes from `settings`."""
    keys = {key: FAMILIES[family].fields(key)[-1] for key in FAMILIES[family].keys}
    raw = {key: fields[name] for key, name in keys.items() if name in fields}
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    if {"window", "alternating_window"} & set(FAMILIES[family].parts):
        name = "attention.sliding_window"
        if family == "gpt_oss" and not settings.get(name):
            raise ValueError(f"gpt-oss.{name} is missing: the file is damaged or too old")
        default = 4096 if family == "gemma2" else None  # llama.cpp's
        raw["sliding_window"] = settings.pop(name, default)
    if "alternating_window" in FAMILIES[family].parts and PATTERN in settings:
        pattern = settings.pop(PATTERN)
        if isinstance(pattern, list):  # whether each layer has the window
            raw["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
        else:
            raw["sliding_window_pattern"] = pattern
    if family in LARGEST_GEMMA:
        raw |= _of_gemma(family, fields, settings)
    if family == "granite":
        raw |= _of_granite(fields, settings)
    if family == "olmo2" and (window := settings.get("attention.sliding_window")):
        raise ValueError(
            f"olmo2.attention.sliding_window={window} (OLMo 3) is not supported: load the model's "
            "Hugging Face directory"
        )
    if family in ("qwen3_moe", "qwen3_next"):  # of which llama.cpp normalizes the weights
        raw["norm_topk_prob"] = True
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


def _of_gemma(family: str, fields: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns keys of which llama.cpp leaves the defaults out of a file."""
    names = {
        "rope_local_base_freq": "rope.freq_base_swa",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    raw = {key: settings.pop(name) for key, name in names.items() if name in settings}
    head_dim = fields["head_dim"]
    if fields["num_layers"] == LARGEST_GEMMA[family]:
        head_dim = fields["hidden_size"] / fields["num_heads"]
    return {"query_pre_attn_scalar": head_dim, **raw}


def _of_gemma_4(settings: dict[str, Any], tensors: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Returns what differs between the two kinds of layers, and keys of Gemma 4 alone.

    Takes from `settings`, and leaves those of the windowed layers.
    """
    missing = [name for name in _GEMMA_4 if name not in settings]
    if missing or ROPE_FREQS not in tensors:
        raise ValueError(
            f"gemma4.{(missing or [ROPE_FREQS])[0]} is missing: the file is damaged or too old"
        )
    slides = settings.pop(PATTERN)
    full = slides.index(False)
    raw: dict[str, Any] = {
        "layer_types": [SLIDING if windowed else FULL for windowed in slides],
        "global_head_dim": settings["attention.key_length"],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": settings.pop("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": settings.pop("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": tensors["token_embd.weight"].shape[0],
        "sliding_window": settings.pop("attention.sliding_window"),
        "final_logit_softcapping": settings.pop("final_logit_softcapping", None),
    }
    for name, size in (("rope.dimension_count", "attention.key_length"), *_GEMMA_4_SIZES.items()):
        if settings.get(name, settings[size]) != settings[size]:
            raise ValueError(
                f"gemma4.{name}={settings[name]} is not supported: it must be {settings[size]}"
            )
        settings.pop(name, None)
    settings["attention.key_length"] = settings.pop("attention.key_length_swa")
    for name in ("attention.head_count_kv", "feed_forward_length"):
        values = settings[name]
        values = values if isinstance(values, list) else [values] * len(slides)
        settings[name] = values[slides.index(True)]
        if name == "feed_forward_length":
            raw["use_double_wide_mlp"] = values[-1] != values[0]
        elif raw["attention_k_eq_v"]:
            raw["num_global_key_value_heads"] = values[full]
    divisors = tensors[ROPE_FREQS].dequantized()
    rotated = int((divisors == 1).sum())
    if not (divisors[:rotated] == 1).all() or (divisors[rotated:] < 1e29).any():
        raise ValueError(f"{ROPE_FREQS} has other divisors than Gemma 4, which is not supported")
    theta = {kind: _decimal(settings.pop(f"rope.freq_base{end}")) for kind, end in _ENDS.items()}
    raw["rope_parameters"] = {
        FULL: {
            "rope_type": "proportional",
            "rope_theta": theta[FULL],
            "partial_rotary_factor": rotated / len(divisors),
        },
        SLIDING: {"rope_type": "default", "rope_theta": theta[SLIDING]},
    }
    if settings.get("expert_count"):
        raw |= {
            "enable_moe_block": True,
            "num_experts": settings.pop("expert_count"),
            "top_k_experts": settings.pop("expert_used_count"),
            "moe_intermediate_size": settings.pop("expert_feed_forward_length"),
        }
    return raw


def _of_granite(fields: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the multipliers; llama.cpp does not apply those that a file does not have."""
    name = "rope.scaling.finetuned"
    if not settings.pop(name, True):  # llama.cpp's switch of the rotation
        raise ValueError(f"granite.{name}=False (no rotary positions) is not supported")
    if "logit_scale" not in settings:
        raise ValueError("granite.logit_scale is missing: the file is damaged or too old")
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    scale = settings.pop("attention.scale", fields["head_dim"] ** -0.5)
    multipliers = {key: settings.pop(name, 1.0) for key, name in names.items()}
    return {"attention_multiplier": scale, **multipliers}


def _of_delta_net(
    family: str, rotated: int, settings: dict[str, Any], need: Callable[[str], Any]
) -> dict[str, Any]:
    """Returns the sizes of gated delta nets and of the shared expert, and the layers of each kind.

    Sections of the rotation are of positions in images, of which those of a text are equal.
    """
    sections = settings.pop(SECTIONS, None)
    if sections and any(i >= 3 * sections[i % 3] for i in range(rotated // 2)):
        raise ValueError(
            f"{SECTIONS}={sections} is not supported: the first three must have all {rotated // 2} "
            "pairs of rotated elements"
        )
    heads = need("ssm.time_step_rank")
    raw = {
        "full_attention_interval": settings.pop("full_attention_interval", 4),
        "linear_conv_kernel_dim": need("ssm.conv_kernel"),
        "linear_key_head_dim": need("ssm.state_size"),
        "linear_num_key_heads": need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": need("ssm.inner_size") // heads,
    }
    if "shared_expert_intermediate_size" in FAMILIES[family].keys:
        size = need("expert_shared_feed_forward_length")
        raw["shared_expert_intermediate_size"] = size
    return raw


def _of_all_layers(name: str, value: Any) -> Any:
    """Returns the value of a setting, which a file may repeat for each layer.

    Raises ValueError for one that differs between layers, except those with other lists.
    """
    if not isinstance(value, list) or name.endswith((PATTERN, SECTIONS)):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"{name}={value} is not supported: it must be the same for all layers")
    return value[0]


def _decimal(value: Any) -> Any:
    """Returns a float32 as the shortest decimal number: 1e-05 instead of 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(
    settings: dict[str, Any],
    need: Callable[[str], Any],
    freqs: FileTensor | None,
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
        return rope | _llama3(theta, freqs.dequantized(), head_dim)
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


def _weights(
    config: DecoderConfig, tensors: Mapping[str, FileTensor]
) -> dict[str, Weight | Experts]:
    """Returns the tensors of a config; raises ValueError with all mismatches."""
    of_head = isinstance(config, MtpConfig)
    head = next((int(match[1]) for match in map(HEAD.fullmatch, tensors) if match), None)
    blocks = config.num_layers if head is None else head + 1
    names = gguf.get_tensor_name_map(_arch(config.family), blocks)
    shapes = flax.traverse_util.flatten_dict(abstract_params(build(config))["params"])
    weights: dict[str, Weight | Experts] = {}
    problems, used = list[str](), {ROPE_FREQS}
    for tensor in tensors_of(config):
        if tensor.name in weights:  # of several parameters
            continue
        sources = _names(tensor, names, tensors, head)
        used.update(sources)
        if missing := [name for name in sources if name not in tensors]:
            problems += [f"missing {name}" for name in missing]
            continue
        parameter = shapes[tensor.path].value.shape
        shape, expected = tensor.stored_shape(parameter), tensor.matrix_shape(parameter)
        if tensor.experts is not None:
            expected = parameter
        if tensor.expert is not None:
            expected = (parameter[0], *expected)
        if tensor.stacked is not None:
            expected = shape
        stored = tuple(tensors[name] for name in sources)
        for parts in [stored] if tensor.experts is None else zip(stored):
            found = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            if _without_ones(found) != _without_ones(expected):
                name = " and ".join(part.name for part in parts)
                problems.append(f"{name} has shape {found}, expected {expected}")
        if tensor.experts is None:
            weights[tensor.name] = _weight(config, tensor, shape, *stored)
        else:
            weights[tensor.name] = Experts(shape, stored)
    unread = [f"blk.{i}.attn_" for i, source in enumerate(config.kv_sources) if source is not None]
    used.update(f"{start}{part}.weight" for start in unread for part in ("k", "v", "k_norm"))
    own = (name for name in tensors if name.startswith(f"blk.{head}.") == of_head)
    problems += [f"unexpected {name}" for name in own if name not in used]
    if problems:
        raise mismatch("tensors", "the metadata", problems)
    return {name: _quantized(weight) for name, weight in weights.items()}


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without axes of size 1, of which llama.cpp drops some."""
    return tuple(size for size in shape if size != 1)


def _names(
    tensor: Tensor,
    names: gguf.TensorNameMap,
    tensors: Collection[str],
    head: int | None,
) -> list[str]:
    """Returns the names of the tensors of a file that a tensor of Hugging Face format has.

    Args:
      tensor: in Hugging Face format.
      names: llama.cpp's map.
      tensors: the names in the file.
      head: the block of the head for multi-token prediction; None: there is none.
    """
    part, _, suffix = tensor.name.removeprefix(MTP).rpartition(".")
    if tensor.name.startswith(MTP) and part in HEAD_NAMES:
        return [f"blk.{head}.nextn.{HEAD_NAMES[part]}.{suffix}"]
    block, _, part = tensor.name.partition(".router.")
    if scaled := SCALED.get(f"router.{part}"):
        return [f"{names.get_name(f'{block}.{scaled}')}.scale"]
    if tensor.experts is None:
        name = tensor.name.replace(f"{MTP}layers.0.", f"model.layers.{head}.")
        name = EXPERT.sub("experts.", name).replace(".dt_bias", ".dt_proj.bias")
        suffix = "" if name.endswith((".weight", ".bias", ".A_log")) else ".weight"
        found = f"{names.get_name(name, ('.weight', '.bias'))}{suffix}"
        if ".ssm_in." in found and found not in tensors:  # in newer files two, without groups
            return [found.replace("ssm_in", name) for name in ("attn_qkv", "attn_gate")]
        return [found]
    stem = tensor.name.removesuffix("_bias")
    parts = [stem.replace("gate_up", x) for x in ("gate", "up")] if "gate_up" in stem else [stem]
    suffix = "weight" if stem == tensor.name else "bias"
    return [f"{names.get_name(part)}.{suffix}" for part in parts]


def _weight(
    config: DecoderConfig,
    tensor: Tensor,
    shape: tuple[int, ...],
    stored: FileTensor,
    after: FileTensor | None = None,
) -> Weight:
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    group = None
    if isinstance(tensor.fused, Fused) and (config.family == "falcon" or after is not None):
        group = tensor.fused.groups, tensor.fused.sizes
    is_permuted = config.family in PERMUTED
    permuted = heads.get(tensor.name.split(".")[-2], 0) if is_permuted else 0
    is_norm = tensor.path[-1] == "scale" and "delta_net" not in tensor.path
    is_shifted = config.norm == "rms_plus_one" and is_norm
    return Weight(
        shape,
        stored,
        permuted,
        group,
        tensor.transposed,
        tensor.expert,
        added=1.0 if is_shifted else 0.0,
        is_log=tensor.path[-1] == "log_rate",
        after=after,
        tiles=_tiles(config, tensor),
    )


def _tiles(config: DecoderConfig, tensor: Tensor) -> Tiles | None:
    """Returns the order of the value heads in a tensor; None: as in Hugging Face format."""
    shape = config.delta_net
    if config.family not in TILED or shape is None or "delta_net" not in tensor.path:
        return None
    part = tensor.path[2]
    if part == "norm" or shape.key_heads == shape.value_heads:
        return None
    if part == "out":
        return Tiles(shape, axis=1)
    has_keys = part in ("q", "k", "v", "conv")
    return Tiles(shape, first=2 * shape.key_heads * shape.key_dim if has_keys else 0)


def _quantized(weight: Weight | Experts) -> Weight | Experts:
    """Returns a tensor that stays quantized if its type can."""
    if isinstance(weight, Weight):
        is_matrix = len(weight.shape) == 2
        return weight._replace(kind=weight.whole_kind if is_matrix else None)
    types = {source.tensor_type for source in weight.sources}
    return weight._replace(is_mxfp4=types == {Type.MXFP4})


def _arch(family: str) -> gguf.MODEL_ARCH:
    family = "llama" if family == MIXTRAL else family
    architecture = next(name for name, known in ARCHITECTURES.items() if known == family)
    return next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _octets(tensor: FileTensor) -> int:
    """Returns the bytes of a block of a tensor."""
    return gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]


def _check_types(weights: Mapping[str, Weight | Experts]) -> None:
    """Raises ValueError unless `gguf` can dequantize all types of tensors."""
    sources = (source for weight in weights.values() for source in weight.sources)
    for tensor in {source.tensor_type: source for source in sources}.values():
        try:
            gguf.dequantize(tensor.data[..., : _octets(tensor)], tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{tensor.name} has type {tensor.tensor_type.name}, which the package gguf cannot "
                f"dequantize: {_remedy()}"
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
    where = file.name if file.parent == path.absolute() else str(file)
    index = [(x.name, x.shape, x.type_name, x.offset, x.size) for x in tensors]
    contents: dict[str, Any] = {"config.json": config, "generation_config.json": model.special}
    contents[GGUF_INDEX] = {"file": where, "identity": _identity(file), "tensors": index}
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
    return [f"{MTP}{name}" for name, *_ in index["tensors"] if HEAD.fullmatch(name)]


def _identity(file: pathlib.Path) -> list[int]:
    """Returns what a change of a file changes: its size and the time of its last change, in ns."""
    return [file.stat().st_size, file.stat().st_mtime_ns]


@functools.lru_cache(maxsize=8)
def _indexed_weights(file: str, index: str, config: DecoderConfig) -> dict[str, Weight | Experts]:
    tensors = {
        name: FileTensor(file, name, tuple(shape), *others)
        for name, shape, *others in json.loads(index)["tensors"]
    }
    return _weights(config, tensors)


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
        rows = np.arange(weight.stored.shape[0])
        rows = rows if tensor.fused is None else tensor.fused.part(rows)
        kind = weight.packed_type
        if to is not None and tensor.is_block_matrix:
            check_fits(to, tensor.matrix, len(rows), weight.stored.shape[1])
            kind = to
        if kind is not None and len(rows) % OUTPUTS == 0:
            types.append((tensor.matrix, kind))
    return MatrixFormats(tuple(types))
