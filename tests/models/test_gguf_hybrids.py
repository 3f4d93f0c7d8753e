"""GGUF files of models with gated delta nets, as llama.cpp's converter writes them."""

import functools
import json
import re
import shutil

import flax.traverse_util
import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import magicjax
import models
from models.gated_delta import DeltaNetShape, GatedDeltaNet
from models.gguf import files, tensor_mapping
from models.gguf.files import read_gguf, write_directory
from pallas_kernels.cpu import build
from tests import gguf_cases
from tests.models import mtp_reference
from tests.models.test_gguf import dense_params
from tests.models.test_quantized_checkpoints import gguf_bytes
from tests.quick import quick

Type = gguf.GGMLQuantizationType
FAMILIES = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}
EXPERT = re.compile(r"(.*)experts\.(\d+)\.(.*)")
BLOCK = re.compile(r"model\.layers\.(\d+)\.(.*)")
# What the converter does to the tensors of each architecture, besides names.
STEPS = {
    "qwen3next": ("one", "rate", "groups"),
    "qwen35": ("one", "rate", "rows", "columns"),
    "qwen35moe": ("one", "rate", "rows", "columns"),
}


def config_of(architecture, **changes):
    """Returns a config of which three value heads have one key head."""
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96 if architecture == "qwen35" else 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "max_positions": 128,
        "norm_eps": 1e-6,
        "positions": models.Rope(1000.0, partial_rotary_factor=0.5),
        "linear_layers": (0,),
        "delta_net": DeltaNetShape(2, 6, 32, 32, 4),
    }
    if architecture != "qwen35":
        sizes |= {"num_experts": 3, "experts_per_token": 2, "shared_expert_size": 64}
    return models.family_config(FAMILIES[architecture], **{**sizes, **changes})


def metadata_of(architecture, config, **changes):
    """Returns the metadata as llama.cpp's converter writes it."""
    s = config.delta_net
    metadata = {
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": int(config.head_dim * config.rope.partial_rotary_factor),
        "ssm.conv_kernel": s.conv_width,
        "ssm.state_size": s.key_dim,
        "ssm.group_count": s.key_heads,
        "ssm.time_step_rank": s.value_heads,
        "ssm.inner_size": s.value_heads * s.value_dim,
        "full_attention_interval": 2,
    }
    if config.num_experts is None:
        metadata["feed_forward_length"] = config.intermediate_size
    else:
        metadata |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_size,
        }
    if architecture != "qwen3next":
        metadata["rope.dimension_sections"] = [3, 3, 2, 0]
    metadata |= changes
    named = {f"{architecture}.{name}": value for name, value in metadata.items()}
    return {"general.architecture": architecture, **named}


def tiled(values, shape, axis=0, first=0):
    """Returns values whose heads were grouped by key head, as the converter reorders them."""
    values = np.moveaxis(values, axis, 0)
    heads = values[first:].reshape(shape.key_heads, -1, *values.shape[1:])
    per_key = shape.value_heads // shape.key_heads
    parts = [np.split(head, per_key) for head in heads]  # [key head][value head of it]
    order = [parts[i][j] for j in range(per_key) for i in range(shape.key_heads)]
    return np.moveaxis(np.concatenate([values[:first], *order]), 0, axis)


