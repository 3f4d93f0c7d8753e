"""GGUF files of the families with fused or transposed tensors, made from the golden models."""

import dataclasses
import functools
import re

import flax.traverse_util
import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import models
from models.gguf import files
from models.gguf import metadata as gguf_metadata
from models.gguf.files import read_gguf, write_directory
from models.gguf.tensors import MappedTensors
from models.hf_config import read_config
from pallas_kernels.cpu import build
from tests import gguf_cases
from tests.models.conftest import GOLDEN
from tests.models.test_gguf import dense_params
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
GEMMA = {
    **LLAMA,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
}
GEMMA_4 = {
    **GEMMA,
    "mlp.down_proj": "ffn_down",
    "router.proj": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
SMOLLM = {
    **LLAMA,
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
}
GPT_OSS = {
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
MIXTRAL_SETTINGS = {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1000000.0}
ALIBI = {"attention.max_alibi_bias": 8.0}


def gemma_4_metadata(config):
    """Returns the metadata of a model of Gemma 4."""
    slides = [layer not in config.full_layers for layer in range(config.num_layers)]
    shared = config.num_layers - config.shared_kv_layers
    dense = config.shared_expert_size or config.intermediate_size
    full, kv_heads = config.full_head_dim or config.head_dim, config.num_kv_heads
    metadata = {
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": config.shared_kv_layers,
        "embedding_length_per_layer_input": config.layer_input_size or 0,
        "final_logit_softcapping": config.logits_softcap,
        "rope.freq_base": config.rope.theta,
        "rope.freq_base_swa": config.window_positions.theta,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config.head_dim,
        "feed_forward_length": [
            dense * (1 + (config.double_shared_mlp and layer >= shared))
            for layer in range(config.num_layers)
        ],
    }
    if config.full_kv_heads is not None:
        heads = [kv_heads if slide else config.full_kv_heads for slide in slides]
        metadata["attention.head_count_kv"] = heads
    if config.num_experts is not None:
        metadata |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.intermediate_size,
        }
    return metadata


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
    "gemma2": (
        "gemma2",
        GEMMA,
        {
            "attention.key_length": 8,
            "attention.value_length": 8,
            "attention.sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3",
        GEMMA,
        {
            "attention.key_length": 8,
            "attention.sliding_window": 5,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1000.0,
            "rope.freq_base_swa": 50.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    "smollm3": ("smollm3", SMOLLM, {"rope.freq_base": 100.0}),
    "olmo2": ("olmo2", GEMMA, {"rope.freq_base": 10000.0}),
    "granite": (
        "granite",
        SMOLLM,
        {
            "attention.scale": 0.25,
            "embedding_scale": 3.0,
            "residual_scale": 0.6,
            "logit_scale": 4.0,
            "rope.dimension_count": 4,
        },
    ),
    "gpt_oss": (
        "gpt-oss",
        GPT_OSS,
        {
            "attention.key_length": 8,
            "attention.sliding_window": 6,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
            "rope.freq_base": 100.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.yarn_beta_fast": 2.0,
            "rope.scaling.original_context_length": 8,
        },
    ),
}
GEMMA_4_CASES = ("gemma4", "gemma4_shared", "gemma4_experts", "gemma4_unified")
CASES |= {case: ("gemma4", GEMMA_4, {}) for case in GEMMA_4_CASES}
# Fields of the golden model that a file cannot express.
LOST = {"gemma2": {"query_scale": None}, "gemma3": {"query_scale": None}}
LOST["gemma4_unified"] = {"family": "gemma4_text"}  # which computes the same
EXPERT = re.compile(r"(.*)experts\.(\d+)\.(.*)")
# Tensors to whose names llama.cpp's converter adds ".weight".
UNSUFFIXED = re.compile(r"\.(sinks|layer_scalar)$|\d\.experts\.(gate_up|down)_proj$")


# gpt-oss with rows of blocks of 32.
WIDE = {"hidden_size": 64, "intermediate_size": 32}
WIDE_SETTINGS = {"expert_feed_forward_length": 32}


def write(path, case, folder=None, mxfp4=None, matrices="F32", unread=None, **changes):
    """Writes a golden model as llama.cpp's convert_hf_to_gguf.py does.

    Args:
      path: of the file.
      case: of `CASES`.
      folder: another directory with a model of this kind.
      mxfp4: bytes instead of values of some tensors.
      matrices: their type.
      unread: other tensors.
      **changes: of the metadata.
    """
    architecture, names, metadata = CASES[case]
    folder, mxfp4 = folder or GOLDEN / case, mxfp4 or {}
    config = models.load_config(folder)
    kind = "" if config.norm == "layer" else "rms_"
    metadata = {
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        f"attention.layer_norm_{kind}epsilon": config.norm_eps,
        **metadata,
        **(gemma_4_metadata(config) if architecture == "gemma4" else {}),
        **changes,
    }
    metadata = {f"{architecture}.{name}": value for name, value in metadata.items()}
    tensors = {}
    if architecture == "gemma4":
        size = config.full_head_dim or config.head_dim
        rotated = int(config.rope.partial_rotary_factor * size / 2)
        divisors = np.where(np.arange(size // 2) < rotated, 1, 1e30)
        tensors["rope_freqs.weight"] = divisors.astype(np.float32), "F32"
    for name, values in _with_experts_stacked(folder, case).items():
        if config.norm == "rms_plus_one" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        stem, _, suffix = name.rpartition(".")
        block = re.fullmatch(r".*\.(?:h|layers|blocks)\.(\d+)\.(.*)", stem)
        stem = f"blk.{block[1]}.{names[block[2]]}" if block else names[stem]
        if (
            case in ("mixtral", "smollm3", "granite")
            and block
            and stem.endswith(("attn_q", "attn_k"))
        ):
            heads = config.num_heads if stem.endswith("q") else config.num_kv_heads
            values = gguf_cases.permute(values, heads)
        if architecture == "gpt2" and block and values.ndim == 2:
            values = values.T
        if architecture == "falcon" and "attn_qkv" in stem:
            shape = config.num_kv_heads, -1, config.head_dim, config.hidden_size
            qkv = values.reshape(shape)
            parts = qkv[:, :-2], qkv[:, -2:-1], qkv[:, -1:]
            values = np.concatenate([x.reshape(-1, config.hidden_size) for x in parts])
        values = np.ascontiguousarray(values)
        own = (values, matrices if values.ndim == 2 and suffix == "weight" else "F32")
        tensors[f"{stem}.{suffix}"] = (mxfp4[name], "MXFP4") if name in mxfp4 else own
    tensors |= unread or {}
    return gguf_cases.write(path, {"general.architecture": architecture, **metadata}, tensors)


def _with_experts_stacked(folder, case) -> dict[str, np.ndarray]:
    """Returns a model's tensors, those of all experts in one."""
    tensors, experts = {}, {}
    for name, values in load_file(folder / "model.safetensors").items():
        if UNSUFFIXED.search(name):
            tensors[f"{name}.weight"] = values
        elif name.endswith(".router.per_expert_scale"):
            tensors[name.replace("router.per_expert_scale", "experts.down_proj.scale")] = values
        elif ".mlp.experts." in name and case == "gpt_oss":
            tensors |= _gpt_oss_experts(name, values)
        elif match := EXPERT.fullmatch(name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = values
        else:
            tensors[name] = values
    return tensors | {n: np.stack([x[i] for i in sorted(x)]) for n, x in experts.items()}


def _gpt_oss_experts(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Returns what GptOssModel.modify_tensors of llama.cpp's converter makes of a tensor."""
    stem = name.removesuffix("_bias")
    suffix = "bias" if stem != name else "weight"
    values = values if suffix == "bias" else values.swapaxes(1, 2)
    if "gate_up" not in stem:
        return {f"{stem}.{suffix}": values}
    parts = (("gate", values[:, ::2]), ("up", values[:, 1::2]))
    return {f"{stem.replace('gate_up', part)}.{suffix}": x for part, x in parts}


CHECKED = ("mixtral", "gpt2", "falcon_40b", "mpt_clip", "phi3", "gemma3", "gpt_oss", "granite")
CHECKED += ("gemma4_experts",)


@pytest.mark.parametrize("case", quick(CASES, *CHECKED))
def test_a_file_of_a_golden_model_gives_the_golden_model(case, tmp_path):
    write_directory(read_gguf(write(tmp_path / "model.gguf", case)), tmp_path)
    found, expected = models.load_checkpoint(tmp_path), models.load_checkpoint(GOLDEN / case)
    assert found.config == dataclasses.replace(expected.config, **LOST.get(case, {}))
    shifted = expected.config.norm == "rms_plus_one"  # 1 + x rounds x
    same = functools.partial(np.allclose, rtol=0, atol=6e-8) if shifted else np.array_equal
    assert jax.tree.all(jax.tree.map(same, found.params, expected.params))


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
@pytest.mark.parametrize("case", ["gpt2", "falcon_40b", "phi3"])
def test_quantized_rows_of_a_family_are_those_of_its_parameters(case, tmp_path, random_params):
    """Rows of q, k and v, or of gate and up, in one tensor."""
    plain = tmp_path / "plain"
    config = dataclasses.replace(
        models.load_config(GOLDEN / case), hidden_size=64, intermediate_size=96, head_dim=16,
        num_heads=4, num_kv_heads=4 if case == "gpt2" else 2,
    )  # fmt: skip
    module = models.build(config)
    models.save_checkpoint(plain, module, random_params(module))
    sizes = {"rope.dimension_count": 16} if case == "phi3" else {}
    path = write(tmp_path / "model.gguf", case, plain, matrices="Q8_0", **sizes)
    write_directory(read_gguf(path), tmp_path)
    found, dense = (models.load_checkpoint(tmp_path, weights=w) for w in (None, "none"))
    kinds = dict(found.module.weights.texts)
    assert {f"layers_0/attention/{name}" for name in ("q", "k", "v", "out")} <= kinds.keys()
    right = flax.traverse_util.flatten_dict(dense.params["params"])
    for where, x in dense_params(found):
        np.testing.assert_array_equal(x.reshape(right[where].shape), right[where])


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_matrices_of_blocks_are_rounded_from_any_source(kind, tmp_path, random_params):
    """Those of a file or a directory, also rows of fused ones; the embedding stays as it is."""
    config = dataclasses.replace(
        models.load_config(GOLDEN / "phi3"), hidden_size=64, intermediate_size=96, head_dim=16,
        num_heads=4, num_kv_heads=2, vocab_size=48,
    )  # fmt: skip
    plain, module = tmp_path / "plain", models.build(config)
    models.save_checkpoint(plain, module, random_params(module))
    sizes = {"rope.dimension_count": 16}
    path = write(tmp_path / "m.gguf", "phi3", plain, matrices=kind, **sizes)
    write_directory(read_gguf(path), tmp_path)
    for folder in (tmp_path, plain):
        found = models.load_checkpoint(folder, weights="Q4_0")
        dense = models.load_checkpoint(folder, weights="none").params["params"]
        types = dict(found.module.weights.texts)
        assert types.get("embedding") == ("Q8_0" if (kind, folder) == ("Q8_0", tmp_path) else None)
        blocks = {where: t for where, t in types.items() if where.startswith("layers_")}
        assert set(blocks.values()) == {"Q4_0"} and len(blocks) == 7 * config.num_layers
        right = flax.traverse_util.flatten_dict(dense)
        q4 = gguf.GGMLQuantizationType.Q4_0
        for where, x in dense_params(found):
            wide = np.asarray(right[where], np.float32)
            if where[0].startswith("layers_") and types.get("/".join(where[:-1])):
                rows = wide.reshape(-1, 64 if x.shape[-1] in (16, 64) else 96)
                wide = gguf.dequantize(gguf.quantize(rows, q4), q4)
            np.testing.assert_array_equal(x.reshape(wide.shape), wide)


def test_types_of_files_are_for_the_kernels_alone(tmp_path, random_params, tiny):
    models.save_checkpoint(tmp_path / "m", tiny[0], random_params(tiny[0]))
    for options in (dict(packed=False), dict(lazy_blocks=True)):
        with pytest.raises(
            ValueError, match="weights='Q4_0' needs a dense model in files, float32"
        ):
            models.load_checkpoint(tmp_path / "m", weights="Q4_0", **options)


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
def test_a_matrix_that_does_not_fit_a_type_is_refused(tmp_path, random_params, tiny):
    models.save_checkpoint(tmp_path / "m", tiny[0], random_params(tiny[0]))
    message = (
        "layers_0/attention/q has 8 outputs and 8 inputs, which must be multiples of 16 and 32"
    )
    with pytest.raises(ValueError, match=message):
        models.load_checkpoint(tmp_path / "m", weights="Q4_0")


def test_settings_may_be_repeated_for_each_layer(tmp_path):
    config = models.load_config(GOLDEN / "gemma3")
    layers = range(config.num_layers)
    changes = {
        "attention.head_count_kv": [config.num_kv_heads for _ in layers],
        "feed_forward_length": [config.intermediate_size for _ in layers],
        "attention.sliding_window_pattern": [layer in config.full_layers for layer in layers],
    }
    found = read_gguf(write(tmp_path / "model.gguf", "gemma3", **changes)).config
    assert found.full_layers == tuple(x for x in layers if x not in config.full_layers)
    expected = dataclasses.replace(config, **LOST["gemma3"], full_layers=found.full_layers)
    assert found == expected
    changes["attention.head_count_kv"][-1] += 1
    message = r"attention\.head_count_kv=\[.*\] is not supported: it must be the same for all"
    with pytest.raises(ValueError, match=message):
        read_gguf(write(tmp_path / "other.gguf", "gemma3", **changes))


def test_keys_of_layers_that_read_those_of_another_one_may_be_in_a_file(tmp_path):
    """As in the files of Gemma 4 E2B and E4B, also as Hugging Face has them."""
    last = models.load_config(GOLDEN / "gemma4_shared").num_layers - 1
    zeros = np.zeros((32, 16), np.float32)
    unread = {f"blk.{last}.attn_{part}.weight": zeros for part in "kv"}
    unread |= {f"blk.{last}.attn_k_norm.weight": zeros[:, 0]}
    found = read_gguf(write(tmp_path / "model.gguf", "gemma4_shared", unread=unread)).config
    assert found == models.load_config(GOLDEN / "gemma4_shared")
    other = {f"blk.{last}.attn_v_norm.weight": zeros[0]}
    with pytest.raises(ValueError, match=f"unexpected blk.{last}.attn_v_norm.weight"):
        read_gguf(write(tmp_path / "other.gguf", "gemma4_shared", unread=other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.freq_base_swa": None}, "gemma4.rope.freq_base_swa is missing"),
        ({"attention.value_length": 8}, "gemma4.attention.value_length=8 is not supported"),
    ],
)
def test_settings_of_gemma_4_that_are_not_supported_are_errors(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_gguf(write(tmp_path / "model.gguf", "gemma4", **changes))


def test_a_file_of_gemma_2_without_a_window_has_that_of_llama_cpp():
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "hidden_size": 32, "num_layers": 2}
    raw = gguf_metadata._family_keys("gemma2", fields, {}, {})
    assert raw["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("layers", "scale"), [(7, None), (62, pytest.approx(8**-0.5))], ids=["4b", "27b"]
)
def test_defaults_of_gemma_3_are_those_of_llama_cpp(layers, scale):
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "hidden_size": 32}
    fields |= {"num_layers": layers, "vocab_size": 10, "intermediate_size": 8}
    raw = gguf_metadata._family_keys("gemma3_text", fields, {"attention.sliding_window": 4}, {})
    config = read_config({"model_type": "gemma3_text", "rope_theta": 1e6, **raw})
    assert config.full_layers == tuple(range(5, layers, 6))
    assert config.window_positions == models.Rope(theta=10000.0)
    assert config.query_scale == scale


def test_experts_in_mxfp4_stay_quantized(tmp_path, random_params):
    config = dataclasses.replace(models.load_config(GOLDEN / "gpt_oss"), **WIDE)
    module, draw = models.build(config), np.random.default_rng(0)
    plain, converted = tmp_path / "plain", tmp_path / "converted"
    models.save_checkpoint(plain, module, random_params(module))
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name in (name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))):
        for part, values in _gpt_oss_experts(name, tensors[name]).items():
            codes = draw.integers(0, 16, values.shape).reshape(*values.shape[:2], -1, 2, 16)
            exponents = draw.integers(118, 126, codes.shape[:3])[..., None]
            halves = codes[..., 0, :] | codes[..., 1, :] << 4
            octets = np.concatenate([exponents, halves], -1).astype(np.uint8)
            stored[part] = octets.reshape(*values.shape[:2], -1)
    path = write(tmp_path / "model.gguf", "gpt_oss", plain, stored, **WIDE_SETTINGS)
    converted.mkdir()
    write_directory(read_gguf(path), converted)
    raw = MappedTensors(files.weights_of(converted, config))
    gate = raw["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert gate.shape == (4, 64, 2, 16) and gate.dtype == np.uint8
    found = models.load_checkpoint(converted, weights="none")
    for part, octets in stored.items():
        _, _, layer, _, _, name, _ = part.split(".")
        values = gguf.dequantize(octets, gguf.GGMLQuantizationType.MXFP4)
        parameter = found.params["params"][f"layers_{layer}"]["mlp"][name.removesuffix("_proj")]
        np.testing.assert_array_equal(parameter["weight"], values)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mpt", {"attention.max_alibi_bias": 0.0}, "max_alibi_bias=0.0 is not supported"),
        ("mpt", {"attention.head_count_kv": 2}, "head_count_kv=2 with heads of size 2"),
        ("gpt2", {"rope.scaling.factor": 2.0}, "gpt2.rope.scaling.factor=2.0 is not supported"),
        ("olmo2", {"attention.sliding_window": 6}, "sliding_window=6 .OLMo 3. is not supported"),
        ("granite", {"rope.scaling.finetuned": False}, "no rotary positions. is not supported"),
    ],
)
def test_settings_of_a_family_that_are_not_supported_are_errors(case, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_gguf(write(tmp_path / "model.gguf", case, **changes))
