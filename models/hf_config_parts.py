"""Settings that several keys of config.json determine: rotary positions, windows, kinds of layers.

`READERS` has the functions by the names in `Family.parts`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from models.gated_delta import DeltaNetShape
from models.hf_config_keys import DELTA_NET_KEYS, FIXED, ConfigReader, check_type, json_types
from models.positions import Alibi, Rope

Settings = dict[str, Any]  # fields of DecoderConfig
# Rope's fields beyond theta and kind, by their name in `rope_scaling` and `rope_parameters`.
ROPE_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
    "partial_rotary_factor": "partial_rotary_factor",
}
# The keys that each kind of scaling reads, and those that it requires.
ROPE_READS = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor",),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "proportional": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
ROPE_TYPES = json_types(Rope)
# MPT's settings of attention, of which only some values are supported.
ATTN_CONFIG = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "softmax_scale": (None,),
}
ATTN_IGNORED = ("attn_impl", "attn_uses_sequence_id", "model_type")
FULL, SLIDING = "full_attention", "sliding_attention"  # the values of layer_types
LINEAR = "linear_attention"
FULL_HEAD_KEYS = "head_dim", "num_key_value_heads"  # that layers without a window may have
# Of positions in images; those of text are equal in all sections.
MROPE = ("mrope_section", "mrope_interleaved")


def _read_rope(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the rotary settings of `rope_parameters` (transformers 5) or the two older keys."""
    top_level = {
        "rope_theta": reader.get("rope_theta", 10000.0),
        "original_max_position_embeddings": reader.get("original_max_position_embeddings"),
        "max_position_embeddings": settings["max_positions"],
    }
    if _has_partial_rotary(reader):
        top_level["partial_rotary_factor"] = reader.get("partial_rotary_factor", 1.0)
    given = [key for key in ("rope_scaling", "rope_parameters") if reader.raw.get(key) is not None]
    parsed = {key: _parse_rope(reader, key, reader.get(key), top_level) for key in given}
    if len(set(parsed.values())) > 1:
        raise ValueError(f"rope_scaling and rope_parameters disagree: {parsed}; keep one of them")
    rope = next(iter(parsed.values()), None)
    if rope is None:
        default = reader.defaults.get("rope_parameters", {})
        rope = _parse_rope(reader, "rope_parameters", default, top_level)
    positions = settings["max_positions"]
    if rope.original_max_positions is not None:
        if rope.kind == "yarn":
            # In Qwen2.5, max_position_embeddings is the length before scaling.
            positions = max(positions, int(rope.factor * rope.original_max_positions))
        if rope.kind == "longrope":
            # Longer texts rotate all of their tokens otherwise.
            positions = min(positions, rope.original_max_positions)
    return {"positions": rope, "max_positions": positions}


def _has_partial_rotary(reader: ConfigReader) -> bool:
    """Returns whether models of the family may rotate a part of each head."""
    partial_types = {"longrope", "proportional"}.intersection(reader.rope_kinds)
    return bool(partial_types) or "partial_rotary_factor" in reader.defaults


