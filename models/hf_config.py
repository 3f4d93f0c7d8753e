"""Converts between Hugging Face's config.json and this package's configs.

Every key is read, known to have no effect on inference, or an error. An ignored setting would
result in a model that is slightly wrong.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from models.decoder import DecoderConfig
from models.families import FAMILIES, Family, family_config
from models.rope import Rope

# Keys without effect on the forward pass at inference.
HARMLESS = frozenset(
    """
    _attn_implementation _flash_attn_2_enabled _name_or_path activation_dropout architectures
    attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample
    dropout dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label init_std initializer_range is_decoder label2id layerdrop length_penalty max_length
    max_sequence_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_projection output_scores
    pad_token_id prefix pretraining_tp problem_type remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache
    """.split()
)
# Keys of which only some values are supported in all families, and those values.
FIXED: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0,),
    "use_mrope": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
# Fields that have no default; those that depend on others have one in `family_config`.
REQUIRED = {
    field.name
    for field in dataclasses.fields(DecoderConfig)
    if field.default is dataclasses.MISSING
} - {"num_kv_heads", "head_dim"}
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
}
# The keys that each kind of scaling reads, and those that it requires.
ROPE_READS = {
    "default": (),
    "linear": ("factor",),
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
}
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


class _Reader:
    """config.json, with a record of the keys that were read, to refuse the others."""

    def __init__(self, raw: Mapping[str, Any], family: Family):
        self.raw, self.defaults, self.fixed = raw, family.defaults, FIXED | dict(family.fixed)
        self.read: set[str] = {"model_type"}

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Returns the value; an omitted key has the family's default, and null is `otherwise`."""
        self.read.add(key)
        value = self.raw[key] if key in self.raw else self.defaults.get(key)
        return otherwise if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"config.json lacks {key!r}, which has no default: add it")
        return value

    def refuse_unread(self) -> None:
        """Raises ValueError if a key was not read and may have an effect; lists all such keys."""
        problems = []
        for key, value in sorted(self.raw.items()):
            if value is None or key in self.read or key in HARMLESS:
                continue
            if key in self.fixed:
                if value not in self.fixed[key]:
                    allowed = " or ".join(repr(x) for x in self.fixed[key])
                    problems.append(f"{key}={value!r} is not supported: it must be {allowed}")
                continue
            near = difflib.get_close_matches(key, self.read, 1)
            hint = f" (the nearest known key is {near[0]!r})" if near else ""
            problems.append(f"{key}={value!r} is not known{hint}")
        if problems:
            raise ValueError(
                "config.json has settings that are not supported: "
                + "; ".join(problems)
                + ". Remove such a key only if the model computes the same without it"
            )


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Returns the config of a config.json's contents.

    Raises ValueError for an unknown `model_type`, missing or unknown keys, unsupported values, and
    inconsistent sizes.
    """
    name: Any = raw.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"model_type={name!r} is not supported: it must be one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    known = [family.architecture + suffix for suffix in ("ForCausalLM", "Model")]
    for architecture in raw.get("architectures") or ():
        if architecture not in known:
            raise ValueError(
                f"architectures names {architecture!r}: for model_type={name!r} it must be "
                f"{known[0]}"
            )
    reader = _Reader(raw, family)
    settings: Settings = {}
    for key, fields in family.keys.items():
        required = any(field in REQUIRED for field in fields.split())
        value = reader.need(key) if required else reader.get(key)
        if value is not None:
            settings |= dict.fromkeys(fields.split(), value)
    for part in family.parts:
        settings |= PARTS[part].read(reader, settings)
    config = family_config(name, **settings)
    reader.refuse_unread()
    return config


def _read_rope(reader: _Reader, settings: Settings) -> Settings:
    """Returns the rotary settings of `rope_parameters` (transformers 5) or the two older keys."""
    theta, positions = reader.get("rope_theta", 10000.0), settings["max_positions"]
    original = reader.get("original_max_position_embeddings")
    parsed = {
        key: _parse_rope(key, value, theta, original, positions)
        for key in ("rope_scaling", "rope_parameters")
        if (value := reader.get(key)) is not None
    }
    if len(set(parsed.values())) > 1:
        raise ValueError(f"rope_scaling and rope_parameters disagree: {parsed}; keep one of them")
    rope = next(iter(parsed.values()), Rope(theta=float(theta)))
    if rope.kind == "yarn" and rope.original_max_positions is not None:
        # In Qwen2.5, max_position_embeddings is the length before scaling.
        positions = max(positions, int(rope.factor * rope.original_max_positions))
    return {"positions": rope, "max_positions": positions}


def _parse_rope(
    key: str, settings: Mapping[str, Any], theta: float, original: int | None, positions: int
) -> Rope:
    settings = {name: value for name, value in settings.items() if value is not None}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    if kind not in ROPE_READS:
        raise ValueError(
            f"{key} has type {kind!r}, which is not supported: it must be one of "
            + ", ".join(ROPE_READS)
        )
    theta = settings.pop("rope_theta", theta)
    settings.pop("finetuned", None)  # no effect on inference
    partial = settings.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"{key} has partial_rotary_factor={partial}, which is not supported: it must be 1.0"
        )
    if unknown := sorted(set(settings) - set(ROPE_KEYS)):
        raise ValueError(
            f"{key} has settings that are not supported: "
            + ", ".join(f"{name}={settings[name]!r}" for name in unknown)
        )
    if original is not None:
        settings["original_max_position_embeddings"] = original
    settings.setdefault("original_max_position_embeddings", positions)
    if kind == "yarn":
        settings.setdefault(
            "factor", positions / settings["original_max_position_embeddings"]
        )  # DeepSeek omits the factor
    if missing := [name for name in ROPE_NEEDS[kind] if name not in settings]:
        raise ValueError(f"{key} of type {kind!r} lacks {', '.join(missing)}")
    fields = {ROPE_KEYS[name]: settings[name] for name in ROPE_READS[kind] if name in settings}
    return Rope(theta=float(theta), kind=kind, **fields)


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    """Returns both spellings; versions before transformers 5 read only the last two keys."""
    rope = config.rope
    if rope is None:
        return {}
    values = {name: getattr(rope, ROPE_KEYS[name]) for name in ROPE_READS[rope.kind]}
    settings = {
        "rope_type": rope.kind,
        **{name: value for name, value in values.items() if value is not None},
    }
    return {
        "rope_parameters": {"rope_theta": rope.theta, **settings},
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else settings,
    }


def _read_window(reader: _Reader, settings: Settings) -> Settings:
    """Returns the sliding window that all layers apply, and the positions that it leaves."""
    _layer_types(reader)
    return _limited(settings, reader.get("sliding_window"))


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _read_window_of_some(reader: _Reader, settings: Settings) -> Settings:
    """Returns the sliding window that some layer applies, if any (Qwen)."""
    types = _layer_types(reader)
    window, first = reader.get("sliding_window"), reader.get("max_window_layers", 28)
    slides = "sliding_attention" in types if types else first < settings["num_layers"]
    applies = reader.get("use_sliding_window", False) and slides
    return _limited(settings, window if applies else None)


def _write_window_of_some(config: DecoderConfig) -> dict[str, Any]:
    # Up to `max_positions` it makes no difference which layers have the window.
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if config.sliding_window is not None else config.num_layers,
    }


def _layer_types(reader: _Reader) -> tuple[str, ...]:
    types = tuple(reader.get("layer_types", ()))
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer_types names {kind!r}, which is not supported: every layer must have "
                "'full_attention' or 'sliding_attention'"
            )
    return types


def _limited(settings: Settings, window: int | None) -> Settings:
    positions = settings["max_positions"]
    limit = positions if window is None else min(positions, window)
    return {"sliding_window": window, "max_positions": limit}


def _read_final_norm(reader: _Reader, settings: Settings) -> Settings:
    """Returns whether a norm comes before the logits (OPT)."""
    removed = reader.get("_remove_final_layer_norm", False)
    return {"final_norm": settings["norm_before"] and not removed}


def _write_final_norm(config: DecoderConfig) -> dict[str, Any]:
    return {"_remove_final_layer_norm": config.norm_before and not config.final_norm}


class Part(NamedTuple):
    """Settings that several keys determine.

    Attributes:
      read: returns fields of `DecoderConfig`, from a reader and the fields read before.
      write: returns keys of config.json.
    """

    read: Callable[[_Reader, Settings], Settings]
    write: Callable[[DecoderConfig], dict[str, Any]]


PARTS = {
    "rope": Part(_read_rope, _write_rope),
    "window": Part(_read_window, _write_window),
    "window of some layers": Part(_read_window_of_some, _write_window_of_some),
    "removed final norm": Part(_read_final_norm, _write_final_norm),
}


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
        "architectures": [family.architecture + "ForCausalLM"],
        "model_type": config.family,
        **{key: values[0] for key, values in family.fixed.items()},
    }
    for key, fields in family.keys.items():
        value = getattr(config, fields.split()[-1])
        if value is not None or key in family.defaults:
            raw[key] = value
    for part in family.parts:
        raw |= PARTS[part].write(config)
    if (back := read_config(raw)) != config:
        names = [f.name for f in dataclasses.fields(config)]
        lost = [n for n in names if getattr(config, n) != getattr(back, n)]
        values = ", ".join(f"{n}={getattr(config, n)!r}" for n in lost)
        raise ValueError(f"family={config.family!r} cannot express {values}: change the family")
    return raw
