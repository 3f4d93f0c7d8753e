"""Configs and special tokens from the metadata of GGUF files.

Every setting of the architecture is read, known to have no effect, or an error.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from models.decoder_config import DecoderConfig
from models.families import FAMILIES
from models.gguf.tensors import FileTensor
from models.gguf.tokenizer import TokenType, unsupported
from models.hf_config import read_config
from models.hf_config_parts import FULL, SLIDING
from models.positions import Rope, frequencies

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
# Layers of Gemma's largest models, whose queries have another scale.
LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3_text": 62}
# Settings of which one value is supported.
SUPPORTED_VALUES = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "attention.max_alibi_bias": 8.0,
}
IGNORED = ("rope.scaling.finetuned", "tensor_data_layout")
END_KEYS = ("eos", "eot", "eom")  # end of text, turn and message
# Ends of turns that files may not name, and by whose text llama.cpp finds them.
END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|call|>")
ROPE_FREQS = "rope_freqs.weight"
WINDOW_PATTERN = "attention.sliding_window_pattern"
ROPE_SECTIONS = "rope.dimension_sections"
_GEMMA_4_REQUIRED = (
    *("attention.key_length", "attention.key_length_swa", "rope.freq_base", "rope.freq_base_swa"),
    *("attention.sliding_window", WINDOW_PATTERN, "attention.head_count_kv", "feed_forward_length"),
)
# Sizes that must be equal.
_GEMMA_4_EQUAL_SIZES = {
    "attention.value_length": "attention.key_length",
    "attention.value_length_swa": "attention.key_length_swa",
    "rope.dimension_count_swa": "attention.key_length_swa",
}
_SETTING_SUFFIXES = {FULL: "", SLIDING: "_swa"}  # of names of settings


def decoder_config(metadata: Mapping[str, Any], tensors: Mapping[str, FileTensor]) -> DecoderConfig:
    """Returns the config of a model; raises ValueError for what is not supported.

    Args:
      metadata: the file's.
      tensors: the file's tensors, by name; some settings are only in their shapes or presence.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unsupported("general.architecture", architecture, ARCHITECTURES)
    prefix = f"{architecture}."
    settings = {
        name.removeprefix(prefix): value
        for name, value in metadata.items()
        if name.startswith(prefix)
    }
    raw = _gemma_4_keys(settings, tensors) if architecture == "gemma4" else {}
    settings = {
        name: _shortest_decimal(_same_in_all_layers(prefix + name, value))
        for name, value in settings.items()
    }

    def pop_required(name: str) -> Any:
        if name not in settings:
            raise ValueError(f"{prefix}{name} is missing: the file is damaged or too old")
        return settings.pop(name)

    if "token_embd.weight" not in tensors:
        raise ValueError("token_embd.weight is missing: the file holds no language model")
    family = _family(architecture, settings)
    fields = _common_fields(prefix, family, settings, tensors, pop_required)
    head_dim, num_kv_heads = fields["head_dim"], fields["num_kv_heads"]
    rotary_dim = settings.pop("rope.dimension_count", head_dim)
    sizes = {"attention.value_length": settings.pop("attention.value_length", head_dim)}
    if "partial_rotary_factor" not in FAMILIES[family].defaults:
        sizes["rope.dimension_count"] = rotary_dim
    for name, size in sizes.items():
        if size != head_dim:
            raise ValueError(f"{prefix}{name}={size} is not supported: it must be {head_dim}")
    if "rope_factors_short.weight" in tensors:
        raise ValueError(
            "rope_factors_short.weight (LongRoPE) is not supported: load the model's Hugging Face "
            "directory"
        )
    raw |= {"model_type": family} | _family_keys(family, fields, settings, tensors)
    if "delta_net" in FAMILIES[family].parts:
        raw |= _delta_net_keys(family, rotary_dim, settings, pop_required)
    if {"rope", "rope_or_alibi", "two_ropes"} & set(FAMILIES[family].parts):
        raw["rope_parameters"] = _rope_parameters(
            settings, pop_required, tensors.get(ROPE_FREQS), head_dim
        )
        if family == "gpt_oss" and raw["rope_parameters"]["rope_type"] == "yarn":
            raw["rope_parameters"]["truncate"] = False
        if "partial_rotary_factor" in FAMILIES[family].defaults:
            raw["rope_parameters"]["partial_rotary_factor"] = rotary_dim / head_dim
    _check_unread(prefix, settings)
    config = read_config(raw)
    if (config.num_kv_heads, config.head_dim) != (num_kv_heads, head_dim):
        raise ValueError(
            f"{prefix}attention.head_count_kv={num_kv_heads} with heads of size {head_dim} is not "
            f"supported: it must be {config.num_kv_heads}, of size {config.head_dim}"
        )
    return config


