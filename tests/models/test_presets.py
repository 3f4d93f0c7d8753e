"""Presets have the published sizes, and run with random weights."""

import dataclasses

import numpy as np
import pytest

import models
from models.hf_config import read_config

# Parameters as their publishers count them; tied output matrices once.
PUBLISHED = {
    "llama-68m": 68_030_208,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-7b-32k": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "gpt2": 124_439_808,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "mpt-7b": 6_649_286_656,
    "starcoder": 15_517_456_384,
    "starcoder2-3b": 3_030_371_328,
    "phi-3-mini": 3_821_079_552,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert models.count_params(models.preset(name)) == PUBLISHED[name]


# Of the checkpoints' config.json, without keys such as token ids.
CONFIG_JSON = {
    "falcon-7b": {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "bias": False,
        "hidden_dropout": 0.0,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-05,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "falcon-40b": {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "hidden_size": 8192,
        "new_decoder_architecture": True,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_kv_heads": 8,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "mpt-7b": {
        "model_type": "mpt",
        "architectures": ["MPTForCausalLM"],
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "d_model": 4096,
        "emb_pdrop": 0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "init_config": {"name": "kaiming_normal_", "verbose": 0},
        "init_device": "cpu",
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 2048,
        "n_heads": 32,
        "n_layers": 32,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0,
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "verbose": 0,
        "vocab_size": 50432,
    },
    "starcoder": {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "multi_query": True,
        "n_embd": 6144,
        "n_head": 48,
        "n_inner": 24576,
        "n_layer": 40,
        "n_positions": 8192,
        "scale_attn_weights": True,
        "vocab_size": 49152,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "activation_function": "gelu",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 16384,
        "mlp_type": "default",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "num_attention_heads": 24,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "rope_theta": 999999.4420358813,
        "sliding_window": 4096,
        "use_bias": True,
        "vocab_size": 49152,
    },
    "phi-3-mini": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}


@pytest.mark.parametrize("name", CONFIG_JSON)
def test_a_published_config_is_that_of_the_preset(name):
    assert read_config(CONFIG_JSON[name]) == models.preset(name)


@pytest.mark.parametrize(
    "wrong, near",
    [("llama-3-8b", "llama-3.1-8b"), ("opt-120m", "opt-125m"), ("mistral", "mistral-7b-v0.3")],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(wrong, near):
    with pytest.raises(
        ValueError, match=f"preset '{wrong}' does not exist: the nearest is '{near}"
    ):
        models.preset(wrong)


@pytest.mark.slow
def test_a_preset_runs_with_random_weights(logits_of):
    config = dataclasses.replace(models.preset("llama-68m"), num_layers=1, vocab_size=500)
    module = models.build(config, "bfloat16")
    logits = logits_of(module, models.init_params(module), np.zeros((1, 3), np.int32))
    assert logits.shape == (1, 3, 500)
    assert np.isfinite(np.asarray(logits)).all()
