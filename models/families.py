"""The families: how Hugging Face names their settings and tensors.

A family is an entry of `FAMILIES`. `hf_config` reads and writes config.json by it, and `hf_tensors`
the weights.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from models.decoder import DecoderConfig, LearnedPositions


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, by its `model_type` in config.json.

    Attributes:
      architecture: the class in Hugging Face transformers, without "ForCausalLM".
      names: the tensor or module of each parameter; those of a block are relative to "layer".
      keys: for each key of config.json whose value is taken unchanged, the fields of
        `DecoderConfig` that have it, separated by spaces.
      settings: the fields of `DecoderConfig` that all models of the family share.
      parts: the settings that need more than `keys`, by their name in `hf_config.PARTS`.
      defaults: Hugging Face's defaults of keys that config.json omits.
      fixed: keys of which only some values are supported, and those values.
    """

    architecture: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    settings: Mapping[str, Any] = MappingProxyType({})
    parts: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})
    fixed: Mapping[str, tuple[Any, ...]] = MappingProxyType({})

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
    hidden, heads = settings["hidden_size"], settings["num_heads"]
    if "head_dim" not in settings and hidden % heads:
        raise ValueError(f"hidden_size={hidden} is not a multiple of num_heads={heads}")
    sizes = {"num_kv_heads": heads, "head_dim": hidden // heads, "family": family}
    return DecoderConfig(**{**sizes, **FAMILIES[family].settings, **settings})


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tie_embeddings",
}
_LLAMA_KEYS = {
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
_SILU = {"hidden_act": ("silu", "swish")}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            "Llama",
            names=_LLAMA_NAMES,
            keys={
                **_LLAMA_KEYS,
                "attention_bias": "qkv_bias out_bias",
                "mlp_bias": "mlp_bias",
            },
            parts=("rope",),
            defaults={**_LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
            fixed=_SILU,
        ),
        "mistral": Family(
            "Mistral",
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
            "Qwen2",
            names=_LLAMA_NAMES,
            keys=_LLAMA_KEYS,
            settings={"qkv_bias": True},
            parts=("rope", "window of some layers"),
            defaults=_QWEN_DEFAULTS,
            fixed=_SILU,
        ),
        "qwen3": Family(
            "Qwen3",
            names=_LLAMA_NAMES,
            keys={**_LLAMA_KEYS, "attention_bias": "qkv_bias out_bias"},
            settings={"qk_norm": True},
            parts=("rope", "window of some layers"),
            defaults={**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
            fixed=_SILU,
        ),
        "opt": Family(
            "OPT",
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
                "enable_bias": "qkv_bias out_bias mlp_bias",
            },
            settings={
                # In OPT's training code the first rows of the table are for padding.
                "positions": LearnedPositions(offset=2),
                "norm": "layer",
                "activation": "relu",
                "gated": False,
                "qkv_bias": True,
                "out_bias": True,
                "mlp_bias": True,
                "tie_embeddings": True,
            },
            parts=("removed final norm",),
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
    }
)
