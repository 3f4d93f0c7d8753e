"""config.json of published models, by their publishers' values and with the noise of real files."""

from typing import Any

# What transformers and other programs write into files, and no model reads.
NOISE = {
    "_attn_implementation_autoset": True,
    "_name_or_path": "someone/fine-tune",
    "auto_map": {"AutoConfig": "configuration.Config"},
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "pad_token_id": -1,
    "quantization_config": None,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.46.3",
    "unsloth_version": "2025.1",
    "use_cache": False,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "falcon": "FalconForCausalLM",
    "mpt": "MPTForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def _file(family: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": family, "architectures": [ARCHITECTURES[family]], **settings}


def _sized(family, hidden, intermediate, layers, heads, kv_heads, vocab, positions, **more):
    """Returns the file of a family that names its sizes as Llama does."""
    sizes = dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=positions,
    )
    eps = {} if family == "starcoder2" else {"rms_norm_eps": 1e-5}
    return _file(family, **sizes | eps | more)


def _llama(*sizes, **more):
    own = dict(hidden_act="silu", pretraining_tp=1, rope_scaling=None, tie_word_embeddings=False)
    return _sized("llama", *sizes, **own | more)


def _llama_3(*sizes, factor=8.0, **more):
    rope = dict(factor=factor, high_freq_factor=4.0, low_freq_factor=1.0, rope_type="llama3")
    rope["original_max_position_embeddings"] = 8192
    bias = dict(attention_bias=False, attention_dropout=0.0, mlp_bias=False)
    settings = dict(rope_scaling=rope, rope_theta=500000.0, **bias)
    return _llama(*sizes, 128256, 131072, **settings | more)


def _mistral(vocab, **more):
    own = dict(attention_dropout=0.0, hidden_act="silu", tie_word_embeddings=False)
    return _sized("mistral", 4096, 14336, 32, 32, 8, vocab, 32768, **own | more)


def _mixtral(*sizes, **more):
    router = dict(output_router_logits=False, router_aux_loss_coef=0.02, router_jitter_noise=0.0)
    experts = dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    return _sized("mixtral", *sizes, rope_theta=1000000.0, **router, **experts, **more)


def _qwen(family, *sizes, **more):
    window = dict(use_sliding_window=False, sliding_window=sizes[6], max_window_layers=sizes[2])
    own = dict(rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False)
    return _sized(family, *sizes) | window | own | more


def _qwen3(*sizes, **more):
    window = dict(sliding_window=None, max_window_layers=sizes[2])
    own = dict(head_dim=128, attention_bias=False, rope_scaling=None)
    return _qwen("qwen3", *sizes, **window | own | more)


def _qwen3_moe(*sizes, **more):
    router = dict(output_router_logits=False, router_aux_loss_coef=0.001, norm_topk_prob=True)
    layers = dict(decoder_sparse_step=1, mlp_only_layers=[], max_window_layers=sizes[2])
    experts = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    own = dict(head_dim=128, attention_bias=False, sliding_window=None)
    return _qwen("qwen3_moe", *sizes, **router | layers | experts | own | more)


_DELTA_NET = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
)