def _parse_rope(
    reader: ConfigReader, key: str, settings: Mapping[str, Any], top_level: Mapping[str, Any]
) -> Rope:
    """Returns the settings of one key; `top_level` has those that may be next to it."""
    rope_types = reader.rope_kinds
    settings = {name: value for name, value in settings.items() if value is not None}
    rope_type = settings.pop("rope_type", settings.pop("type", "default"))
    if rope_type in ("su", "yarn") and "longrope" in rope_types:  # its names in old files of Phi-3
        rope_type = "longrope"
    if rope_type not in rope_types:
        raise ValueError(
            f"{key} has type {rope_type!r}, which is not supported: it must be one of "
            + ", ".join(rope_types)
        )
    for name, value in settings.items():
        if field := ROPE_KEYS.get(name):
            check_type(f"{name} of {key}", value, ROPE_TYPES[field])
    theta = settings.pop("rope_theta", top_level["rope_theta"])
    check_type(f"rope_theta of {key}", theta, float)
    for name in ("finetuned", *MROPE):  # no effect on inference
        settings.pop(name, None)
    partial = settings.pop("partial_rotary_factor", top_level.get("partial_rotary_factor", 1.0))
    if partial != 1.0 and not _has_partial_rotary(reader):
        raise ValueError(
            f"{key} has partial_rotary_factor={partial}, which is not supported: it must be 1.0"
        )
    if nested := sorted({FULL, SLIDING}.intersection(settings)):
        raise ValueError(
            f"{key} has settings of {' and '.join(nested)}, and all layers of this family have the "
            f"same: use those of one of them as {key}"
        )
    reader.unknown += [f"{name} of {key}" for name in sorted(set(settings) - set(ROPE_KEYS))]
    positions, original = (
        top_level[name] for name in ("max_position_embeddings", "original_max_position_embeddings")
    )
    if original is not None:
        settings["original_max_position_embeddings"] = original
    settings.setdefault("original_max_position_embeddings", positions)
    if rope_type in ("yarn", "longrope"):  # DeepSeek and Phi-3 omit the factor
        settings.setdefault("factor", positions / settings["original_max_position_embeddings"])
    if missing := [name for name in ROPE_NEEDS[rope_type] if name not in settings]:
        them = "them" if len(missing) > 1 else "it"
        raise ValueError(f"{key} of type {rope_type!r} lacks {', '.join(missing)}: add {them}")
    fields = {ROPE_KEYS[name]: settings[name] for name in ROPE_READS[rope_type] if name in settings}
    fields = {n: tuple(x) if isinstance(x, list) else x for n, x in fields.items()}
    return Rope(theta=float(theta), kind=rope_type, partial_rotary_factor=partial, **fields)


