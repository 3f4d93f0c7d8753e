"""Converts between Hugging Face's config.json and this package's configs.

Every key is read, known to have no effect on inference, or an error. An ignored setting would
result in a model that is slightly wrong.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from models.build import Config
from models.llama import LlamaConfig
from models.opt import OptConfig
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
# Keys of which only some values are supported, and those values.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "activation_function": ("relu",),
    "partial_rotary_factor": (1.0,),
    "use_mrope": (False,),
    "layer_norm_elementwise_affine": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
# Hugging Face's defaults of keys that config.json omits.
DEFAULTS = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
}
ARCHITECTURES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "opt": "OPT",
}
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

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.raw, self.defaults = raw, defaults
        self.read: set[str] = set()

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
            if key in FIXED:
                if value not in FIXED[key]:
                    allowed = " or ".join(repr(x) for x in FIXED[key])
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


def read_config(raw: Mapping[str, Any]) -> Config:
    """Returns the config of a config.json's contents.

    Raises ValueError for an unknown `model_type`, missing or unknown keys, unsupported values, and
    inconsistent sizes.
    """
    family = raw.get("model_type")
    if family not in ARCHITECTURES:
        raise ValueError(
            f"model_type={family!r} is not supported: it must be one of {', '.join(ARCHITECTURES)}"
        )
    known = [ARCHITECTURES[family] + suffix for suffix in ("ForCausalLM", "Model")]
    for name in raw.get("architectures") or ():
        if name not in known:
            raise ValueError(
                f"architectures names {name!r}: for model_type={family!r} it must be {known[0]}"
            )
    reader = _Reader(raw, DEFAULTS.get(family, {}))
    reader.read.add("model_type")
    config = _read_opt(reader) if family == "opt" else _read_llama(reader, family)
    reader.refuse_unread()
    return config


def _read_llama(reader: _Reader, family: str) -> LlamaConfig:
    hidden, heads = reader.need("hidden_size"), reader.need("num_attention_heads")
    layers = reader.need("num_hidden_layers")
    positions = reader.need("max_position_embeddings")
    rope = _read_rope(reader, positions)
    if rope.kind == "yarn" and rope.original_max_positions is not None:
        # In Qwen2.5, max_position_embeddings is the length before scaling.
        positions = max(positions, int(rope.factor * rope.original_max_positions))
    window = _read_window(reader, family, layers)
    attention_bias = family in ("llama", "qwen3") and reader.get("attention_bias", False)
    return LlamaConfig(
        vocab_size=reader.need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.need("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=reader.get("num_key_value_heads", heads),
        head_dim=reader.get("head_dim", hidden // heads),
        max_positions=positions if window is None else min(positions, window),
        rope=rope,
        norm_eps=reader.get("rms_norm_eps", 1e-6),
        tie_embeddings=reader.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family == "llama" and reader.get("mlp_bias", False),
        qk_norm=family == "qwen3",
        family=family,
        sliding_window=window,
        draft_vocab_size=reader.get("draft_vocab_size"),
    )


def _read_window(reader: _Reader, family: str, layers: int) -> int | None:
    """Returns the sliding window that some layer applies, or None."""
    if family == "llama":
        return None
    types = reader.get("layer_types", ())
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer_types names {kind!r}, which is not supported: every layer must have "
                "'full_attention' or 'sliding_attention'"
            )
    if family == "mistral":
        return reader.get("sliding_window")
    window, first = reader.get("sliding_window"), reader.get("max_window_layers", 28)
    slides = "sliding_attention" in types if types else first < layers
    return window if reader.get("use_sliding_window", False) and slides else None


def _read_rope(reader: _Reader, positions: int) -> Rope:
    """Returns the rotary settings of `rope_parameters` (transformers 5) or the two older keys."""
    theta = reader.get("rope_theta", 10000.0)
    original = reader.get("original_max_position_embeddings")
    parsed = {
        key: _parse_rope(key, value, theta, original, positions)
        for key in ("rope_scaling", "rope_parameters")
        if (value := reader.get(key)) is not None
    }
    if len(set(parsed.values())) > 1:
        raise ValueError(f"rope_scaling and rope_parameters disagree: {parsed}; keep one of them")
    return next(iter(parsed.values()), Rope(theta=float(theta)))


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


def _read_opt(reader: _Reader) -> OptConfig:
    before = reader.get("do_layer_norm_before", True)
    removed = reader.get("_remove_final_layer_norm", False)
    return OptConfig(
        vocab_size=reader.need("vocab_size"),
        hidden_size=reader.need("hidden_size"),
        intermediate_size=reader.need("ffn_dim"),
        num_layers=reader.need("num_hidden_layers"),
        num_heads=reader.need("num_attention_heads"),
        max_positions=reader.get("max_position_embeddings", 2048),
        embedding_size=reader.get("word_embed_proj_dim"),
        norm_before=before,
        final_norm=before and not removed,
        use_bias=reader.get("enable_bias", True),
        tie_embeddings=reader.get("tie_word_embeddings", True),
    )


def write_config(config: Config) -> dict[str, Any]:
    """Returns the contents of a config.json from which `read_config` returns `config`.

    Raises ValueError if the config's family cannot express one of its settings.
    """
    write: Callable[[Any], dict[str, Any]] = (
        _write_opt if isinstance(config, OptConfig) else _write_llama
    )
    if config.family not in ARCHITECTURES or (config.family == "opt") != (write is _write_opt):
        raise ValueError(
            f"family={config.family!r} does not fit {type(config).__name__}: "
            f"it must be one of {', '.join(ARCHITECTURES)}"
        )
    raw = {
        "architectures": [ARCHITECTURES[config.family] + "ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        **write(config),
    }
    if (back := read_config(raw)) != config:
        names = [f.name for f in dataclasses.fields(config)]
        lost = [n for n in names if getattr(config, n) != getattr(back, n)]
        values = ", ".join(f"{n}={getattr(config, n)!r}" for n in lost)
        raise ValueError(f"family={config.family!r} cannot express {values}: change the family")
    return raw


def _write_llama(c: LlamaConfig) -> dict[str, Any]:
    raw = {
        "intermediate_size": c.intermediate_size,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        **_write_rope(c.rope),
    }
    if c.family in ("llama", "qwen3"):
        raw["attention_bias"] = c.out_bias
    if c.family == "llama":
        raw["mlp_bias"] = c.mlp_bias
    if c.draft_vocab_size is not None:
        raw["draft_vocab_size"] = c.draft_vocab_size
    if c.family == "mistral":
        raw["sliding_window"] = c.sliding_window
    if c.family in ("qwen2", "qwen3"):
        # Up to `max_positions` it makes no difference which layers have the window.
        raw["use_sliding_window"] = c.sliding_window is not None
        raw["sliding_window"] = c.sliding_window
        raw["max_window_layers"] = 0 if c.sliding_window is not None else c.num_layers
    return raw


def _write_rope(rope: Rope) -> dict[str, Any]:
    """Returns both spellings; versions before transformers 5 read only the last two keys."""
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


def _write_opt(c: OptConfig) -> dict[str, Any]:
    return {
        "ffn_dim": c.intermediate_size,
        "activation_function": "relu",
        "do_layer_norm_before": c.norm_before,
        "_remove_final_layer_norm": c.norm_before and not c.final_norm,
        "word_embed_proj_dim": c.embedding_axis[0],
        "enable_bias": c.use_bias,
        "layer_norm_elementwise_affine": True,
    }