def _qwen3_5(kind, layers, **text):
    """Returns the file of a model that also reads images."""
    own = dict(
        model_type=f"{kind}_text",
        attn_output_gate=True,
        dtype="bfloat16",
        full_attention_interval=4,
        head_dim=256,
        hidden_act="silu",
        layer_types=[*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        mamba_ssm_dtype="float32",
        max_position_embeddings=262144,
        mlp_only_layers=[],
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        num_hidden_layers=layers,
        rms_norm_eps=1e-6,
        rope_parameters=dict(
            mrope_interleaved=True,
            mrope_section=[11, 11, 10],
            partial_rotary_factor=0.25,
            rope_theta=10000000,
            rope_type="default",
        ),
        vocab_size=248320,
    )
    images = dict(vision_config={"model_type": kind}, image_token_id=248056)
    text = own | _DELTA_NET | text
    return _file(kind, text_config=text, tie_word_embeddings=False, **images)


def _gemma(family, *sizes, **more):
    activation = dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh")
    own = dict(attention_bias=False, cache_implementation="hybrid", head_dim=256)
    settings = dict(rms_norm_eps=1e-6, query_pre_attn_scalar=256, rope_theta=10000.0)
    return _sized(family, *sizes) | activation | own | settings | more


def _gemma2(*sizes, **more):
    caps = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    window = dict(sliding_window=4096, sliding_window_size=4096)
    return _gemma("gemma2", *sizes, 256000, 8192, **caps, **window, **more)


def _gemma3_images(text):
    images = dict(vision_config={"model_type": "siglip_vision_model"}, mm_tokens_per_image=256)
    text = {"model_type": "gemma3_text", "torch_dtype": "bfloat16", **text}
    return _file("gemma3", text_config=text, image_token_index=262144, **images)


def _gemma4(hidden, intermediate, layers, heads, kv_heads, **text):
    ropes = {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    own = dict(attention_bias=False, attention_dropout=0.0, attention_k_eq_v=True)
    own |= dict(enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=512)
    own |= dict(head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size_per_layer_input=0)
    own |= dict(model_type="gemma4_text", moe_intermediate_size=None, num_experts=None)
    own |= dict(num_kv_shared_layers=0, rope_parameters=ropes, sliding_window=1024)
    own |= dict(tie_word_embeddings=True, top_k_experts=None, use_double_wide_mlp=False)
    own |= dict(use_bidirectional_attention="vision", vocab_size_per_layer_input=262144)
    own |= dict(layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * (layers // 6))
    sizes = hidden, intermediate, layers, heads, kv_heads, 262144, 262144
    text = _sized("gemma4", *sizes, rms_norm_eps=1e-6) | {"architectures": None} | own | text
    audio = dict(audio_config=None, audio_token_id=258881, eoa_token_index=258883)
    images = dict(vision_config={"model_type": "gemma4_vision"}, image_token_id=258880)
    return _file("gemma4", text_config=text, tie_word_embeddings=True, **audio, **images)


def _gemma4_unified(*sizes, **text):
    whole = _gemma4(*sizes, **text)
    none = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
    none += ("num_experts", "top_k_experts", "moe_intermediate_size")
    text = {key: value for key, value in whole["text_config"].items() if key not in none}
    text = text | {"model_type": "gemma4_unified_text"}
    return _file("gemma4_unified", text_config=text, tie_word_embeddings=True)


def _gpt_oss(layers, experts):
    rope = dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, rope_type="yarn", truncate=False)
    rope["original_max_position_embeddings"] = 4096
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    own = dict(attention_bias=True, head_dim=64, sliding_window=128, swiglu_limit=7.0)
    old = dict(experts_per_token=4, initial_context_length=4096, router_aux_loss_coef=0.9)
    mixture = dict(num_local_experts=experts, num_experts_per_tok=4, rope_theta=150000)
    sizes = 2880, 2880, layers, 64, 8, 201088, 131072
    own |= dict(layer_types=kinds, rope_scaling=rope)
    return _sized("gpt_oss", *sizes, **own, **old, **mixture)


def _opt(hidden, layers, heads, **more):
    sizes = dict(hidden_size=hidden, ffn_dim=4 * hidden, num_hidden_layers=layers)
    sizes |= dict(num_attention_heads=heads, vocab_size=50272, max_position_embeddings=2048)
    own = dict(
        _remove_final_layer_norm=False, activation_function="relu", word_embed_proj_dim=hidden
    )
    own |= dict(do_layer_norm_before=True, dropout=0.1, layerdrop=0.0, prefix="</s>")
    return _file("opt", **sizes, **own | more)


def _gpt2(family, hidden, layers, heads, vocab=50257, positions=1024, **more):
    sizes = dict(n_embd=hidden, n_layer=layers, n_head=heads, n_positions=positions)
    own = dict(activation_function="gelu_new", attn_pdrop=0.1, n_ctx=positions, vocab_size=vocab)
    own |= dict(layer_norm_epsilon=1e-5, summary_type="cls_index", summary_use_proj=True)
    own |= dict(task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}})
    return _file(family, **sizes, **own | more)


def _falcon(hidden, layers, heads, **more):
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
    own = dict(alibi=False, bias=False, multi_query=True, new_decoder_architecture=False)
    own |= dict(apply_residual_connection_post_layernorm=False, hidden_dropout=0.0)
    own |= dict(layer_norm_epsilon=1e-5, parallel_attn=True, vocab_size=65024)
    return _file("falcon", **sizes, **own | more)


def _mpt(hidden, layers, heads, positions, vocab=50432, **attention):
    sizes = dict(d_model=hidden, n_layers=layers, n_heads=heads, max_seq_len=positions)
    attention = dict(
        alibi=True,
        alibi_bias_max=8,
        attn_impl="torch",
        attn_pdrop=0,
        attn_type="multihead_attention",
        attn_uses_sequence_id=False,
        clip_qkv=None,
        prefix_lm=False,
        qk_ln=False,
        softmax_scale=None,
    ) | dict(attention)
    own = dict(emb_pdrop=0, embedding_fraction=1.0, expansion_ratio=4, init_device="cpu")
    own |= dict(init_config={"name": "kaiming_normal_"}, learned_pos_emb=True, logit_scale=None)
    own |= dict(no_bias=True, norm_type="low_precision_layernorm", resid_pdrop=0, verbose=0)
    own |= dict(tokenizer_name="EleutherAI/gpt-neox-20b", vocab_size=vocab)
    return _file("mpt", **sizes, **own, attn_config=attention)


def _smollm3(*sizes, **more):
    layers = dict(layer_types=["full_attention"] * 36, max_window_layers=28)
    layers |= dict(no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9)
    own = dict(attention_bias=False, hidden_act="silu", mlp_bias=False, pretraining_tp=2)
    own |= dict(rms_norm_eps=1e-6, rope_scaling=None, sliding_window=None)
    return _sized("smollm3", *sizes, **own | layers, use_sliding_window=False, **more)


def _olmo(family, *sizes, **more):
    own = dict(attention_bias=False, attention_dropout=0.0, hidden_act="silu", rms_norm_eps=1e-6)
    own |= dict(rope_scaling=None, rope_theta=500000, tie_word_embeddings=False)
    return _sized(family, *sizes, **own | more)


def _olmo3(hidden, intermediate, layers, heads, kv_heads):
    rope = dict(attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0)
    rope |= dict(original_max_position_embeddings=8192, rope_type="yarn")
    kinds = [*["sliding_attention"] * 3, "full_attention"] * (layers // 4)
    window = dict(layer_types=kinds, sliding_window=4096)
    sizes = hidden, intermediate, layers, heads, kv_heads, 100278, 65536
    return _olmo("olmo3", *sizes, rope_scaling=rope, **window)


def _granite(*sizes, **more):
    own = dict(attention_bias=False, hidden_act="silu", mlp_bias=False, rope_scaling=None)
    own |= dict(embedding_multiplier=12.0, residual_multiplier=0.22, tie_word_embeddings=True)
    return _sized("granite", *sizes, **own | more)


def _starcoder(hidden, layers, heads, positions, **more):
    own = dict(attention_softmax_in_fp32=True, scale_attention_softmax_in_fp32=True)
    own |= dict(inference_runner=0, max_batch_size=None, max_sequence_length=None)
    own |= dict(multi_query=True, pad_key_length=True, pre_allocate_kv_cache=False)
    own |= dict(scale_attn_weights=True, validate_runner_input=True, n_inner=4 * hidden)
    own |= dict(activation_function="gelu", n_ctx=None) | more
    return _gpt2("gpt_bigcode", hidden, layers, heads, 49152, positions, **own)


def _starcoder2(*sizes, **more):
    own = dict(activation_function="gelu_pytorch_tanh", attention_softmax_in_fp32=True)
    own |= dict(hidden_act="gelu_pytorch_tanh", layer_norm_epsilon=1e-5, mlp_type="default")
    own |= dict(norm_epsilon=1e-5, norm_type="layer_norm", scale_attn_weights=True, use_bias=True)
    return _sized("starcoder2", *sizes, 49152, 16384, sliding_window=4096, **own, **more)


def _phi3(*sizes, **more):
    own = dict(attention_dropout=0.0, embd_pdrop=0.0, resid_pdrop=0.0, hidden_act="silu")
    own |= dict(rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False)
    own |= dict(attention_bias=False, original_max_position_embeddings=4096, sliding_window=262144)
    return _sized("phi3", *sizes, **own | more)


_LINEAR_8 = {"factor": 8.0, "rope_type": "linear"}
_GEMMA_3 = dict(sliding_window_pattern=6, rope_theta=1000000.0, rope_local_base_freq=10000.0)
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
_SHARED = dict(tie_word_embeddings=True)

# The presets of some names have the same values.
PUBLISHED = {
    "llama-65b": _llama(8192, 22016, 80, 64, 64, 32000, 2048, max_sequence_length=2048),
    "llama-68m": _llama(768, 3072, 2, 12, 12, 32000, 2048, rms_norm_eps=1e-6),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4, 32000, 2048),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096, max_length=4096),
    "llama-2-7b-32k": _llama(
        *(4096, 11008, 32, 32, 32, 32000, 32768), rope_scaling={"factor": 8.0, "type": "linear"}
    ),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096, neftune_noise_alpha=5),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096),
    "vicuna-7b-v1.5-16k": _llama(
        *(4096, 11008, 32, 32, 32, 32000, 4096), rope_scaling={"factor": 4.0, "type": "linear"}
    ),
    "codellama-34b": _llama(8192, 22016, 48, 64, 8, 32000, 16384, rope_theta=1000000),
    "yi-6b": _llama(4096, 11008, 32, 32, 4, 64000, 4096, rope_theta=5000000.0),
    "deepseek-coder-6.7b": _llama(
        *(4096, 11008, 32, 32, 32, 32256, 16384),
        rope_theta=100000,
        rope_scaling={"factor": 4.0, "type": "linear"},
    ),
    "smollm2-135m": _llama(
        *(576, 1536, 30, 9, 3, 49152, 8192),
        **dict(is_llama_config=True, rope_interleaved=False, rope_theta=100000, **_SHARED),
    ),
    "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, 8192, rope_theta=130000, **_SHARED),
    "llama-3.1-8b": _llama_3(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _llama_3(8192, 28672, 80, 64, 8),
    "llama-3.2-1b": _llama_3(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, **_SHARED),
    "mistral-7b-v0.1": _mistral(32000, sliding_window=4096, rope_theta=10000.0),
    "mistral-7b-v0.3": _mistral(32768, sliding_window=None, rope_theta=1000000.0),
    "mistral-nemo": _mistral(
        *(131072,), hidden_size=5120, num_hidden_layers=40, head_dim=128, sliding_window=None
    ),
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 8, 32000, 32768),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 8, 32768, 65536),
    "qwen2.5-0.5b": _qwen("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, **_SHARED),
    "qwen2.5-coder-1.5b": _qwen("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, **_SHARED),
    "qwen2.5-7b": _qwen("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, use_mrope=False),
    "qwen2.5-14b": _qwen("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072, rms_norm_eps=1e-5),
    "qwen2.5-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072, rms_norm_eps=1e-5),
    "deepseek-r1-distill-qwen-7b": _qwen(
        *("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072), rope_theta=10000, use_mrope=False
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, 151936, 40960, **_SHARED),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, 151936, 40960),
    "qwen3-4b-2507": _qwen3(2560, 9728, 36, 32, 8, 151936, 262144, rope_theta=5000000, **_SHARED),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 4, 151936, 40960),
    "qwen3-coder-30b-a3b": _qwen3_moe(
        *(2048, 5472, 48, 32, 4, 151936, 262144),
        qkv_bias=False,
        rope_theta=10000000,
        shared_expert_intermediate_size=0,
        use_qk_norm=True,
    ),
    "qwen3-235b-a22b": _qwen3_moe(
        *(4096, 12288, 94, 64, 4, 151936, 40960), moe_intermediate_size=1536
    ),
    "qwen3-next-80b-a3b": _sized(
        *("qwen3_next", 2048, 5120, 48, 16, 2, 151936, 262144),
        **_DELTA_NET,
        attention_bias=False,
        decoder_sparse_step=1,
        full_attention_interval=4,
        head_dim=256,
        hidden_act="silu",
        mlp_only_layers=[],
        moe_intermediate_size=512,
        norm_topk_prob=True,
        num_experts=512,
        num_experts_per_tok=10,
        output_router_logits=False,
        partial_rotary_factor=0.25,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=10000000,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
        use_sliding_window=False,
    ),
    "qwen3.5-27b": _qwen3_5(
        *("qwen3_5", 64),
        hidden_size=5120,
        intermediate_size=17408,
        linear_num_value_heads=48,
        num_attention_heads=24,
        num_key_value_heads=4,
    ),
    "qwen3.5-35b-a3b": _qwen3_5(
        *("qwen3_5_moe", 40),
        hidden_size=2048,
        moe_intermediate_size=512,
        num_attention_heads=16,
        num_experts=256,
        num_experts_per_tok=8,
        num_key_value_heads=2,
        shared_expert_intermediate_size=512,
    ),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8),
    "gemma-3-1b": _gemma(
        *("gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768), sliding_window=512, **_GEMMA_3
    ),
    "gemma-3-12b": _gemma3_images(
        dict(
            hidden_size=3840,
            intermediate_size=15360,
            num_attention_heads=16,
            num_hidden_layers=48,
            num_key_value_heads=8,
            rope_scaling=_LINEAR_8,
            sliding_window=1024,
            vocab_size=262144,
        )
    ),
    "gemma-3-27b": _gemma3_images(
        _gemma(
            *("gemma3_text", 5376, 21504, 62, 32, 16, 262144, 131072),
            head_dim=128,
            query_pre_attn_scalar=168,
            rope_scaling=_LINEAR_8,
            sliding_window=1024,
            **_GEMMA_3,
        )
    ),
    "gemma-4-e2b": _gemma4(
        *(1536, 6144, 35, 8, 1),
        attention_k_eq_v=False,
        hidden_size_per_layer_input=256,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        max_position_embeddings=131072,
        num_global_key_value_heads=None,
        num_kv_shared_layers=20,
        sliding_window=512,
        use_bidirectional_attention=None,
        use_double_wide_mlp=True,
    ),
    "gemma-4-e4b": _gemma4(
        *(2560, 10240, 42, 8, 2),
        attention_k_eq_v=False,
        hidden_size_per_layer_input=256,
        max_position_embeddings=131072,
        num_global_key_value_heads=None,
        num_kv_shared_layers=18,
        sliding_window=512,
        use_bidirectional_attention=None,
    ),
    "gemma-4-12b": _gemma4_unified(3840, 15360, 48, 16, 8, num_global_key_value_heads=1),
    "gemma-4-26b-a4b": _gemma4(
        *(2816, 2112, 30, 16, 8),
        enable_moe_block=True,
        moe_intermediate_size=704,
        num_experts=128,
        num_global_key_value_heads=2,
        top_k_experts=8,
    ),
    "gemma-4-31b": _gemma4(5376, 21504, 60, 32, 16, num_global_key_value_heads=4),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "smollm3-3b": _smollm3(2048, 11008, 36, 16, 4, 128256, 65536, rope_theta=5000000.0),
    "olmo-2-1b": _olmo("olmo2", 2048, 8192, 16, 16, 16, 100352, 4096),
    "olmo-2-7b": _olmo("olmo2", 4096, 11008, 32, 32, 32, 100352, 4096),
    "olmo-2-13b": _olmo("olmo2", 5120, 13824, 40, 40, 40, 100352, 4096),
    "olmo-2-32b": _olmo("olmo2", 5120, 27648, 64, 40, 8, 100352, 4096),
    "olmo-3-7b": _olmo3(4096, 11008, 32, 32, 32),
    "olmo-3-32b": _olmo3(5120, 27648, 64, 40, 8),
    "granite-3.3-2b": _granite(
        *(2048, 8192, 40, 32, 8, 49159, 131072),
        attention_multiplier=0.015625,
        logits_scaling=8.0,
        rope_theta=10000000.0,
    ),
    "granite-3.3-8b": _granite(
        *(4096, 12800, 40, 32, 8, 49159, 131072),
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
        rope_theta=10000000.0,
    ),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32, output_projection=True),
    "gpt2": _gpt2("gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("gpt2", 1024, 24, 16, n_special=0, predict_special_tokens=True),
    "distilgpt2": _gpt2("gpt2", 768, 6, 12, _num_labels=1, output_past=True),
    "falcon-7b": _falcon(4544, 32, 71),
    "falcon-40b": _falcon(8192, 60, 128, new_decoder_architecture=True, num_kv_heads=8),
    "falcon-rw-1b": _falcon(
        *(2048, 24, 32),
        alibi=True,
        bias=True,
        multi_query=False,
        parallel_attn=False,
        vocab_size=50304,
    ),
    "falcon-11b": _falcon(
        *(4096, 60, 32),
        ff_factor=4,
        ffn_hidden_size=16384,
        max_position_embeddings=8192,
        new_decoder_architecture=True,
        num_kv_heads=8,
        num_ln_in_parallel_attn=1,
        rope_theta=5000042,
    ),
    "mpt-7b": _mpt(4096, 32, 32, 2048),
    "mpt-7b-8k": _mpt(4096, 32, 32, 8192, clip_qkv=6),
    "mpt-30b": _mpt(7168, 48, 64, 8192),
    "starcoder": _starcoder(6144, 40, 48, 8192),
    "tiny_starcoder_py": _starcoder(768, 20, 12, 8192, n_inner=3072),
    "starcoder2-3b": _starcoder2(3072, 12288, 30, 24, 2, rope_theta=999999.4420358813),
    "starcoder2-7b": _starcoder2(4608, 18432, 32, 36, 4, rope_theta=1000000),
    "phi-3-mini": _phi3(3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047),
    "phi-3.5-mini": _phi3(3072, 8192, 32, 32, 32, 32064, 131072, rope_scaling=_LONGROPE),
    "phi-4": _phi3(5120, 17920, 40, 40, 10, 100352, 16384, rope_theta=250000, sliding_window=None),
    "phi-4-mini": _phi3(
        *(3072, 8192, 32, 24, 8, 200064, 131072),
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        mlp_bias=False,
        partial_rotary_factor=0.75,
        rope_scaling=_LONGROPE,
        **_SHARED,
    ),
}

# A model, and one setting that changes its result and is not supported.
REFUSED = [
    ("llama-2-7b", {"hidden_act": "gelu"}),
    ("llama-2-7b", {"is_causal": False}),
    ("llama-2-7b", {"layer_types": ["full_attention", "sliding_attention"] * 16}),
    ("llama-2-7b", {"partial_rotary_factor": 0.5}),
    ("llama-2-7b", {"per_layer_config": {"3": {"num_key_value_heads": 8}}}),
    ("llama-2-7b", {"quantization_config": {"bits": 4}}),
    ("llama-2-7b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("llama-2-7b", {"sliding_window": 1024}),
    ("mistral-7b-v0.1", {"layer_types": ["sliding_attention", "full_attention"] * 16}),
    ("mixtral-8x7b", {"attention_chunk_size": 1024}),
    ("qwen2.5-7b", {"layer_types": ["linear_attention"] * 28}),
    ("qwen3-8b", {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e6}}),
    ("qwen3-30b-a3b", {"decoder_sparse_step": 2}),
    ("qwen3-30b-a3b", {"mlp_only_layers": [0]}),
    ("qwen3-next-80b-a3b", {"mlp_only_layers": [0]}),
    ("qwen3-next-80b-a3b", {"layer_types": ["sliding_attention"] * 48}),
    ("qwen3.5-27b", {"attn_output_gate": False}),
    ("qwen3.5-35b-a3b", {"attn_output_gate": False}),
    ("gemma-2-9b", {"use_bidirectional_attention": True}),
    ("gemma-3-1b", {"attn_logit_softcapping": 50.0}),
    ("gemma-3-1b", {"use_bidirectional_attention": True}),
    ("gpt-oss-20b", {"swiglu_alpha": 1.0}),
    ("smollm3-3b", {"use_sliding_window": True}),
    ("smollm3-3b", {"no_rope_layers": [1, 0]}),
    ("olmo-2-1b", {"sliding_window": 4096}),
    ("olmo-3-7b", {"hidden_act": "gelu"}),
    ("granite-3.3-2b", {"partial_rotary_factor": 0.5}),
    ("opt-125m", {"activation_function": "gelu"}),
    ("opt-125m", {"layer_norm_elementwise_affine": False}),
    ("gpt2", {"add_cross_attention": True}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("falcon-7b", {"num_ln_in_parallel_attn": 2}),
    ("mpt-7b", {"logit_scale": "inv_sqrt_d_model"}),
    ("mpt-7b", {"no_bias": False}),
    ("mpt-7b", {"attn_config": {"softmax_scale": 0.1}}),
    ("starcoder", {"scale_attn_weights": False}),
    ("starcoder2-3b", {"rope_scaling": {"type": "longrope", "factor": 2.0}}),
    ("phi-3-mini", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
]
