"""The families: how Hugging Face names their settings and tensors.

A family is an entry of `FAMILIES`, by which `hf_config` and `hf_config_writing` read and write
config.json, and `hf_tensors` the weights.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from models.decoder_config import DecoderConfig
from models.positions import Alibi, LearnedPositions


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, by its `model_type` in config.json.

    Attributes:
      architecture: the class in Hugging Face transformers.
      names: the tensor or module of each parameter; those of a block are relative to "layer".
      keys: for each key of config.json whose value is taken unchanged, the field of
        `DecoderConfig` that has it, or the fields.
      settings: the fields of `DecoderConfig` that all models of the family share.
      parts: the settings that need more than `keys`, by their name in `hf_config_parts.READERS`.
      mlp_ratio: F / E if config.json does not have F; None: it must have it.
      defaults: Hugging Face's defaults of keys that config.json omits.
      fixed: keys of which only some values are supported, and those values.
      ignored: keys without effect, in addition to `hf_config_keys.HARMLESS`.
      aliases: other names of keys, by which Hugging Face reads them too.
      rope_kinds: the kinds of `Rope` that the family has.
      grouped_qkv: a fused tensor "qkv" has the q, k, v of one KV head after those of another;
        False: all q, all k, all v.
      transposed: linear maps of the blocks are stored as [inputs, outputs].
    """

    architecture: str
    names: Mapping[str, str]
    keys: Mapping[str, str | tuple[str, ...]]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[str, ...] = ()
    mlp_ratio: int | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    grouped_qkv: bool = False
    transposed: bool = False

    def fields(self, key: str) -> tuple[str, ...]:
        """Returns the fields of `DecoderConfig` that have the value of a key."""
        fields = self.keys[key]
        return (fields,) if isinstance(fields, str) else fields

    @property
    def prefix(self) -> str:
        """The first part of most names, which checkpoints of a bare decoder omit."""
        return self.names["embedding"].partition(".")[0] + "."


