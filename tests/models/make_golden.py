"""Makes `golden/`: tiny random models of every family, and the logits Hugging Face gives for them.

Needs torch and transformers, which the tests that read the result do not:
`python tests/models/make_golden.py [CASE...]`. Norms and biases are random too, or a model that
left them out would pass.
"""

import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parent / "golden"
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = {**SHAPE, "intermediate_size": 24, "num_key_value_heads": 2}
OPT = {**SHAPE, "ffn_dim": 24, "init_std": 0.3}
ROPE_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "original_max_position_embeddings": 8,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

GPT2 = {
    "vocab_size": 61,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "n_inner": 24,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FALCON = {**SHAPE, "num_attention_heads": 4, "ffn_hidden_size": 24}
FALCON_40B = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
# Six heads are no power of two, and all slopes of Falcon's formula are exact in bfloat16, to which
# Hugging Face rounds its biases.
FALCON_RW = {
    **FALCON,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "alibi": True,
    "bias": True,
    "multi_query": False,
    "parallel_attn": False,
}
MPT = {
    "vocab_size": 61,
    "d_model": 24,
    "n_heads": 12,
    "n_layers": 2,
    "max_seq_len": 32,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
STARCODER2 = {**LLAMA, "num_attention_heads": 4, "tie_word_embeddings": True}
PHI3 = {**LLAMA, "num_attention_heads": 4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [2.0, 4.0, 8.0],
}

GEMMA = {
    **LLAMA,
    "head_dim": 8,
    "num_key_value_heads": 1,
    "sliding_window": 5,
    "query_pre_attn_scalar": 12,
}
GEMMA4 = {
    **LLAMA,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
GEMMA4_UNIFIED = {
    **{key: x for key, x in GEMMA4.items() if key != "hidden_size_per_layer_input"},
    "attention_k_eq_v": True,
}
QWEN3_MOE = {
    **LLAMA,
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
}

QWEN3_NEXT = {
    **LLAMA,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
    },
}
QWEN3_NEXT_MOE = {
    **QWEN3_NEXT,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}

CASES = {
    "llama": ("Llama", LLAMA),
    "llama_gqa": ("Llama", {**LLAMA, "num_attention_heads": 4, "eos_token_id": [2, 3]}),
    "llama_head_dim": ("Llama", {**LLAMA, "head_dim": 12, "num_key_value_heads": 1}),
    "llama_linear": ("Llama", {**LLAMA, "rope_parameters": LINEAR}),
    "llama_llama3": ("Llama", {**LLAMA, "rope_parameters": ROPE_3}),
    "llama_yarn": ("Llama", {**LLAMA, "rope_parameters": YARN}),
    "llama_tied": ("Llama", {**LLAMA, "tie_word_embeddings": True}),
    "llama_bias": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**LLAMA, "num_key_value_heads": 1, "sliding_window": None}),
    "mistral_window": ("Mistral", {**LLAMA, "sliding_window": 6}),
    "qwen2": ("Qwen2", {**LLAMA, "rope_parameters": {**YARN, "attention_factor": 1.25}}),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 16, "num_key_value_heads": 1}),
    "opt": ("OPT", OPT),
    "opt_post_norm": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 8}),
    "gpt2": ("GPT2", GPT2),
    "starcoder": ("GPTBigCode", GPT2),
    "starcoder_heads": ("GPTBigCode", {**GPT2, "multi_query": False}),
    "starcoder2": ("Starcoder2", STARCODER2),
    "falcon_7b": ("Falcon", FALCON),
    "falcon_40b": ("Falcon", FALCON_40B),
    "falcon_11b": ("Falcon", {**FALCON_40B, "num_ln_in_parallel_attn": 1}),
    "falcon_rw": ("Falcon", FALCON_RW),
    "mpt": ("Mpt", MPT),
    "mpt_clip": ("Mpt", {**MPT, "d_model": 16, "n_heads": 4, "attn_config": {"clip_qkv": 0.5}}),
    "phi3": ("Phi3", PHI3),
    "phi3_longrope": (
        "Phi3",
        {
            **PHI3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": LONGROPE,
            "max_position_embeddings": 96,
            "original_max_position_embeddings": 24,
            "sliding_window": None,
        },
    ),
    "qwen3_window": (
        "Qwen3",
        {
            **LLAMA,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "mixtral": (
        "Mixtral",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3_moe_normalized": (
        "Qwen3Moe",
        {**QWEN3_MOE, "norm_topk_prob": True, "num_experts_per_tok": 1},
    ),
    "gpt_oss": (
        "GptOss",
        {
            **LLAMA,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "qwen3_moe_window": (
        "Qwen3Moe",
        {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "smollm3": (
        "SmolLM3",
        {
            **LLAMA,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "olmo2": ("Olmo2", {**LLAMA, "num_attention_heads": 4}),
    "olmo3": (
        "Olmo3",
        {
            **LLAMA,
            "num_attention_heads": 4,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            **LLAMA,
            "num_attention_heads": 4,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.6,
            "logits_scaling": 4.0,
        },
    ),
    "qwen3_next": ("Qwen3Next", QWEN3_NEXT_MOE),
    "qwen3_5": (
        "Qwen3_5Text",
        {
            **QWEN3_NEXT,
            "linear_conv_kernel_dim": 4,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3_5_moe": ("Qwen3_5MoeText", QWEN3_NEXT_MOE),
    "gemma4": (
        "Gemma4Text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_shared": (
        "Gemma4Text",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention"),
                *("sliding_attention", "full_attention"),
            ],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 61,
        },
    ),
    "gemma4_unified": ("Gemma4UnifiedText", GEMMA4_UNIFIED),
    "gemma4_experts": (
        "Gemma4Text",
        {
            **GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "moe_intermediate_size": 12,
            "num_experts": 5,
            "top_k_experts": 2,
        },
    ),
}
SHARDED = "llama_gqa"


def make(case: str, seed: int) -> None:
    """Writes golden/<case>: the model, and expected.npz with tokens [B,T] and logits [B,T,V]."""
    family, settings = CASES[case]
    torch.manual_seed(seed)
    config = getattr(transformers, family + "Config")(**settings)
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family.removesuffix("Text") + kind)(config).float().eval()
    scalars = [each for each in model.named_buffers() if each[0].endswith("layer_scalar")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *scalars]:
            if name.endswith("A_log"):  # sums of large decays lose precision
                parameter -= 4
            if parameter.ndim == 1 or not parameter.any():
                parameter += 0.3 * torch.randn_like(parameter)
        tokens = torch.randint(0, config.vocab_size, (2, 20))
        logits = model(tokens).logits
    folder = GOLDEN / case
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="10KB" if case == SHARDED else "1GB")
    np.savez_compressed(
        folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy()
    )


if __name__ == "__main__":
    only = sys.argv[1:] or CASES
    for seed, case in enumerate(CASES):
        if case in only:
            make(case, seed)
