"""GGUF files of the families with fused or transposed tensors, made from the golden models."""

import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import models
from models.gguf.files import read_gguf, write_directory
from tests import gguf_cases
from tests.models.conftest import GOLDEN
from tests.quick import quick

GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "transformer.ln_f": "output_norm",
}
LLAMA = {
    "model.embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.down_proj": "ffn_down",
    "model.norm": "output_norm",
    "lm_head": "output",
}
MIXTRAL = {
    **LLAMA,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.w1": "ffn_gate_exps",
    "block_sparse_moe.w3": "ffn_up_exps",
    "block_sparse_moe.w2": "ffn_down_exps",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}
FALCON = {
    "transformer.word_embeddings": "token_embd",
    "input_layernorm": "attn_norm",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "transformer.ln_f": "output_norm",
}
MPT = {
    "transformer.wte": "token_embd",
    "norm_1": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm_2": "ffn_norm",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
    "transformer.norm_f": "output_norm",
}
MIXTRAL_SETTINGS = {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1000000.0}
ALIBI = {"attention.max_alibi_bias": 8.0}
# The golden model: architecture, names, and metadata beyond that of all architectures.
CASES = {
    "gpt2": ("gpt2", GPT2, {}),
    "starcoder": ("starcoder", GPT2, {}),
    "starcoder2": ("starcoder2", LLAMA, {"rope.freq_base": 10000.0}),
    "falcon_7b": ("falcon", FALCON, {}),
    "falcon_40b": ("falcon", FALCON, {}),
    "mpt": ("mpt", MPT, ALIBI),
    "mpt_clip": ("mpt", MPT, {**ALIBI, "attention.clamp_kqv": 0.5}),
    "phi3": (
        "phi3",
        LLAMA,
        {"rope.dimension_count": 4, "rope.scaling.original_context_length": 32},
    ),
    "mixtral": ("llama", MIXTRAL, MIXTRAL_SETTINGS),
    "qwen3_moe_normalized": (
        "qwen3moe",
        MIXTRAL,
        {
            "attention.key_length": 8,
            "expert_count": 5,
            "expert_used_count": 1,
            "expert_feed_forward_length": 12,
        },
    ),
}
EXPERT = re.compile(r"(.*)experts\.(\d+)\.(.*)")


def write(path, case, **changes):
    """Writes a golden model as llama.cpp's convert_hf_to_gguf.py does."""
    architecture, names, metadata = CASES[case]
    config = models.load_config(GOLDEN / case)
    kind = "rms_" if config.norm == "rms" else ""
    metadata = {
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        f"attention.layer_norm_{kind}epsilon": config.norm_eps,
        **metadata,
        **changes,
    }
    metadata = {f"{architecture}.{name}": value for name, value in metadata.items()}
    tensors = {}
    for name, values in _with_experts_stacked(case).items():
        stem, _, suffix = name.rpartition(".")
        block = re.fullmatch(r".*\.(?:h|layers|blocks)\.(\d+)\.(.*)", stem)
        stem = f"blk.{block[1]}.{names[block[2]]}" if block else names[stem]
        if case == "mixtral" and block and stem.endswith(("attn_q", "attn_k")):
            heads = config.num_heads if stem.endswith("q") else config.num_kv_heads
            values = gguf_cases.permute(values, heads)
        if architecture == "gpt2" and block and values.ndim == 2:
            values = values.T
        if architecture == "falcon" and "attn_qkv" in stem:
            shape = config.num_kv_heads, -1, config.head_dim, config.hidden_size
            qkv = values.reshape(shape)
            parts = qkv[:, :-2], qkv[:, -2:-1], qkv[:, -1:]
            values = np.concatenate([x.reshape(-1, config.hidden_size) for x in parts])
        tensors[f"{stem}.{suffix}"] = np.ascontiguousarray(values)
    return gguf_cases.write(path, {"general.architecture": architecture, **metadata}, tensors)


def _with_experts_stacked(case) -> dict[str, np.ndarray]:
    """Returns a golden model's tensors, those of all experts in one."""
    tensors, experts = {}, {}
    for name, values in load_file(GOLDEN / case / "model.safetensors").items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = values
        else:
            tensors[name] = values
    return tensors | {n: np.stack([x[i] for i in sorted(x)]) for n, x in experts.items()}


@pytest.mark.parametrize("case", quick(CASES, "mixtral", "gpt2", "falcon_40b", "mpt_clip", "phi3"))
def test_a_file_of_a_golden_model_gives_the_golden_model(case, tmp_path):
    write_directory(read_gguf(write(tmp_path / "model.gguf", case)), tmp_path)
    found, expected = models.load_checkpoint(tmp_path), models.load_checkpoint(GOLDEN / case)
    assert found.config == expected.config
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, expected.params))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mpt", {"attention.max_alibi_bias": 0.0}, "max_alibi_bias=0.0 is not supported"),
        ("mpt", {"attention.head_count_kv": 2}, "head_count_kv=2 with heads of size 2"),
        ("gpt2", {"rope.scaling.factor": 2.0}, "gpt2.rope.scaling.factor=2.0 is not supported"),
    ],
)
def test_settings_of_a_family_that_are_not_supported_are_errors(case, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_gguf(write(tmp_path / "model.gguf", case, **changes))