def converted(name, values, config, steps):
    """Returns the tensors of a file, by the names of `NAMES`, of a tensor of a model.

    Args:
      name: in Hugging Face format, in a block without the block's prefix.
      values: the tensor.
      config: of the model.
      steps: those of `STEPS` that are done.
    """
    s, is_delta_net = config.delta_net, name.startswith("linear_attn.")
    keys, reorders = 2 * s.key_heads * s.key_dim, "rows" in steps and is_delta_net
    stem, _, suffix = name.rpartition(".")
    if reorders and stem.endswith(("in_proj_qkv", "conv1d")):
        values = tiled(values, s, first=keys)
    elif reorders and (stem.endswith(("_z", "_a", "_b")) or suffix in ("A_log", "dt_bias")):
        values = tiled(values, s)
    elif "columns" in steps and stem.endswith("linear_attn.out_proj"):
        values = tiled(values, s, axis=1)
    if suffix == "A_log":
        return {"ssm_a": -np.exp(values) if "rate" in steps else values}
    if suffix == "dt_bias":
        return {"ssm_dt.bias": values}
    if stem.endswith("conv1d"):
        values = values.squeeze()
    if NAMES[stem].endswith("norm") and stem != "linear_attn.norm" and "one" in steps:
        values = values + np.float32(1)
    if stem.endswith("in_proj_qkvz") and "groups" in steps:
        sizes = np.array([s.key_dim, s.key_dim, *[s.value_heads // s.key_heads * s.value_dim] * 2])
        groups = values.reshape(s.key_heads, sizes.sum(), -1)
        q, k, v, z = (
            part.reshape(-1, values.shape[1]) for part in np.split(groups, sizes.cumsum()[:-1], 1)
        )
        return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}
    return {f"{NAMES[stem]}.{suffix}": values}


def write(
    path,
    folder,
    architecture,
    steps=None,
    types=None,
    head=None,
    out=None,
    tokenizer=None,
    **changes,
):
    """Writes the model of a directory as llama.cpp's converter does.

    Args:
      path: of the file.
      folder: the directory.
      architecture: of the file.
      steps: those of `STEPS` that are done; None: all.
      types: the type of each matrix, by the start of its name; F32 of others.
      head: tensors of a head for multi-token prediction, in Hugging Face format.
      out: the bytes of the output matrices of gated delta nets, in the order of the file.
      tokenizer: the metadata of a tokenizer.
      **changes: of the metadata.
    """
    config = models.load_config(folder)
    steps = STEPS[architecture] if steps is None else steps
    tensors, experts = {}, {}
    if head:
        count = config.num_layers
        changes |= {"block_count": count + 1, "nextn_predict_layers": 1}
        block = f"model.layers.{count}."
        head = {re.sub(r"^mtp\.(layers\.0\.)?", block, n): x for n, x in head.items()}
    for name, values in {**load_file(folder / "model.safetensors"), **(head or {})}.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}experts.{match[3]}", []).append(values)
        else:
            tensors[name] = values
    tensors |= {name: np.stack(parts) for name, parts in experts.items()}
    stored = {}
    for name, values in tensors.items():
        block = BLOCK.fullmatch(name)
        rest = block[2] if block else name
        for own, x in converted(rest, values, config, steps).items():
            kind = next((t for start, t in (types or {}).items() if own.startswith(start)), "F32")
            if own == "ffn_gate_inp_shexp.weight":
                x = x[0]  # llama.cpp drops axes of size 1
            if own == "ssm_out.weight" and out is not None:
                x = out
            full = f"blk.{block[1]}.{own}" if block else own
            stored[full] = np.ascontiguousarray(x), kind if x.ndim > 1 else "F32"
    metadata = metadata_of(architecture, config, **changes) | (tokenizer or {})
    return gguf_cases.write(path, metadata, stored)


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory):
    """Returns a function that returns the directory of a random model of an architecture."""
    from tests.models.conftest import random_params

    @functools.cache
    def of(architecture, **changes):
        folder = tmp_path_factory.mktemp("hybrids") / architecture
        module = models.build(config_of(architecture, **changes))
        models.save_checkpoint(folder, module, random_params(module))
        return folder

    return of


def read(path, folder):
    """Returns the directory of a file."""
    folder.mkdir()
    write_directory(read_gguf(path), folder)
    return folder


def flat_params(folder, **options):
    params = models.load_checkpoint(folder, **options).params["params"]
    return {path: np.asarray(x) for path, x in flax.traverse_util.flatten_dict(params).items()}


def differing(found, expected):
    """Returns the names of parameters that differ by more than the rounding of log and 1 + x."""
    assert found.keys() == expected.keys()
    return {
        "/".join(path[1:])
        for path, x in found.items()
        if not np.allclose(x, expected[path], rtol=0, atol=3e-7)
    }


@pytest.mark.parametrize("architecture", quick(FAMILIES, "qwen3next"))
def test_a_file_gives_the_model_of_its_directory(architecture, directory, tmp_path):
    folder = directory(architecture)
    path = write(tmp_path / "model.gguf", folder, architecture)
    out = read(path, tmp_path / "out")
    assert models.load_config(out) == models.load_config(folder)
    found, expected = flat_params(out, weights="none"), flat_params(folder)
    assert not differing(found, expected)
    exact = [x for x in found if x[-1] not in ("log_rate", "scale")]
    assert all(np.array_equal(found[x], expected[x]) for x in exact)


