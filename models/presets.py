"""The public hyper-parameters of well-known models, by name.

A preset is a config without weights, for planning, benchmarks with random weights, and tests.
Checkpoints have their own config.json.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from models.decoder_config import DecoderConfig
from models.families import family_config
from models.gated_delta import DeltaNetShape
from models.positions import Rope


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **overrides: Any
) -> DecoderConfig:
    settings = {"vocab_size": 32000, "max_positions": 2048, "family": "llama", **overrides}
    return family_config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        **settings,
    )


def _llama_3(
    hidden: int, intermediate: int, layers: int, heads: int, factor: float
) -> DecoderConfig:
    rope = Rope(theta=500000.0, kind="llama3", factor=factor, original_max_positions=8192)
    return _llama(
        hidden,
        intermediate,
        layers,
        heads,
        8,
        vocab_size=128256,
        max_positions=131072,
        positions=rope,
    )


def _qwen_2_5(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, eps: float
) -> DecoderConfig:
    return _llama(
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        vocab_size=152064,
        max_positions=131072,
        positions=Rope(theta=1000000.0),
        norm_eps=eps,
        family="qwen2",
    )


def _hybrid(
    family: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    **overrides: Any,
) -> DecoderConfig:
    """Returns a model of which three of four layers are gated delta nets (Qwen)."""
    shape = DeltaNetShape(16, overrides.pop("value_heads", 32), 128, 128, 4)
    return _llama(
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        head_dim=256,
        max_positions=262144,
        positions=Rope(theta=10000000.0, partial_rotary_factor=0.25),
        norm_eps=1e-6,
        linear_layers=tuple(layer for layer in range(layers) if layer % 4 < 3),
        delta_net=shape,
        family=family,
        **overrides,
    )


def _gemma(
    family: str,
    vocab: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    **overrides: Any,
) -> DecoderConfig:
    return family_config(
        family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        activation="gelu_pytorch_tanh",
        norm_eps=1e-6,
        tie_embeddings=True,
        **overrides,
    )


def _gemma_3(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    window: int,
    factor: float = 1.0,
    head_dim: int = 256,
    **overrides: Any,
) -> DecoderConfig:
    kind = "default" if factor == 1 else "linear"
    settings: dict[str, Any] = {
        "max_positions": 131072,
        "positions": Rope(theta=1000000.0, kind=kind, factor=factor),
        "window_positions": Rope(),
        "sliding_window": window,
        "full_layers": tuple(range(5, layers, 6)),
        **overrides,
    }
    return _gemma(
        "gemma3_text", 262144, hidden, intermediate, layers, heads, kv_heads, head_dim, **settings
    )


def _gemma_4(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    window: int,
    family: str = "gemma4_text",
    **overrides: Any,
) -> DecoderConfig:
    settings: dict[str, Any] = {
        "max_positions": 262144,
        "positions": Rope(theta=1000000.0, kind="proportional", partial_rotary_factor=0.25),
        "window_positions": Rope(),
        "sliding_window": window,
        "full_layers": tuple(range(5, layers, 6)),
        "full_head_dim": 512,
        "logits_softcap": 30.0,
        **overrides,
    }
    return _gemma(family, 262144, hidden, intermediate, layers, heads, kv_heads, 256, **settings)


def _olmo_3(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int
) -> DecoderConfig:
    theta, length = 500000.0, 65536
    rope = Rope(
        theta=theta,
        kind="yarn",
        factor=8.0,
        original_max_positions=8192,
        attention_factor=1.2079441541679836,
    )
    return _llama(
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        vocab_size=100278,
        max_positions=length,
        positions=rope,
        window_positions=Rope(theta=theta),
        sliding_window=4096,
        full_layers=tuple(range(3, layers, 4)),
        norm_eps=1e-6,
        family="olmo3",
    )


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    rope = Rope(
        theta=150000.0, kind="yarn", factor=32.0, original_max_positions=4096, truncate=False
    )
    return family_config(
        "gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        max_positions=131072,
        positions=rope,
        qkv_bias=True,
        out_bias=True,
        sliding_window=128,
        full_layers=tuple(range(1, layers, 2)),
        num_experts=experts,
        experts_per_token=4,
        swiglu_limit=7.0,
    )


def _opt(hidden: int, layers: int, heads: int) -> DecoderConfig:
    return family_config(
        "opt",
        vocab_size=50272,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        max_positions=2048,
    )


def _falcon(hidden: int, layers: int, heads: int, **overrides: Any) -> DecoderConfig:
    return family_config(
        "falcon",
        vocab_size=65024,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        max_positions=2048,
        parallel=True,
        activation="gelu",
        **overrides,
    )


_LLAMA_2_7B = _llama(4096, 11008, 32, 32, 32, max_positions=4096)

PRESETS: Mapping[str, DecoderConfig] = MappingProxyType(
    {
        "llama-68m": _llama(768, 3072, 2, 12, 12, norm_eps=1e-6),
        "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4),
        "llama-65b": _llama(8192, 22016, 80, 64, 64),
        "llama-2-7b": _LLAMA_2_7B,
        "llama-2-7b-32k": dataclasses.replace(
            _LLAMA_2_7B, max_positions=32768, positions=Rope(kind="linear", factor=8.0)
        ),
        "llama-2-13b": _llama(5120, 13824, 40, 40, 40, max_positions=4096),
        "llama-2-70b": _llama(8192, 28672, 80, 64, 8, max_positions=4096),
        "llama-3.1-8b": _llama_3(4096, 14336, 32, 32, factor=8.0),
        "llama-3.1-70b": _llama_3(8192, 28672, 80, 64, factor=8.0),
        "llama-3.2-1b": dataclasses.replace(
            _llama_3(2048, 8192, 16, 32, factor=32.0), tie_embeddings=True
        ),
        "mistral-7b-v0.3": _llama(
            4096,
            14336,
            32,
            32,
            8,
            vocab_size=32768,
            max_positions=32768,
            positions=Rope(theta=1000000.0),
            family="mistral",
        ),
        "mistral-7b-v0.1": _llama(
            4096, 14336, 32, 32, 8, max_positions=32768, sliding_window=4096, family="mistral"
        ),
        "gemma-2-9b": _gemma(
            "gemma2",
            *(256000, 3584, 14336, 42, 16, 8, 256),
            max_positions=8192,
            sliding_window=4096,
            full_layers=tuple(range(1, 42, 2)),
            attention_softcap=50.0,
            logits_softcap=30.0,
        ),
        "gemma-3-1b": _gemma_3(1152, 6912, 26, 4, 1, window=512, max_positions=32768),
        "gemma-3-12b": _gemma_3(3840, 15360, 48, 16, 8, window=1024, factor=8.0),
        "gemma-3-27b": _gemma_3(
            5376, 21504, 62, 32, 16, window=1024, factor=8.0, head_dim=128, query_scale=168**-0.5
        ),
        "gemma-4-e2b": _gemma_4(
            *(1536, 6144, 35, 8, 1),
            window=512,
            max_positions=131072,
            full_layers=tuple(range(4, 35, 5)),
            shared_kv_layers=20,
            double_shared_mlp=True,
            layer_input_size=256,
        ),
        "gemma-4-e4b": _gemma_4(
            *(2560, 10240, 42, 8, 2),
            window=512,
            max_positions=131072,
            shared_kv_layers=18,
            layer_input_size=256,
        ),
        "gemma-4-12b": _gemma_4(
            *(3840, 15360, 48, 16, 8),
            window=1024,
            full_kv_heads=1,
            values_are_keys=True,
            family="gemma4_unified_text",
        ),
        "gemma-4-26b-a4b": _gemma_4(
            *(2816, 704, 30, 16, 8),
            window=1024,
            full_kv_heads=2,
            values_are_keys=True,
            num_experts=128,
            experts_per_token=8,
            shared_expert_size=2112,
            parallel_experts=True,
        ),
        "gemma-4-31b": _gemma_4(
            *(5376, 21504, 60, 32, 16), window=1024, full_kv_heads=4, values_are_keys=True
        ),
        "mixtral-8x7b": _llama(
            4096,
            14336,
            32,
            32,
            8,
            max_positions=32768,
            positions=Rope(theta=1000000.0),
            num_experts=8,
            experts_per_token=2,
            family="mixtral",
        ),
        "qwen3-30b-a3b": _llama(
            2048,
            768,
            48,
            32,
            4,
            vocab_size=151936,
            head_dim=128,
            max_positions=40960,
            positions=Rope(theta=1000000.0),
            norm_eps=1e-6,
            num_experts=128,
            experts_per_token=8,
            family="qwen3_moe",
        ),
        "qwen3-next-80b-a3b": _hybrid(
            *("qwen3_next", 2048, 512, 48, 16, 2),
            vocab_size=151936,
            num_experts=512,
            experts_per_token=10,
            shared_expert_size=512,
        ),
        "qwen3.5-27b": _hybrid(
            *("qwen3_5_text", 5120, 17408, 64, 24, 4), vocab_size=248320, value_heads=48
        ),
        "qwen3.5-35b-a3b": _hybrid(
            *("qwen3_5_moe_text", 2048, 512, 40, 16, 2),
            vocab_size=248320,
            num_experts=256,
            experts_per_token=8,
            shared_expert_size=512,
        ),
        "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
        "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
        "qwen2.5-7b": _qwen_2_5(3584, 18944, 28, 28, 4, eps=1e-6),
        "qwen2.5-14b": _qwen_2_5(5120, 13824, 48, 40, 8, eps=1e-5),
        "qwen2.5-32b": _qwen_2_5(5120, 27648, 64, 40, 8, eps=1e-5),
        "smollm3-3b": _llama(
            2048,
            11008,
            36,
            16,
            4,
            vocab_size=128256,
            max_positions=65536,
            positions=Rope(theta=5000000.0),
            unrotated_layers=tuple(range(3, 36, 4)),
            norm_eps=1e-6,
            tie_embeddings=True,
            family="smollm3",
        ),
        "olmo-2-1b": _llama(
            2048,
            8192,
            16,
            16,
            16,
            vocab_size=100352,
            max_positions=4096,
            positions=Rope(theta=500000.0),
            norm_eps=1e-6,
            family="olmo2",
        ),
        "olmo-3-7b": _olmo_3(4096, 11008, 32, 32, 32),
        "olmo-3-32b": _olmo_3(5120, 27648, 64, 40, 8),
        "granite-3.3-2b": _llama(
            2048,
            8192,
            40,
            32,
            8,
            vocab_size=49159,
            max_positions=131072,
            positions=Rope(theta=10000000.0),
            query_scale=0.015625,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_divisor=8.0,
            tie_embeddings=True,
            family="granite",
        ),
        "opt-125m": _opt(768, 12, 12),
        "opt-1.3b": _opt(2048, 24, 32),
        "opt-13b": _opt(5120, 40, 40),
        "opt-30b": _opt(7168, 48, 56),
        "gpt2": family_config(
            "gpt2",
            vocab_size=50257,
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            max_positions=1024,
            activation="gelu_new",
        ),
        "falcon-7b": _falcon(4544, 32, 71, num_kv_heads=1, shared_norm=True),
        "falcon-40b": _falcon(8192, 60, 128, num_kv_heads=8),
        "mpt-7b": family_config(
            "mpt",
            vocab_size=50432,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            max_positions=2048,
        ),
        "starcoder": family_config(
            "gpt_bigcode",
            vocab_size=49152,
            hidden_size=6144,
            num_layers=40,
            num_heads=48,
            num_kv_heads=1,
            max_positions=8192,
            activation="gelu",
        ),
        "starcoder2-3b": family_config(
            "starcoder2",
            vocab_size=49152,
            hidden_size=3072,
            intermediate_size=12288,
            num_layers=30,
            num_heads=24,
            num_kv_heads=2,
            max_positions=16384,
            sliding_window=4096,
            positions=Rope(theta=999999.4420358813),
            activation="gelu_pytorch_tanh",
        ),
        "phi-3-mini": _llama(
            3072,
            8192,
            32,
            32,
            32,
            vocab_size=32064,
            max_positions=4096,
            sliding_window=2047,
            family="phi3",
        ),
    }
)


def preset(name: str) -> DecoderConfig:
    """Returns the config of a preset; case is ignored.

    Raises ValueError for an unknown name, and suggests the nearest one.
    """
    key = name.lower()
    if key not in PRESETS:
        near = difflib.get_close_matches(key, PRESETS, 1, cutoff=0.6)
        nearest = f"the nearest is {near[0]!r}; " if near else ""
        raise ValueError(f"preset {name!r} does not exist: {nearest}all are {', '.join(PRESETS)}")
    return PRESETS[key]
