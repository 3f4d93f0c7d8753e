"""Writes the contents of a config.json from which `hf_config` reads the same config."""

import dataclasses
from collections.abc import Callable
from typing import Any

from models.decoder_config import DecoderConfig
from models.families import FAMILIES
from models.hf_config import read_config
from models.hf_config_keys import DELTA_NET_KEYS
from models.hf_config_parts import ATTN_CONFIG, FULL, LINEAR, ROPE_KEYS, ROPE_READS, SLIDING
from models.positions import Rope


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns the contents of a config.json from which `read_config` returns `config`.

    Raises ValueError if the config's family cannot express one of its settings.
    """
    if config.family not in FAMILIES:
        raise ValueError(
            f"family={config.family!r} is not supported: it must be one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[config.family]
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{key: values[0] for key, values in family.fixed.items()},
    }
    for key in family.keys:
        value = getattr(config, family.fields(key)[-1])
        if value is not None or key in family.defaults:
            raw[key] = value
    for setting in family.parts:
        raw |= WRITERS[setting](config)
    if (back := read_config(raw)) != config:
        names = [f.name for f in dataclasses.fields(config)]
        lost = [n for n in names if getattr(config, n) != getattr(back, n)]
        values = ", ".join(f"{n}={getattr(config, n)!r}" for n in lost)
        raise ValueError(f"family={config.family!r} cannot express {values}: change the family")
    return raw


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    """Returns both spellings; versions before transformers 5 read only those outside of a dict."""
    rope, family = config.rope, FAMILIES[config.family]
    if rope is None:
        return {}
    values = {name: getattr(rope, ROPE_KEYS[name]) for name in ROPE_READS[rope.kind]}
    settings = {
        "rope_type": rope.kind,
        **{name: value for name, value in values.items() if value is not None},
    }
    top_level: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.partial_rotary_factor != 1.0 or "partial_rotary_factor" in family.defaults:
        top_level["partial_rotary_factor"] = rope.partial_rotary_factor
    raw = {"rope_parameters": top_level | settings, **top_level}
    raw["rope_scaling"] = None if rope.kind == "default" else settings
    if rope.kind == "longrope" and rope.original_max_positions is not None:
        raw["original_max_position_embeddings"] = rope.original_max_positions
        raw["max_position_embeddings"] = round(rope.factor * rope.original_max_positions)
    return raw


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _write_optional_window(config: DecoderConfig) -> dict[str, Any]:
    slides = config.sliding_window is not None
    first_windowed = len(config.full_layers) if slides else config.num_layers
    return {
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window,
        "max_window_layers": first_windowed,
        **(_write_layer_types(config) if slides else {}),
    }


def _write_switched_window(config: DecoderConfig) -> dict[str, Any]:
    window = config.sliding_window
    return {"use_sliding_window": window is not None, "sliding_window": window}


def _write_alternating_window(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window, **_write_layer_types(config)}


def _write_layer_types(config: DecoderConfig) -> dict[str, Any]:
    full = range(config.num_layers) if config.sliding_window is None else config.full_layers
    layer_types = (FULL if layer in full else SLIDING for layer in range(config.num_layers))
    return {"layer_types": list(layer_types)}


def _write_delta_net(config: DecoderConfig) -> dict[str, Any]:
    layer_types = [LINEAR if linear else FULL for linear in config.linear]
    shape = config.delta_net
    sizes = {key: getattr(shape, field) for key, field in DELTA_NET_KEYS.items() if shape}
    return {"layer_types": layer_types, **sizes}


def _write_full_heads(config: DecoderConfig) -> dict[str, Any]:
    raw = {"global_head_dim": config.full_head_dim or config.head_dim}
    if config.full_kv_heads is not None:
        raw["num_global_key_value_heads"] = config.full_kv_heads
    return raw


def _write_layer_inputs(config: DecoderConfig) -> dict[str, Any]:
    # transformers takes no null
    return {
        "hidden_size_per_layer_input": config.layer_input_size or 0,
        "vocab_size_per_layer_input": config.vocab_size,
    }


def _write_parallel_experts(config: DecoderConfig) -> dict[str, Any]:
    if not config.parallel_experts:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "intermediate_size": config.shared_expert_size,
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": config.num_experts,
        "top_k_experts": config.experts_per_token,
    }


def _write_nested_ropes(config: DecoderConfig) -> dict[str, Any]:
    def settings(rope: Rope) -> dict[str, Any]:
        values = {name: getattr(rope, ROPE_KEYS[name]) for name in ROPE_READS[rope.kind]}
        if rope.partial_rotary_factor != 1.0:
            values["partial_rotary_factor"] = rope.partial_rotary_factor
        return {"rope_type": rope.kind, "rope_theta": rope.theta, **values}

    ropes = {FULL: config.rope, SLIDING: config.window_positions}
    return {
        "rope_parameters": {
            layer_type: settings(rope) for layer_type, rope in ropes.items() if rope
        }
    }


def _write_two_ropes(config: DecoderConfig) -> dict[str, Any]:
    raw, local = _write_rope(config), config.window_positions
    if local is None or local.kind != "default":
        return raw
    whole = raw["rope_parameters"]
    windowed = {"rope_type": "default", "rope_theta": local.theta}
    raw |= {"rope_parameters": {FULL: whole, SLIDING: windowed}}
    return raw | {"rope_local_base_freq": local.theta}


def _write_full_rope(config: DecoderConfig) -> dict[str, Any]:
    raw = _write_rope(config)
    if config.rope is None:
        return raw
    theta = (config.window_positions or config.rope).theta
    windowed = {"rope_type": "default", "rope_theta": theta}
    return raw | {"rope_parameters": {FULL: raw["rope_parameters"], SLIDING: windowed}}


def _write_unrotated_layers(config: DecoderConfig) -> dict[str, Any]:
    unrotated = config.unrotated_layers
    return {"no_rope_layers": [int(layer not in unrotated) for layer in range(config.num_layers)]}


def _write_attention_multiplier(config: DecoderConfig) -> dict[str, Any]:
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    return {"attention_multiplier": scale}


def _write_query_scale(config: DecoderConfig) -> dict[str, Any]:
    scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
    scalar = round(scalar, 6)
    # transformers takes integers only.
    return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


def _write_final_norm(config: DecoderConfig) -> dict[str, Any]:
    return {"_remove_final_layer_norm": config.norm_before and not config.final_norm}


def _write_multi_query(config: DecoderConfig) -> dict[str, Any]:
    return {"multi_query": config.num_kv_heads == 1}


def _write_rope_or_alibi(config: DecoderConfig) -> dict[str, Any]:
    return {"alibi": config.rope is None, **_write_rope(config)}


def _write_falcon_block(config: DecoderConfig) -> dict[str, Any]:
    two_norms = config.parallel and not config.shared_norm
    new = two_norms or config.num_kv_heads not in (1, config.num_heads)
    raw = {
        "new_decoder_architecture": new,
        "multi_query": config.num_kv_heads == 1,
        "num_kv_heads": config.num_kv_heads if new else config.num_heads,
        "parallel_attn": config.parallel,
    }
    return raw | ({"num_ln_in_parallel_attn": 2 if two_norms else 1} if new else {})


def _write_attn_config(config: DecoderConfig) -> dict[str, Any]:
    fixed = {key: values[0] for key, values in ATTN_CONFIG.items()}
    return {"attn_config": fixed | {"clip_qkv": config.clip_qkv}}


# By the name in `Family.parts`.
WRITERS: dict[str, Callable[[DecoderConfig], dict[str, Any]]] = {
    "rope": _write_rope,
    "window": _write_window,
    "optional_window": _write_optional_window,
    "switched_window": _write_switched_window,
    "alternating_window": _write_alternating_window,
    "windowed_layers": _write_alternating_window,
    "full_heads": _write_full_heads,
    "nested_ropes": _write_nested_ropes,
    "layer_inputs": _write_layer_inputs,
    "parallel_experts": _write_parallel_experts,
    "two_ropes": _write_two_ropes,
    "unrotated_layers": _write_unrotated_layers,
    "full_rope": _write_full_rope,
    "delta_net": _write_delta_net,
    "query_scale": _write_query_scale,
    "attention_multiplier": _write_attention_multiplier,
    "final_norm": _write_final_norm,
    "multi_query": _write_multi_query,
    "rope_or_alibi": _write_rope_or_alibi,
    "falcon_block": _write_falcon_block,
    "attn_config": _write_attn_config,
}