def _family(architecture: str, settings: Mapping[str, Any]) -> str:
    """Returns the family of a model; raises ValueError if it cannot have its number of experts."""
    num_experts = settings.get("expert_count", 0)
    family = ARCHITECTURES[architecture]
    if num_experts and family == "llama":
        family = MIXTRAL
    if bool(num_experts) != ("num_experts" in FAMILIES[family].keys.values()):
        raise ValueError(
            f"{architecture}.expert_count={num_experts} is not supported for {architecture}"
        )
    return family


def _common_fields(
    prefix: str,
    family: str,
    settings: dict[str, Any],
    tensors: Mapping[str, FileTensor],
    pop_required: Callable[[str], Any],
) -> dict[str, Any]:
    """Returns fields of `DecoderConfig` that all families have; takes from `settings`."""
    settings.pop("vocab_size", None)  # the embedding has as many rows
    hidden_size, num_heads = pop_required("embedding_length"), pop_required("attention.head_count")
    num_experts, experts_per_token = (settings.pop(f"expert_{n}count", 0) for n in ("", "used_"))
    mlp_prefix = "expert_" if num_experts and family != MIXTRAL else ""
    if mlp_prefix:
        settings.pop("feed_forward_length", None)  # of layers without experts
    mtp_layers = settings.pop("nextn_predict_layers", 0)
    if mtp_layers > 1:
        raise ValueError(f"{prefix}nextn_predict_layers={mtp_layers} is not supported: at most 1")
    norm = "layer_norm_rms" if "attention.layer_norm_rms_epsilon" in settings else "layer_norm"
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": pop_required(f"{mlp_prefix}feed_forward_length"),
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "num_layers": pop_required("block_count") - mtp_layers,
        "num_heads": num_heads,
        "num_kv_heads": settings.pop("attention.head_count_kv", num_heads),
        "head_dim": settings.pop("attention.key_length", hidden_size // num_heads),
        "max_positions": pop_required("context_length"),
        "norm_eps": pop_required(f"attention.{norm}_epsilon"),
        "tie_embeddings": "output.weight" not in tensors,
        "out_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _check_unread(prefix: str, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that is not read, unless it has no effect."""
    for name, value in settings.items():
        if name not in IGNORED and (
            name not in SUPPORTED_VALUES or value != SUPPORTED_VALUES[name]
        ):
            known = name in SUPPORTED_VALUES
            remedy = f"it must be {SUPPORTED_VALUES[name]}" if known else "it is not known"
            raise ValueError(f"{prefix}{name}={value!r} is not supported: {remedy}")


def _family_keys(
    family: str,
    fields: Mapping[str, Any],
    settings: dict[str, Any],
    tensors: Mapping[str, FileTensor],
) -> dict[str, Any]:
    """Returns the keys of a family's config.json, except the rotary ones; takes from `settings`."""
    keys = {key: FAMILIES[family].fields(key)[-1] for key in FAMILIES[family].keys}
    raw = {key: fields[name] for key, name in keys.items() if name in fields}
    num_heads, num_kv_heads = fields["num_heads"], fields["num_kv_heads"]
    if {"window", "alternating_window"} & set(FAMILIES[family].parts):
        name = "attention.sliding_window"
        if family == "gpt_oss" and not settings.get(name):
            raise ValueError(f"gpt-oss.{name} is missing: the file is damaged or too old")
        default = 4096 if family == "gemma2" else None  # llama.cpp's
        raw["sliding_window"] = settings.pop(name, default)
    if "alternating_window" in FAMILIES[family].parts and WINDOW_PATTERN in settings:
        pattern = settings.pop(WINDOW_PATTERN)
        if isinstance(pattern, list):  # whether each layer has the window
            raw["layer_types"] = [SLIDING if is_sliding else FULL for is_sliding in pattern]
        else:
            raw["sliding_window_pattern"] = pattern
    if family in LARGEST_GEMMA_LAYERS:
        raw |= _gemma_keys(family, fields, settings)
    if family == "granite":
        raw |= _granite_keys(fields, settings)
    if family == "olmo2" and (window := settings.get("attention.sliding_window")):
        raise ValueError(
            f"olmo2.attention.sliding_window={window} (OLMo 3) is not supported: load the model's "
            "Hugging Face directory"
        )
    if family in ("qwen3_moe", "qwen3_next"):  # of which llama.cpp normalizes the weights
        raw["norm_topk_prob"] = True
    if family == "gpt_bigcode":
        raw["multi_query"] = num_kv_heads == 1
    if family == "mpt":
        raw["attn_config"] = {"clip_qkv": settings.pop("attention.clamp_kqv", None)}
    if family == "falcon":
        num_norms = 1 + ("blk.0.attn_norm_2.weight" in tensors)
        is_new = num_norms == 2 or num_kv_heads not in (1, num_heads)
        raw |= {"new_decoder_architecture": is_new, "multi_query": num_kv_heads == 1}
        raw |= {"num_kv_heads": num_kv_heads, "num_ln_in_parallel_attn": num_norms}
    return raw


def _gemma_keys(family: str, fields: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns keys of which llama.cpp leaves the defaults out of a file."""
    names = {
        "rope_local_base_freq": "rope.freq_base_swa",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    raw = {key: settings.pop(name) for key, name in names.items() if name in settings}
    head_dim = fields["head_dim"]
    if fields["num_layers"] == LARGEST_GEMMA_LAYERS[family]:
        head_dim = fields["hidden_size"] / fields["num_heads"]
    return {"query_pre_attn_scalar": head_dim, **raw}


def _gemma_4_keys(settings: dict[str, Any], tensors: Mapping[str, FileTensor]) -> dict[str, Any]:
    """Returns what differs between the two kinds of layers, and keys of Gemma 4 alone.

    Takes from `settings`, and leaves those of the windowed layers.
    """
    missing = [name for name in _GEMMA_4_REQUIRED if name not in settings]
    if missing or ROPE_FREQS not in tensors:
        raise ValueError(
            f"gemma4.{(missing or [ROPE_FREQS])[0]} is missing: the file is damaged or too old"
        )
    is_sliding = settings.pop(WINDOW_PATTERN)
    first_full = is_sliding.index(False)
    raw: dict[str, Any] = {
        "layer_types": [SLIDING if sliding else FULL for sliding in is_sliding],
        "global_head_dim": settings["attention.key_length"],
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": settings.pop("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": settings.pop("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": tensors["token_embd.weight"].shape[0],
        "sliding_window": settings.pop("attention.sliding_window"),
        "final_logit_softcapping": settings.pop("final_logit_softcapping", None),
    }
    for name, size in (
        ("rope.dimension_count", "attention.key_length"),
        *_GEMMA_4_EQUAL_SIZES.items(),
    ):
        if settings.get(name, settings[size]) != settings[size]:
            raise ValueError(
                f"gemma4.{name}={settings[name]} is not supported: it must be {settings[size]}"
            )
        settings.pop(name, None)
    settings["attention.key_length"] = settings.pop("attention.key_length_swa")
    for name in ("attention.head_count_kv", "feed_forward_length"):
        values = settings[name]
        values = values if isinstance(values, list) else [values] * len(is_sliding)
        settings[name] = values[is_sliding.index(True)]
        if name == "feed_forward_length":
            raw["use_double_wide_mlp"] = values[-1] != values[0]
        elif raw["attention_k_eq_v"]:
            raw["num_global_key_value_heads"] = values[first_full]
    divisors = tensors[ROPE_FREQS].dequantized()
    rotated_pairs = int((divisors == 1).sum())
    if not (divisors[:rotated_pairs] == 1).all() or (divisors[rotated_pairs:] < 1e29).any():
        raise ValueError(f"{ROPE_FREQS} has other divisors than Gemma 4, which is not supported")
    theta = {
        kind: _shortest_decimal(settings.pop(f"rope.freq_base{suffix}"))
        for kind, suffix in _SETTING_SUFFIXES.items()
    }
    raw["rope_parameters"] = {
        FULL: {
            "rope_type": "proportional",
            "rope_theta": theta[FULL],
            "partial_rotary_factor": rotated_pairs / len(divisors),
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


def _granite_keys(fields: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
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


def _delta_net_keys(
    family: str, rotary_dim: int, settings: dict[str, Any], pop_required: Callable[[str], Any]
) -> dict[str, Any]:
    """Returns the sizes of gated delta nets and of the shared expert, and the layers of each kind.

    Sections of the rotation are of positions in images, of which those of a text are equal.
    """
    sections = settings.pop(ROPE_SECTIONS, None)
    if sections and any(i >= 3 * sections[i % 3] for i in range(rotary_dim // 2)):
        raise ValueError(
            f"{ROPE_SECTIONS}={sections} is not supported: the first three must have all "
            f"{rotary_dim // 2} pairs of rotated elements"
        )
    value_heads = pop_required("ssm.time_step_rank")
    raw = {
        "full_attention_interval": settings.pop("full_attention_interval", 4),
        "linear_conv_kernel_dim": pop_required("ssm.conv_kernel"),
        "linear_key_head_dim": pop_required("ssm.state_size"),
        "linear_num_key_heads": pop_required("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": pop_required("ssm.inner_size") // value_heads,
    }
    if "shared_expert_intermediate_size" in FAMILIES[family].keys:
        size = pop_required("expert_shared_feed_forward_length")
        raw["shared_expert_intermediate_size"] = size
    return raw


def _same_in_all_layers(name: str, value: Any) -> Any:
    """Returns the value of a setting, which a file may repeat for each layer.

    Raises ValueError for one that differs between layers, except those with other lists.
    """
    if not isinstance(value, list) or name.endswith((WINDOW_PATTERN, ROPE_SECTIONS)):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"{name}={value} is not supported: it must be the same for all layers")
    return value[0]


def _shortest_decimal(value: Any) -> Any:
    """Returns a float32 as the shortest decimal number: 1e-05 instead of 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_parameters(
    settings: dict[str, Any],
    pop_required: Callable[[str], Any],
    freq_divisors: FileTensor | None,
    head_dim: int,
) -> dict[str, Any]:
    """Returns `rope_parameters`; removes the rotary settings."""
    theta = settings.pop("rope.freq_base", 10000.0)
    scaling_type = settings.pop("rope.scaling.type", "none")
    rope = {"rope_theta": theta, "rope_type": "default" if scaling_type == "none" else scaling_type}
    if scaling_type not in ("none", "linear", "yarn"):
        raise unsupported("rope.scaling.type", scaling_type, ("none", "linear", "yarn"))
    if freq_divisors is not None:
        if scaling_type != "none":
            raise ValueError(
                f"rope.scaling.type={scaling_type!r} with {ROPE_FREQS} is not supported"
            )
        return rope | _llama3_scaling(theta, freq_divisors.dequantized(), head_dim)
    if scaling_type == "none":
        settings.pop("rope.scaling.factor", None)
        settings.pop("rope.scaling.original_context_length", None)
        return rope
    rope["factor"] = pop_required("rope.scaling.factor")
    if scaling_type == "yarn":
        for name in ("beta_fast", "beta_slow"):
            if (value := settings.pop(f"rope.scaling.yarn_{name}", None)) is not None:
                rope[name] = value
        original_max_positions = pop_required("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original_max_positions
    return rope


def _llama3_scaling(theta: float, divisors: np.ndarray, head_dim: int) -> dict[str, Any]:
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


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bos_token_id, eos_token_id (an id or a list) and pad_token_id; None if not set."""
    ends = _end_token_ids(metadata)
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that end a text or a turn, the one of the text first."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in END_KEYS]
    types = metadata.get("tokenizer.ggml.token_type") or ()
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    for i, (token, token_type) in enumerate(zip(tokens, types)):
        if token_type == TokenType.CONTROL and token in END_OF_TURN_TOKENS:
            ids.append(i)
    return list(dict.fromkeys(i for i in ids if i is not None))