def family_config(family: str, **settings: Any) -> DecoderConfig:
    """Returns the config of a model of a family.

    Args:
      family: a key of `FAMILIES`.
      **settings: fields of `DecoderConfig`, in addition to those of the family. By default there
        are as many KV heads as heads, and the heads divide the width.

    Raises ValueError for an unknown family, and sizes that do not fit.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is not supported: use one of {', '.join(FAMILIES)}")
    known = FAMILIES[family]
    hidden, heads = settings["hidden_size"], settings["num_heads"]
    if "head_dim" not in settings and hidden % heads:
        raise ValueError(f"hidden_size={hidden} is not a multiple of num_heads={heads}")
    sizes = {"num_kv_heads": heads, "head_dim": hidden // heads, "family": family}
    if known.mlp_ratio is not None:
        sizes["intermediate_size"] = known.mlp_ratio * hidden
    return DecoderConfig(**{**sizes, **known.settings, **settings})


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tie_embeddings",
}
_LLAMA_KEYS: dict[str, str | tuple[str, ...]] = {
    **_KEYS,
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "draft_vocab_size": "draft_vocab_size",
}
_LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "vocab_map": "model.vocab_map",
    "layer": "model.layers",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm": "model.norm",
}
_LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
_GEMMA_KEYS: dict[str, str | tuple[str, ...]] = {
    **{key: field for key, field in _LLAMA_KEYS.items() if key != "draft_vocab_size"},
    "hidden_activation": "activation",
    "attention_bias": ("qkv_bias", "out_bias"),
    "final_logit_softcapping": "logits_softcap",
}
_GEMMA_NAMES = {
    **{module: name for module, name in _LLAMA_NAMES.items() if module != "vocab_map"},
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_OLMO_NAMES = {
    **{
        module: name
        for module, name in _LLAMA_NAMES.items()
        if module not in ("attention_norm", "mlp_norm")
    },
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_OLMO_SETTINGS = {
    "norm_before": False,
    "norm_after": True,
    "qk_norm": True,
    "joint_qk_norm": True,
}
_OLMO_DEFAULTS = {**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "attention_bias": False}
_GEMMA_SETTINGS = {"norm": "rms_plus_one", "norm_after": True, "scale_embeddings": True}
_GEMMA_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_4_NAMES = {
    **_GEMMA_NAMES,
    "layer_embedding": "model.embed_tokens_per_layer",
    "layer_projection": "model.per_layer_model_projection",
    "layer_input_norm": "model.per_layer_projection_norm",
    "input_gate": "per_layer_input_gate",
    "input_projection": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    "router": "router.proj",
    "router_scale": "router.scale",
    "expert_scale": "router.per_expert_scale",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_output_norm": "post_feedforward_layernorm_2",
    "shared_output_norm": "post_feedforward_layernorm_1",
    "experts_gate_up": "experts.gate_up_proj",
    "experts_down": "experts.down_proj",
    "scalar": "layer_scalar",
}
_GEMMA_4_KEYS: dict[str, str | tuple[str, ...]] = {
    **_GEMMA_KEYS,
    "attention_k_eq_v": "values_are_keys",
    "num_kv_shared_layers": "shared_kv_layers",
    "use_double_wide_mlp": "double_shared_mlp",
}
_GEMMA_4_SETTINGS = {
    "norm": "rms_wide",
    "norm_after": True,
    "qk_norm": True,
    "value_norm": True,
    "query_scale": 1.0,
    "scale_embeddings": True,
    "layer_scalars": True,
}
_GEMMA_4_PARTS = ("windowed_layers", "full_heads", "nested_ropes")
_GEMMA_4_DEFAULTS = {
    **_GEMMA_DEFAULTS,
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# Images, and only they, may be read in both directions.
_GEMMA_4_FIXED = {"use_bidirectional_attention": (None, "vision", False)}
# Settings of mixtures of experts in training.
_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
_SILU = {"hidden_act": ("silu", "swish")}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_PLAIN = {"norm": "layer", "gated": False, "tie_embeddings": True}  # MLP without a gate
_GPT2_KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "max_positions",
    "activation_function": "activation",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_GPT2_NAMES = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "layer": "transformer.h",
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "norm": "transformer.ln_f",
}
_GPT2_DEFAULTS = {
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
_GPT2_SETTINGS = {**_PLAIN, **_BIASES, "positions": LearnedPositions()}

_HYBRID_NAMES = {
    **{module: name for module, name in _LLAMA_NAMES.items() if module != "vocab_map"},
    "delta_conv": "linear_attn.conv1d",
    "delta_log_rate": "linear_attn.A_log",
    "delta_step_bias": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm",
    "delta_out": "linear_attn.out_proj",
}
_SEPARATE = {
    f"delta_{module}": f"linear_attn.in_proj_{module}" for module in ("qkv", "z", "b", "a")
}
_HYBRID_KEYS: dict[str, str | tuple[str, ...]] = {
    **{key: field for key, field in _LLAMA_KEYS.items() if key != "draft_vocab_size"},
    "attention_bias": ("qkv_bias", "out_bias"),
}
_HYBRID_SETTINGS = {"norm": "rms_plus_one", "qk_norm": True, "attention_gate": True}
_HYBRID_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_HYBRID_EXPERT_NAMES = {
    **{module: f"mlp.experts.{{}}.{module}_proj" for module in ("gate", "up", "down")},
    "router": "mlp.gate",
    "shared": "mlp.shared_expert.{}_proj",
    "shared_gate": "mlp.shared_expert_gate",
}
_HYBRID_EXPERT_KEYS: dict[str, str | tuple[str, ...]] = {
    **{key: field for key, field in _HYBRID_KEYS.items() if key != "intermediate_size"},
    "moe_intermediate_size": "intermediate_size",
    "shared_expert_intermediate_size": "shared_expert_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
}
_HYBRID_EXPERT_DEFAULTS = {
    **_HYBRID_DEFAULTS,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# Settings of the drafter that Qwen3.5's files have, and some that its text decoder does not read.
_MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
_UNREAD = (*_MTP, "decoder_sparse_step", "mlp_only_layers")
_GATED = {**_SILU, "attn_output_gate": (True,)}

# The text decoder of models that also read images, by their `model_type`.
TEXT_DECODERS: Mapping[str, str] = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "gemma4": "gemma4_text",
        "gemma4_unified": "gemma4_unified_text",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            "LlamaForCausalLM",
            names=_LLAMA_NAMES,
            keys={
                **_LLAMA_KEYS,
                "attention_bias": ("qkv_bias", "out_bias"),
                "mlp_bias": "mlp_bias",
            },
            parts=("rope",),
            defaults={**_LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
            fixed=_SILU,
        ),
        "mistral": Family(
            "MistralForCausalLM",
            names=_LLAMA_NAMES,
            keys=_LLAMA_KEYS,
            parts=("rope", "window"),
            defaults={
                **_LLAMA_DEFAULTS,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
            },
            fixed=_SILU,
        ),
        "qwen2": Family(
            "Qwen2ForCausalLM",
            names=_LLAMA_NAMES,
            keys=_LLAMA_KEYS,
            settings={"qkv_bias": True},
            parts=("rope", "optional_window"),
            defaults=_QWEN_DEFAULTS,
            fixed=_SILU,
        ),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            names=_LLAMA_NAMES,
            keys={**_LLAMA_KEYS, "attention_bias": ("qkv_bias", "out_bias")},
            settings={"qk_norm": True},
            parts=("rope", "optional_window"),
            defaults={**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
            fixed=_SILU,
        ),
        "mixtral": Family(
            "MixtralForCausalLM",
            names={
                **_LLAMA_NAMES,
                "router": "block_sparse_moe.gate",
                "gate": "block_sparse_moe.experts.{}.w1",
                "up": "block_sparse_moe.experts.{}.w3",
                "down": "block_sparse_moe.experts.{}.w2",
            },
            keys={
                **_LLAMA_KEYS,
                "num_local_experts": "num_experts",
                "num_experts_per_tok": "experts_per_token",
            },
            parts=("rope", "window"),
            defaults={
                **_LLAMA_DEFAULTS,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1000000.0,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            fixed=_SILU,
            ignored=_TRAINING,
            aliases={"num_experts": "num_local_experts"},
        ),
        "qwen3_moe": Family(
            "Qwen3MoeForCausalLM",
            names={
                **_LLAMA_NAMES,
                "router": "mlp.gate",
                **{module: f"mlp.experts.{{}}.{module}_proj" for module in ("gate", "up", "down")},
            },
            keys={
                **{key: field for key, field in _LLAMA_KEYS.items() if key != "intermediate_size"},
                "moe_intermediate_size": "intermediate_size",
                "attention_bias": ("qkv_bias", "out_bias"),
                "num_experts": "num_experts",
                "num_experts_per_tok": "experts_per_token",
                "norm_topk_prob": "normalize_experts",
            },
            settings={"qk_norm": True},
            parts=("rope", "switched_window"),
            defaults={
                **_QWEN_DEFAULTS,
                "num_key_value_heads": 4,
                "attention_bias": False,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
            fixed={**_SILU, "decoder_sparse_step": (1,), "mlp_only_layers": ([], ())},
            # Of layers without experts, and of windows in other families.
            ignored=(*_TRAINING, "intermediate_size", "max_window_layers"),
            aliases={"num_local_experts": "num_experts"},
        ),
        "qwen3_next": Family(
            "Qwen3NextForCausalLM",
            names={
                **_HYBRID_NAMES,
                **_HYBRID_EXPERT_NAMES,
                "delta_qkvz": "linear_attn.in_proj_qkvz",
                "delta_ba": "linear_attn.in_proj_ba",
            },
            keys={**_HYBRID_EXPERT_KEYS, "norm_topk_prob": "normalize_experts"},
            settings=_HYBRID_SETTINGS,
            parts=("rope", "delta_net"),
            defaults={
                **_HYBRID_EXPERT_DEFAULTS,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "norm_topk_prob": True,
            },
            fixed={**_SILU, "decoder_sparse_step": (1,), "mlp_only_layers": ([], ())},
            ignored=(*_TRAINING, "intermediate_size", "use_sliding_window"),
            aliases={"num_local_experts": "num_experts"},
        ),
        "qwen3_5_text": Family(
            "Qwen3_5ForCausalLM",
            names={**_HYBRID_NAMES, **_SEPARATE},
            keys=_HYBRID_KEYS,
            settings=_HYBRID_SETTINGS,
            parts=("rope", "delta_net"),
            defaults={**_HYBRID_DEFAULTS, "num_key_value_heads": 4},
            fixed=_GATED,
            ignored=_UNREAD,
        ),
        "qwen3_5_moe_text": Family(
            "Qwen3_5MoeForCausalLM",
            names={**_HYBRID_NAMES, **_SEPARATE, **_HYBRID_EXPERT_NAMES},
            keys=_HYBRID_EXPERT_KEYS,
            settings=_HYBRID_SETTINGS,
            parts=("rope", "delta_net"),
            defaults={**_HYBRID_EXPERT_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
            fixed=_GATED,
            ignored=(*_TRAINING, *_UNREAD, "intermediate_size"),
            aliases={"num_local_experts": "num_experts"},
        ),
        "gpt_oss": Family(
            "GptOssForCausalLM",
            names={
                **{
                    module: name
                    for module, name in _LLAMA_NAMES.items()
                    if module not in ("gate", "up")
                },
                "sinks": "self_attn.sinks",
                "router": "mlp.router",
                "gate_up": "mlp.experts.gate_up_proj",
                "down": "mlp.experts.down_proj",
            },
            keys={
                **_LLAMA_KEYS,
                "attention_bias": ("qkv_bias", "out_bias"),
                "num_local_experts": "num_experts",
                "num_experts_per_tok": "experts_per_token",
                "swiglu_limit": "swiglu_limit",
            },
            settings={
                "attention_sinks": True,
                "router_bias": True,
                "mlp_bias": True,
                "swiglu_limit": 7.0,
            },
            parts=("rope", "alternating_window"),
            defaults={
                **_LLAMA_DEFAULTS,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "rms_norm_eps": 1e-5,
                "attention_bias": True,
                "rope_theta": 150000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "sliding_window": 128,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "swiglu_limit": 7.0,
            },
            fixed={**_SILU, "swiglu_alpha": (1.702,)},
            ignored=(*_TRAINING, "experts_per_token", "initial_context_length"),
            aliases={"num_experts": "num_local_experts"},
        ),
        "gemma2": Family(
            "Gemma2ForCausalLM",
            names=_GEMMA_NAMES,
            keys={**_GEMMA_KEYS, "attn_logit_softcapping": "attention_softcap"},
            settings=_GEMMA_SETTINGS,
            parts=("rope", "query_scale", "alternating_window"),
            defaults={
                **_GEMMA_DEFAULTS,
                "max_position_embeddings": 8192,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            fixed={"use_bidirectional_attention": (False, None)},
            ignored=("hidden_act", "cache_implementation"),
        ),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            names=_GEMMA_NAMES,
            keys=_GEMMA_KEYS,
            settings={**_GEMMA_SETTINGS, "qk_norm": True},
            parts=("alternating_window", "two_ropes", "query_scale"),
            defaults={
                **_GEMMA_DEFAULTS,
                # The files of models with images omit all of these.
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "max_position_embeddings": 131072,
                "rope_theta": 1000000.0,
                "sliding_window_pattern": 6,
            },
            fixed={
                "use_bidirectional_attention": (False, None),
                "attn_logit_softcapping": (None,),
            },
            ignored=("hidden_act", "cache_implementation"),
        ),
        "gemma4_text": Family(
            "Gemma4ForCausalLM",
            names=_GEMMA_4_NAMES,
            keys={**_GEMMA_4_KEYS, "hidden_size_per_layer_input": "layer_input_size"},
            settings=_GEMMA_4_SETTINGS,
            parts=(*_GEMMA_4_PARTS, "layer_inputs", "parallel_experts"),
            defaults={
                **_GEMMA_4_DEFAULTS,
                "hidden_size_per_layer_input": 256,
                "vocab_size_per_layer_input": 262144,
            },
            fixed=_GEMMA_4_FIXED,
            rope_kinds=("default", "proportional"),
        ),
        "gemma4_unified_text": Family(
            "Gemma4UnifiedForCausalLM",
            names=_GEMMA_4_NAMES,
            keys=_GEMMA_4_KEYS,
            settings=_GEMMA_4_SETTINGS,
            parts=_GEMMA_4_PARTS,
            defaults={
                **_GEMMA_4_DEFAULTS,
                "max_position_embeddings": 262144,
                "sliding_window": 1024,
            },
            fixed=_GEMMA_4_FIXED,
            rope_kinds=("default", "proportional"),
        ),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            names=_LLAMA_NAMES,
            keys={
                **_LLAMA_KEYS,
                "attention_bias": ("qkv_bias", "out_bias"),
                "mlp_bias": "mlp_bias",
            },
            parts=("rope", "unrotated_layers"),
            defaults={
                **_LLAMA_DEFAULTS,
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "rope_theta": 2000000.0,
                "attention_bias": False,
                "mlp_bias": False,
                "tie_word_embeddings": True,
            },
            fixed={**_SILU, "use_sliding_window": (False,)},
        ),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            names=_OLMO_NAMES,
            keys={**_LLAMA_KEYS, "attention_bias": ("qkv_bias", "out_bias")},
            settings=_OLMO_SETTINGS,
            parts=("rope",),
            defaults=_OLMO_DEFAULTS,
            fixed=_SILU,
        ),
        "olmo3": Family(
            "Olmo3ForCausalLM",
            names=_OLMO_NAMES,
            keys={**_LLAMA_KEYS, "attention_bias": ("qkv_bias", "out_bias")},
            settings=_OLMO_SETTINGS,
            parts=("alternating_window", "full_rope"),
            defaults={
                **_OLMO_DEFAULTS,
                "rope_theta": 500000.0,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
            fixed=_SILU,
        ),
        "granite": Family(
            "GraniteForCausalLM",
            names=_LLAMA_NAMES,
            keys={
                **_LLAMA_KEYS,
                "attention_bias": ("qkv_bias", "out_bias"),
                "mlp_bias": "mlp_bias",
                "embedding_multiplier": "embedding_multiplier",
                "residual_multiplier": "residual_multiplier",
                "logits_scaling": "logits_divisor",
            },
            parts=("rope", "attention_multiplier"),
            defaults={**_LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
            fixed=_SILU,
        ),
        "opt": Family(
            "OPTForCausalLM",
            names={
                "embedding": "model.decoder.embed_tokens",
                "position_embedding": "model.decoder.embed_positions",
                "project_in": "model.decoder.project_in",
                "project_out": "model.decoder.project_out",
                "layer": "model.decoder.layers",
                "attention_norm": "self_attn_layer_norm",
                "q": "self_attn.q_proj",
                "k": "self_attn.k_proj",
                "v": "self_attn.v_proj",
                "out": "self_attn.out_proj",
                "mlp_norm": "final_layer_norm",
                "up": "fc1",
                "down": "fc2",
                "norm": "model.decoder.final_layer_norm",
            },
            keys={
                **{key: field for key, field in _KEYS.items() if key != "intermediate_size"},
                "ffn_dim": "intermediate_size",
                "word_embed_proj_dim": "embedding_size",
                "do_layer_norm_before": "norm_before",
                "enable_bias": ("qkv_bias", "out_bias", "mlp_bias"),
            },
            settings={
                # In OPT's training code the first rows of the table are for padding.
                "positions": LearnedPositions(offset=2),
                "activation": "relu",
                **_PLAIN,
                **_BIASES,
            },
            parts=("final_norm",),
            defaults={
                "max_position_embeddings": 2048,
                "tie_word_embeddings": True,
                "do_layer_norm_before": True,
                "enable_bias": True,
            },
            fixed={
                "activation_function": ("relu",),
                "layer_norm_elementwise_affine": (True,),
            },
        ),
        "gpt2": Family(
            "GPT2LMHeadModel",
            names=_GPT2_NAMES,
            keys=_GPT2_KEYS,
            settings=_GPT2_SETTINGS,
            mlp_ratio=4,
            defaults={**_GPT2_DEFAULTS, "activation_function": "gelu_new"},
            fixed={
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
            aliases=_GPT2_ALIASES,
            transposed=True,
        ),
        "gpt_bigcode": Family(
            "GPTBigCodeForCausalLM",
            names=_GPT2_NAMES,
            keys=_GPT2_KEYS,
            settings=_GPT2_SETTINGS,
            parts=("multi_query",),
            mlp_ratio=4,
            defaults={**_GPT2_DEFAULTS, "activation_function": "gelu_pytorch_tanh"},
            fixed={"scale_attn_weights": (True,), "add_cross_attention": (False,)},
            ignored=("num_key_value_heads",),  # follows from multi_query
            aliases=_GPT2_ALIASES,
            grouped_qkv=True,
        ),
        "starcoder2": Family(
            "Starcoder2ForCausalLM",
            names={
                **{module: name for module, name in _LLAMA_NAMES.items() if module != "gate"},
                "up": "mlp.c_fc",
                "down": "mlp.c_proj",
            },
            keys={
                **_KEYS,
                "num_key_value_heads": "num_kv_heads",
                "head_dim": "head_dim",
                "hidden_act": "activation",
                "norm_epsilon": "norm_eps",
                "use_bias": ("qkv_bias", "out_bias", "mlp_bias"),
            },
            settings={**_PLAIN, **_BIASES},
            parts=("rope", "window"),
            defaults={
                "max_position_embeddings": 4096,
                "num_key_value_heads": 2,
                "hidden_act": "gelu_pytorch_tanh",
                "norm_epsilon": 1e-5,
                "use_bias": True,
                "tie_word_embeddings": True,
            },
            ignored=("activation_function", "layer_norm_epsilon"),
        ),
        "falcon": Family(
            "FalconForCausalLM",
            names={
                "embedding": "transformer.word_embeddings",
                "layer": "transformer.h",
                "attention_norm": "input_layernorm",
                "parallel_attention_norm": "ln_attn",
                "qkv": "self_attention.query_key_value",
                "out": "self_attention.dense",
                "mlp_norm": "post_attention_layernorm",
                "parallel_mlp_norm": "ln_mlp",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
                "norm": "transformer.ln_f",
            },
            keys={
                **{key: field for key, field in _KEYS.items() if key != "intermediate_size"},
                "ffn_hidden_size": "intermediate_size",
                "activation": "activation",
                "layer_norm_epsilon": "norm_eps",
                "bias": ("qkv_bias", "out_bias", "mlp_bias"),
            },
            settings=_PLAIN,
            parts=("rope_or_alibi", "falcon_block"),
            mlp_ratio=4,
            defaults={
                "max_position_embeddings": 2048,
                "activation": "gelu",
                "layer_norm_epsilon": 1e-5,
                "bias": False,
                "tie_word_embeddings": True,
            },
            aliases={"n_embed": "hidden_size"},
            grouped_qkv=True,
        ),
        "mpt": Family(
            "MptForCausalLM",
            names={
                "embedding": "transformer.wte",
                "layer": "transformer.blocks",
                "attention_norm": "norm_1",
                "qkv": "attn.Wqkv",
                "out": "attn.out_proj",
                "mlp_norm": "norm_2",
                "up": "ffn.up_proj",
                "down": "ffn.down_proj",
                "norm": "transformer.norm_f",
            },
            keys={
                "vocab_size": "vocab_size",
                "d_model": "hidden_size",
                "n_layers": "num_layers",
                "n_heads": "num_heads",
                "max_seq_len": "max_positions",
                "layer_norm_epsilon": "norm_eps",
                "tie_word_embeddings": "tie_embeddings",
            },
            settings={
                **_PLAIN,
                "norm": "layer_no_bias",
                "activation": "gelu",
                "positions": Alibi(),
            },
            parts=("attn_config",),
            mlp_ratio=4,
            defaults={
                "max_seq_len": 2048,
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
            },
            fixed={
                "expansion_ratio": (4,),
                "no_bias": (True,),
                "norm_type": ("low_precision_layernorm", "layernorm"),
                "logit_scale": (None,),
            },
            ignored=(
                *("embedding_fraction", "init_config", "init_device", "tokenizer_name", "verbose"),
                "learned_pos_emb",  # ALiBi replaces them
            ),
            aliases={
                "hidden_size": "d_model",
                "num_attention_heads": "n_heads",
                "num_hidden_layers": "n_layers",
            },
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            names={
                **{module: name for module, name in _LLAMA_NAMES.items() if module not in "qkv"},
                "qkv": "self_attn.qkv_proj",
                "gate_up": "mlp.gate_up_proj",
            },
            keys=_LLAMA_KEYS,
            parts=("rope", "window"),
            defaults={
                **_LLAMA_DEFAULTS,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
            fixed=_SILU,
            rope_kinds=("default", "longrope"),
        ),
    }
)