def _read_window(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the sliding window that all layers have, if there is one."""
    layers, window = settings["num_layers"], reader.get("sliding_window")
    full = _full_layers(reader, layers, range(layers if window is None else 0))
    if window is not None and full:
        raise ValueError(
            f"layer_types has full_attention and sliding_window is {window}: all layers of "
            f"model_type={reader.get('model_type')!r} have the window: set sliding_window to null, "
            "or remove layer_types"
        )
    return {"sliding_window": window}


def _read_optional_window(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the window of the last layers, if it is used (Qwen)."""
    layers, window = settings["num_layers"], reader.get("sliding_window")
    full = _full_layers(reader, layers, range(min(reader.get("max_window_layers", 28), layers)))
    if not reader.get("use_sliding_window", False):
        window = None
    return _windowed(window, full, layers)


def _read_switched_window(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the window of all layers, if it is used (Qwen3-MoE)."""
    window, used = reader.get("sliding_window"), reader.get("use_sliding_window", False)
    return {"sliding_window": window if used else None}


def _read_alternating_window(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the window of all layers but every second or n-th one (Gemma, gpt-oss)."""
    layers, plain = settings["num_layers"], "sliding_window_pattern"
    given = [(key, reader.get(key)) for key in (f"_{plain}", plain)]
    key, period = next((each for each in given if each[1] is not None), (plain, 2))
    if period < 1:
        raise ValueError(f"{key}={period}: it must be 1 or more")
    full = _full_layers(reader, layers, range(period - 1, layers, period))
    return _windowed(reader.get("sliding_window"), full, layers)


def _windowed(window: int | None, full: tuple[int, ...], layers: int) -> Settings:
    """Returns the fields of windows, given the layers that would have none."""
    if window is None or len(full) == layers:
        return {"sliding_window": None}
    return {"sliding_window": window, "full_layers": full}


def _full_layers(reader: ConfigReader, layers: int, default: Iterable[int]) -> tuple[int, ...]:
    """Returns the layers without a window: those of `layer_types`, by default others."""
    layer_types = reader.get("layer_types")
    if layer_types is None:
        return tuple(default)
    for layer_type in layer_types:
        if layer_type not in (FULL, SLIDING):
            raise ValueError(
                f"layer_types names {layer_type!r}, which is not supported: every layer must have "
                f"{FULL!r} or {SLIDING!r}"
            )
    if len(layer_types) != layers:
        raise ValueError(
            f"layer_types has {len(layer_types)} entries, and num_hidden_layers is {layers}: "
            "correct one of them"
        )
    return tuple(layer for layer, layer_type in enumerate(layer_types) if layer_type == FULL)


def _read_unrotated_layers(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the layers without rotation, by default every fourth (SmolLM3)."""
    layers, interval = settings["num_layers"], reader.get("no_rope_layer_interval", 4)
    if interval < 1:
        raise ValueError(f"no_rope_layer_interval={interval}: it must be 1 or more")
    rotated = reader.get("no_rope_layers")
    if rotated is None:
        return {"unrotated_layers": tuple(range(interval - 1, layers, interval))}
    if len(rotated) < layers or any(rotates not in (0, 1) for rotates in rotated):
        raise ValueError(
            f"no_rope_layers={rotated}: it must have a 1 for each of the {layers} layers with "
            "rotary positions, and a 0 for each without"
        )
    return {"unrotated_layers": tuple(i for i in range(layers) if not rotated[i])}


def _read_delta_net(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the layers that are gated delta nets, and their shapes (Qwen3-Next)."""
    layers, period = settings["num_layers"], reader.get("full_attention_interval")
    if period < 1:
        raise ValueError(f"full_attention_interval={period}: it must be 1 or more")
    full = range(period - 1, layers, period)
    layer_types = reader.get("layer_types", [FULL if i in full else LINEAR for i in range(layers)])
    if unknown := [layer_type for layer_type in layer_types if layer_type not in (FULL, LINEAR)]:
        raise ValueError(
            f"layer_types names {unknown[0]!r}, which is not supported: every layer must have "
            f"{FULL!r} or {LINEAR!r}"
        )
    if len(layer_types) != layers:
        raise ValueError(
            f"layer_types has {len(layer_types)} entries, and num_hidden_layers is {layers}: "
            "correct one of them"
        )
    linear = tuple(layer for layer, layer_type in enumerate(layer_types) if layer_type == LINEAR)
    shape = DeltaNetShape(**{field: reader.get(key) for key, field in DELTA_NET_KEYS.items()})
    return {"linear_layers": linear, "delta_net": shape if linear else None}


def _read_two_ropes(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the rotary settings of full and of windowed layers (Gemma 3)."""
    local_theta = float(reader.get("rope_local_base_freq", 10000.0))
    if local_theta <= 0:
        raise ValueError(f"rope_local_base_freq={local_theta}: it must be above 0")
    return _full_and_windowed(reader, settings, local_theta)


def _read_full_rope(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the rotary settings, of which only full layers have the scaling (OLMo 3)."""
    flat = reader.get("rope_parameters", {})
    if "factor" in flat:  # to which layers it applies differs between versions of transformers
        raise ValueError(
            f"rope_parameters has the settings of all layers: it must have those of {FULL} and "
            f"{SLIDING}, each as an object"
        )
    return _full_and_windowed(reader, settings, float(reader.need("rope_theta")))


def _full_and_windowed(reader: ConfigReader, settings: Settings, local_theta: float) -> Settings:
    """Returns the rotary settings of full and of windowed layers, of which the latter are plain."""
    nested = reader.get("rope_parameters")
    if nested is None or not {FULL, SLIDING}.intersection(nested):
        ropes = _read_rope(reader, settings)["positions"], Rope(theta=local_theta)
    else:
        ropes = _nested_ropes(reader, settings, nested, local_theta)
    positions = {"positions": ropes[0]}
    if settings["sliding_window"] is not None:
        positions["window_positions"] = ropes[1]
    return positions


def _nested_ropes(
    reader: ConfigReader, settings: Settings, nested: Mapping[str, Any], local_theta: float
) -> tuple[Rope, Rope]:
    """Returns the rotary settings of full and of windowed layers, by the kind of layer."""
    if unknown := set(nested) - {FULL, SLIDING}:
        raise ValueError(f"rope_parameters names {sorted(unknown)}: it must name {FULL}, {SLIDING}")
    thetas = {FULL: reader.get("rope_theta", 1000000.0), SLIDING: local_theta}
    top_level = {
        "original_max_position_embeddings": None,
        "max_position_embeddings": settings["max_positions"],
    }

    def parse(key, layer_type, value):
        return _parse_rope(reader, key, value or {}, top_level | {"rope_theta": thetas[layer_type]})

    full, windowed = (
        parse(f"rope_parameters of {layer_type}", layer_type, nested.get(layer_type))
        for layer_type in (FULL, SLIDING)
    )
    scaling = reader.get("rope_scaling")
    if (
        scaling is not None
        and parse("rope_scaling", FULL, {"rope_theta": full.theta} | scaling) != full
    ):
        raise ValueError("rope_scaling and rope_parameters disagree: keep one of them")
    return full, windowed


def _read_windowed_layers(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the window of all layers but some, of which the last is one (Gemma 4)."""
    layers, period = settings["num_layers"], reader.get("sliding_window_pattern")
    full = _full_layers(reader, layers, range(period - 1, layers, period))
    full = tuple(sorted({*full, layers - 1}))
    return {"sliding_window": reader.need("sliding_window"), "full_layers": full}


def _read_full_heads(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the heads of layers without a window, in either spelling (Gemma 4)."""
    kv_heads = reader.get("num_global_key_value_heads")
    full_heads: Mapping[str, Any] = {
        "head_dim": reader.get("global_head_dim"),
        "num_key_value_heads": kv_heads if settings["values_are_keys"] else None,
    }
    if by_layer := reader.get("per_layer_config", {}):  # as transformers writes it
        full_heads, full = next(iter(by_layer.values())), settings["full_layers"]
        are_equal = by_layer == {str(layer): full_heads for layer in full}
        if not are_equal or not {*full_heads} <= {*FULL_HEAD_KEYS}:
            raise ValueError(
                f"per_layer_config={by_layer} is not supported: it must have {FULL_HEAD_KEYS} of "
                f"the layers {full} without a window, equal in all of them"
            )
    size, kv_heads = (full_heads.get(key) for key in FULL_HEAD_KEYS)
    return {
        "full_head_dim": None if size == settings["head_dim"] else size,
        "full_kv_heads": None if kv_heads == settings["num_kv_heads"] else kv_heads,
    }


def _read_layer_inputs(reader: ConfigReader, settings: Settings) -> Settings:
    """Checks the table of the layers' own inputs (Gemma 4)."""
    rows, vocab = reader.get("vocab_size_per_layer_input"), settings["vocab_size"]
    if settings.get("layer_input_size") and rows != vocab:
        raise ValueError(
            f"vocab_size_per_layer_input={rows} is not supported: it must be vocab_size={vocab}"
        )
    return {}


def _read_parallel_experts(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the mixture beside an MLP, which is its shared expert (Gemma 4)."""
    has_experts = reader.get("enable_moe_block", False)
    read = reader.need if has_experts else reader.get
    intermediate_size = read("moe_intermediate_size")
    num_experts = read("num_experts")
    experts_per_token = read("top_k_experts")
    if not has_experts:
        return {}
    return {
        "parallel_experts": True,
        "shared_expert_size": settings["intermediate_size"],
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
    }


def _read_nested_ropes(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the rotary settings of each kind of layer, by its name (Gemma 4)."""
    ropes = _nested_ropes(reader, settings, reader.get("rope_parameters"), 10000.0)
    return dict(zip(("positions", "window_positions"), ropes, strict=True))


def _read_query_scale(reader: ConfigReader, settings: Settings) -> Settings:
    scalar = float(reader.get("query_pre_attn_scalar", 256.0))
    if scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar={scalar}: it must be above 0")
    return {"query_scale": None if scalar == settings["head_dim"] else scalar**-0.5}


def _read_attention_multiplier(reader: ConfigReader, settings: Settings) -> Settings:
    scale = float(reader.get("attention_multiplier", 1.0))
    size = settings.get("head_dim", settings["hidden_size"] // settings["num_heads"])
    return {"query_scale": None if scale == size**-0.5 else scale}


def _read_final_norm(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns whether a norm comes before the logits (OPT)."""
    removed = reader.get("_remove_final_layer_norm", False)
    return {"final_norm": settings["norm_before"] and not removed}


def _read_multi_query(reader: ConfigReader, settings: Settings) -> Settings:
    return {"num_kv_heads": 1} if reader.get("multi_query", True) else {}


def _read_rope_or_alibi(reader: ConfigReader, settings: Settings) -> Settings:
    rope = _read_rope(reader, settings)
    return {"positions": Alibi(scaled=True)} if reader.get("alibi", False) else rope


def _read_falcon_block(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns KV heads and norms; the new architecture is that of Falcon-40B."""
    new, heads = reader.get("new_decoder_architecture", False), settings["num_heads"]
    multi_query, parallel = reader.get("multi_query", True), reader.get("parallel_attn", True)
    kv_heads = reader.get("num_kv_heads", heads)
    norms = reader.get("num_ln_in_parallel_attn", 2 if new else 1)
    if norms not in ((1, 2) if new else (1,)) or (new and not parallel):
        raise ValueError(
            f"num_ln_in_parallel_attn={norms} with new_decoder_architecture={new} and "
            f"parallel_attn={parallel} is not supported: a new architecture has parallel_attn=true "
            "and 1 or 2 norms, an old one 1"
        )
    return {
        "num_kv_heads": kv_heads if new else 1 if multi_query else heads,
        "parallel": parallel,
        "shared_norm": parallel and norms == 1,
    }


def _read_attn_config(reader: ConfigReader, settings: Settings) -> Settings:
    """Returns the clipping of q, k, v; other settings have one value (MPT)."""
    raw = reader.get("attn_config", {})
    attention = ConfigReader(raw, {}, FIXED | ATTN_CONFIG, ATTN_IGNORED, name="attn_config")
    clip = attention.get("clip_qkv")
    attention.check_unread()
    reader.unknown += [f"{key} of attn_config" for key in attention.unknown]
    return {"clip_qkv": clip}


# The settings that several keys determine, by their name in `Family.parts`.
READERS: dict[str, Callable[[ConfigReader, Settings], Settings]] = {
    "rope": _read_rope,
    "window": _read_window,
    "optional_window": _read_optional_window,
    "switched_window": _read_switched_window,
    "alternating_window": _read_alternating_window,
    "windowed_layers": _read_windowed_layers,
    "full_heads": _read_full_heads,
    "nested_ropes": _read_nested_ropes,
    "layer_inputs": _read_layer_inputs,
    "parallel_experts": _read_parallel_experts,
    "two_ropes": _read_two_ropes,
    "unrotated_layers": _read_unrotated_layers,
    "full_rope": _read_full_rope,
    "delta_net": _read_delta_net,
    "query_scale": _read_query_scale,
    "attention_multiplier": _read_attention_multiplier,
    "final_norm": _read_final_norm,
    "multi_query": _read_multi_query,
    "rope_or_alibi": _read_rope_or_alibi,
    "falcon_block": _read_falcon_block,
    "attn_config": _read_attn_config,
}