DELTA = {f"delta_net/{part}" for part in ("v/weight", "z/weight", "b/weight", "a/weight", "conv")}
DELTA |= {"delta_net/log_rate", "delta_net/step_bias"}
NORMS = {"attention_norm/scale", "mlp_norm/scale", "attention/q_norm/scale"}
CHANGED = {
    "one": {*NORMS, "attention/k_norm/scale", "scale"},
    "rows": DELTA,
    "columns": {"delta_net/out/weight"},
}


@pytest.mark.parametrize("step", quick(CHANGED, "rows"))
def test_without_a_step_of_the_converter_parameters_differ(step, directory, tmp_path):
    """Controls: each step changes its tensors, and no others."""
    folder = directory("qwen35")
    steps = [each for each in STEPS["qwen35"] if each != step]
    path = write(tmp_path / "model.gguf", folder, "qwen35", steps)
    found = flat_params(read(path, tmp_path / "out"), weights="none")
    assert differing(found, flat_params(folder)) == CHANGED[step]


@pytest.mark.slow
def test_a_file_with_other_rates_is_an_error(directory, tmp_path):
    path = write(tmp_path / "model.gguf", directory("qwen35"), "qwen35", ("one", "rows", "columns"))
    out = read(path, tmp_path / "out")
    with pytest.raises(ValueError, match="blk.0.ssm_a has values not below 0: llama.cpp writes"):
        models.load_checkpoint(out)


@pytest.mark.slow
def test_an_older_file_of_qwen3_next_has_one_tensor_of_groups(directory, tmp_path):
    folder = directory("qwen3next")
    path = write(tmp_path / "model.gguf", folder, "qwen3next", ("one", "rate"))
    assert not differing(
        flat_params(read(path, tmp_path / "out"), weights="none"), flat_params(folder)
    )


TYPES = {"attn_": "Q8_0", "ssm_out": "Q4_0", "ffn_": "Q4_1", "token_embd": "Q8_0"}
PACKED = {f"layers_0/delta_net/{part}": "Q8_0" for part in "qkvz"}
PACKED |= {"layers_0/delta_net/out": "Q4_0", "layers_1/attention/gate": "Q8_0"}


@pytest.mark.parametrize("architecture", quick(FAMILIES, "qwen35"))
def test_matrices_keep_the_types_of_the_file(architecture, directory, tmp_path):
    """Packed on a CPU without experts; integers with scales elsewhere, with the same values."""
    folder = directory(architecture)
    path = write(tmp_path / "model.gguf", folder, architecture, types=TYPES)
    out = read(path, tmp_path / "out")
    integers = models.load_checkpoint(out, packed=False)
    formats = dict(integers.module.weights.texts)
    assert formats["layers_0/delta_net/out"] == "int4:32"
    assert formats["layers_0/delta_net/z"] == "int8:32"
    right = flat_params(out, weights="none")
    q4 = gguf.GGMLQuantizationType.Q4_0
    of_hf = flat_params(folder)[("layers_0", "delta_net", "out", "weight")]
    # Columns of a head are whole blocks, so that the order of heads changes no rounding.
    rounded = gguf.dequantize(gguf.quantize(of_hf.reshape(len(of_hf), -1), q4), q4)
    np.testing.assert_array_equal(
        right[("layers_0", "delta_net", "out", "weight")].reshape(rounded.shape), rounded
    )
    if architecture != "qwen35" or not build.is_available():
        return
    packed = models.load_checkpoint(out)
    assert PACKED.items() <= dict(packed.module.weights.texts).items()
    for where, x in dense_params(packed):
        np.testing.assert_array_equal(x.reshape(right[where].shape), right[where])


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
def test_units_that_span_heads_keep_their_order(directory, tmp_path, monkeypatch):
    """Those of K quants have 256 inputs, and the heads here 32."""
    shape = DeltaNetShape(2, 8, 32, 32, 4)
    folder = directory("qwen35", delta_net=shape)
    blocks = gguf_bytes(Type.Q4_K, np.random.default_rng(0), 64, 256)
    types = {"ssm_out": "Q4_K", "ffn_": "Q8_0"}
    path = write(tmp_path / "model.gguf", folder, "qwen35", types=types, out=blocks)
    out = read(path, tmp_path / "out")
    dense, packed = models.load_checkpoint(out, weights="none"), models.load_checkpoint(out)
    name = "layers_0/delta_net/out"
    assert dict(packed.module.weights.texts)[name] == "Q4_K"
    weight = np.asarray(dense.params["params"]["layers_0"]["delta_net"]["out"]["weight"])
    weight = weight.reshape(64, -1)
    in_file = gguf.dequantize(blocks, Type.Q4_K)  # which rounds value * scale + minimum otherwise
    np.testing.assert_allclose(tiled(weight, shape, axis=1), in_file, rtol=2e-7)
    assert shape.has_tiles("Q4_K") and not shape.has_tiles("Q8_0") and not shape.has_tiles(None)
    attended = np.random.default_rng(1).normal(0, 1, (1, 3, 8, 32)).astype(np.float32)

    def outputs(checkpoint):
        own = checkpoint.module.weights.within("layers_0/delta_net")
        module = GatedDeltaNet(dense.config, np.float32, weights=own, backend="xla")
        params = {"params": checkpoint.params["params"]["layers_0"]["delta_net"]}
        return np.asarray(module.apply(params, x, lambda _: (attended, None))[0])

    x = np.random.default_rng(2).normal(0, 1, (1, 3, 64)).astype(np.float32)
    expected = outputs(dense)
    limit = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(outputs(packed), expected, rtol=0, atol=limit)
    monkeypatch.setattr(DeltaNetShape, "has_tiles", lambda *_: False)  # the control
    assert np.abs(outputs(packed) - expected).max() > 1000 * limit
    monkeypatch.undo()
    rounded = models.load_checkpoint(out, weights="Q8_0")  # from other units, in the usual order
    dense_out = dict(dense_params(rounded))[("layers_0", "delta_net", "out", "weight")]
    q8 = gguf.dequantize(gguf.quantize(weight, Type.Q8_0), Type.Q8_0)
    np.testing.assert_array_equal(dense_out, q8)
    # Without that order in the file, as in those of Qwen3-Next, the matrix is not packed.
    monkeypatch.setattr(tensor_mapping, "TILED_FAMILIES", ())
    files._indexed_weights.cache_clear()
    types = dict(models.matrix_formats(out).texts)
    assert name not in types and types["layers_0/mlp/up"] == "Q8_0"


