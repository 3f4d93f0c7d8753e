"""Tiny random models of every family."""

import dataclasses
import functools

import jax
import numpy as np

import magicjax
import models
from tests.magicjax import tiny

SIZES = dict(hidden_size=32, intermediate_size=48, num_heads=4, num_layers=2, max_positions=64)
GEMMA = dict(num_kv_heads=1, head_dim=16, activation="gelu_pytorch_tanh")
FALCON = dict(family="falcon", activation="gelu")
DELTA_NET = models.DeltaNetShape(key_heads=2, value_heads=4, key_dim=8, value_dim=6, conv_width=3)
KINDS = {
    "opt": dict(family="opt"),
    "gpt2": dict(family="gpt2", activation="gelu_new"),
    "starcoder": dict(family="gpt_bigcode", num_kv_heads=1, activation="gelu"),
    "starcoder2": dict(family="starcoder2", num_kv_heads=2, activation="gelu_pytorch_tanh"),
    "falcon-7b": dict(**FALCON, num_kv_heads=1, parallel=True, shared_norm=True),
    "falcon-40b": dict(**FALCON, num_kv_heads=2, parallel=True),
    "falcon-rw": dict(**FALCON, positions=models.Alibi(scaled=True)),
    "mpt": dict(family="mpt"),
    "mistral": dict(family="mistral", num_kv_heads=2, sliding_window=9),
    "gemma-2": dict(
        **GEMMA,
        family="gemma2",
        sliding_window=12,
        full_layers=(1,),
        attention_softcap=2.0,
        logits_softcap=3.0,
    ),
    "gemma-3": dict(
        **GEMMA,
        family="gemma3_text",
        sliding_window=7,
        full_layers=(1,),
        window_positions=models.Rope(theta=100.0),
        query_scale=0.5,
    ),
    "gemma-4": dict(
        family="gemma4_text",
        num_layers=4,
        num_kv_heads=4,
        head_dim=8,
        activation="gelu_pytorch_tanh",
        logits_softcap=3.0,
        sliding_window=7,
        full_layers=(1, 3),
        full_head_dim=16,
        full_kv_heads=2,
        values_are_keys=True,
        positions=models.Rope(theta=50.0, kind="proportional", partial_rotary_factor=0.5),
        window_positions=models.Rope(theta=20.0),
    ),
    "gemma-4-experts": dict(
        family="gemma4_text",
        num_kv_heads=2,
        head_dim=8,
        activation="gelu_pytorch_tanh",
        sliding_window=7,
        full_layers=(1,),
        full_head_dim=16,
        values_are_keys=True,
        positions=models.Rope(theta=50.0, kind="proportional", partial_rotary_factor=0.5),
        window_positions=models.Rope(theta=20.0),
        num_experts=6,
        experts_per_token=2,
        shared_expert_size=40,
        parallel_experts=True,
    ),
    "gemma-4-shared": dict(
        family="gemma4_text",
        num_layers=5,
        num_kv_heads=2,
        head_dim=8,
        activation="gelu_pytorch_tanh",
        sliding_window=7,
        full_layers=(1, 4),
        full_head_dim=16,
        positions=models.Rope(theta=50.0, kind="proportional", partial_rotary_factor=0.5),
        window_positions=models.Rope(theta=20.0),
        shared_kv_layers=2,
        double_shared_mlp=True,
        layer_input_size=6,
    ),
    "mixtral": dict(family="mixtral", num_kv_heads=2, num_experts=8, experts_per_token=2),
    "qwen3-moe": dict(
        family="qwen3_moe",
        num_kv_heads=2,
        num_experts=8,
        experts_per_token=3,
        normalize_experts=False,
    ),
    "gpt-oss": dict(
        family="gpt_oss",
        num_kv_heads=2,
        qkv_bias=True,
        out_bias=True,
        sliding_window=10,
        full_layers=(1,),
        num_experts=8,
        experts_per_token=2,
        swiglu_limit=2.0,
    ),
    "smollm3": dict(family="smollm3", num_kv_heads=2, unrotated_layers=(1,)),
    "olmo-3": dict(
        family="olmo3",
        num_kv_heads=2,
        sliding_window=8,
        full_layers=(1,),
        window_positions=models.Rope(theta=100.0),
    ),
    "granite": dict(
        family="granite",
        num_kv_heads=2,
        query_scale=0.5,
        embedding_multiplier=2.0,
        residual_multiplier=0.6,
        logits_divisor=2.0,
    ),
    "qwen3-next": dict(
        family="qwen3_next",
        num_layers=3,
        num_kv_heads=2,
        linear_layers=(0, 2),
        delta_net=DELTA_NET,
        positions=models.Rope(partial_rotary_factor=0.5),
        num_experts=6,
        experts_per_token=2,
        shared_expert_size=24,
    ),
    "qwen3.5": dict(
        family="qwen3_5_text",
        num_layers=3,
        num_kv_heads=2,
        linear_layers=(0, 2),
        delta_net=dataclasses.replace(DELTA_NET, conv_width=4),
        positions=models.Rope(partial_rotary_factor=0.5),
    ),
    "phi-4": dict(family="phi3", num_kv_heads=2, positions=models.Rope(partial_rotary_factor=0.75)),
}

HYBRID = ("qwen3-next", "qwen3.5")  # have layers with states
WITHOUT_STATES = [kind for kind in KINDS if kind not in HYBRID]
# Each layer reads only the layer before it, and its own keys and values.
INDEPENDENT = [kind for kind in KINDS if kind != "gemma-4-shared"]


@functools.cache
def model(kind: str, vocab_size: int, noise: float = 0.0, **sizes: int) -> magicjax.Model:
    """Returns a model of a kind, with noise in its weights."""
    settings = SIZES | KINDS[kind] | sizes
    module = models.build(models.family_config(**settings, vocab_size=vocab_size))
    rng = np.random.default_rng(2)

    def disturb(x):
        # Larger biases affect the text.
        x = 2 * np.asarray(x) + 0.3 * rng.standard_normal(x.shape)
        return x * (1 + noise * rng.standard_normal(x.shape))

    return magicjax.Model(module, tiny.put(jax.tree.map(disturb, tiny.drawn(module.config, 0))))