@pytest.mark.parametrize("architecture", quick(FAMILIES, "qwen35"))
def test_a_head_for_multi_token_prediction_is_that_of_the_directory(
    architecture, directory, tmp_path
):
    plain = directory(architecture)
    raw = json.loads((plain / "config.json").read_text())
    head = mtp_reference.drawn(raw, 1)
    folder = tmp_path / "hf"
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors") | head
    save_file(tensors, folder / "model.safetensors")
    out = read(write(tmp_path / "m.gguf", plain, architecture, head=head), tmp_path / "out")
    assert models.load_config(out, mtp=True) == models.load_config(folder, mtp=True)
    for mtp in (True, False):
        found, expected = (flat_params(x, mtp=mtp, weights="none") for x in (out, folder))
        assert not differing(found, expected)
    without = read(write(tmp_path / "other.gguf", plain, architecture), tmp_path / "without")
    with pytest.raises(ValueError, match="has no head for multi-token prediction"):
        models.load_config(without, mtp=True)


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_a_head_of_a_file_is_not_quantized(activations, directory, tmp_path, monkeypatch):
    """Whether the matrices of its target are packed or integers with scales."""
    monkeypatch.setenv("MAGICJAX_CACHE", str(tmp_path / "cache"))
    plain = directory("qwen35")
    head = mtp_reference.drawn(json.loads((plain / "config.json").read_text()), 1)
    path = write(tmp_path / "m.gguf", plain, "qwen35", types=TYPES, head=head)
    target = magicjax.load(path, activations=activations)
    packed = activations == "int8" and build.is_available()
    assert target.weights and target.weights.is_packed == packed
    found = flax.traverse_util.flatten_dict(target.mtp_head().load().params["params"])
    right = flat_params(read(path, tmp_path / "out"), mtp=True)
    assert found.keys() == right.keys()
    for where, x in found.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, right[where])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.dimension_sections": [8, 0, 0, 0]}, r"dimension_sections=\[8, 0, 0, 0\] is not"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers=2 is not supported: at most 1"),
        ({"ssm.group_count": None}, "qwen35.ssm.group_count is missing"),
        ({"ssm.v_head_reordered": True}, "ssm.v_head_reordered=True is not supported"),
    ],
)
def test_settings_that_are_not_supported_are_errors(changes, message, directory, tmp_path):
    path = write(tmp_path / "model.gguf", directory("qwen35"), "qwen35", **changes)
    with pytest.raises(ValueError, match=message):
        read_gguf(path)
