"""Checkpoints survive a bit-exact round trip, and errors name what is wrong."""

import dataclasses
import json
import os
import re

import flax.linen as nn
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import magicjax
import models
from models import huggingface
from tests.models.conftest import GOLDEN


def assert_identical(found, expected):
    """The same tree, dtypes and bits; NaN equals itself."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def assert_same(found, right):
    """The same module and parameters, so the same logits."""
    assert found.module == right.module
    assert_identical(found.params, right.params)


def edit_json(path, **changes):
    raw = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            del raw[key]
        else:
            raw[key] = value
    path.write_text(json.dumps(raw))


def edit_tensors(folder, change):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def saved(tiny, tmp_path):
    """The directory of the tiny model."""
    models.save_checkpoint(tmp_path / "model", *tiny)
    return tmp_path / "model"


# Round trips


@pytest.mark.parametrize(("dtype", "shard"), [("float32", 3000), ("bfloat16", 10**9)])
def test_a_round_trip_is_exact_to_the_bit(golden, tmp_path, dtype, shard):
    first = models.load_checkpoint(golden, dtype)
    models.save_checkpoint(tmp_path / "x", first.module, first.params, max_shard_bytes=shard)
    assert (tmp_path / "x" / huggingface.INDEX).exists() == (shard == 3000)
    second = models.load_checkpoint(tmp_path / "x")
    assert second.module == first.module
    assert_identical(second.params, first.params)


def test_written_tensors_equal_those_that_were_read(golden, tmp_path):
    """Includes names and shapes: a round trip with consistent mistakes would also be exact."""
    checkpoint = models.load_checkpoint(golden)
    models.save_checkpoint(tmp_path / "x", checkpoint.module, checkpoint.params)
    theirs = {}
    for file in golden.glob("*.safetensors"):
        theirs |= safetensors.numpy.load_file(file)
    ours = safetensors.numpy.load_file(tmp_path / "x" / "model.safetensors")
    assert_identical(ours, theirs)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_decoder_of_a_model_that_reads_images(prefix, tmp_path):
    tensors = safetensors.numpy.load_file(GOLDEN / "gemma3" / "model.safetensors")
    named = {prefix + name.removeprefix("model."): values for name, values in tensors.items()}
    images = ("vision_tower.layers.0.weight", "multi_modal_projector.weight")
    named |= {name: np.zeros(3, np.float32) for name in images}
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    raw |= {"eos_token_id": [1, 7], "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"text_config": text}))
    found = models.load_checkpoint(tmp_path)
    expected = models.load_checkpoint(GOLDEN / "gemma3")
    assert (found.module, found.eos_token_ids) == (expected.module, (1, 7))
    assert_identical(found.params, expected.params)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="'gemma3' needs a text_config of model_type"):
        models.load_checkpoint(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_decoder_of_qwen3_5(family, tmp_path):
    """Tensors of images and of the drafter are not its own; those of all experts may be in two."""
    tensors = safetensors.numpy.load_file(GOLDEN / family / "model.safetensors")
    parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
    for layer in range(4 if family == "qwen3_5_moe" else 0):
        experts = f"model.layers.{layer}.mlp.experts"
        for fused, kinds in parts.items():
            matrices = [
                np.concatenate([tensors.pop(f"{experts}.{i}.{kind}_proj.weight") for kind in kinds])
                for i in range(5)
            ]
            tensors[f"{experts}.{fused}"] = np.stack(matrices)
    named = {f"model.language_model.{n.removeprefix('model.')}": x for n, x in tensors.items()}
    named["lm_head.weight"] = named.pop("model.language_model.lm_head.weight")
    others = ("model.visual.merger.weight", "mtp.layers.0.mlp.gate.weight", "mtp.fc.weight")
    named |= {name: np.zeros(3, np.float32) for name in others}
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    text = json.loads((GOLDEN / family / "config.json").read_text())
    raw = {"model_type": family, "vision_config": {"hidden_size": 8}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found, expected = map(models.load_checkpoint, (tmp_path, GOLDEN / family))
    assert found.module == expected.module
    assert_identical(found.params, expected.params)


def test_special_values_and_boxed_parameters_survive(tiny, tmp_path):
    module, params = tiny
    odd = np.array([np.nan, -0.0, np.inf, 1e-45] + [1.0] * 4, np.float32)
    params["params"]["norm"]["scale"] = odd
    boxed = jax.tree.map(lambda leaf: nn.LogicallyPartitioned(leaf, (None,) * leaf.ndim), params)
    models.save_checkpoint(tmp_path / "x", module, boxed)
    assert_identical(models.load_checkpoint(tmp_path / "x").params, params)


def test_a_model_is_independent_of_its_file(saved, tiny):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loaded = [models.load_checkpoint(saved, sharding_of=p) for p in (None, lambda axes: one)]
    file = saved / "model.safetensors"
    with open(file, "r+b") as stream:
        stream.write(b"\0" * file.stat().st_size)
    for checkpoint in loaded:
        assert_identical(checkpoint.params, tiny[1])


def test_bfloat16_converts_parameters_and_activations(saved, tiny):
    checkpoint = models.load_checkpoint(saved, "bfloat16")
    assert checkpoint.module.dtype == ml_dtypes.bfloat16
    expected = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), tiny[1])
    assert_identical(checkpoint.params, expected)


def test_float64_is_read_exactly_in_64_bit_mode(saved, tiny, float64):
    checkpoint = models.load_checkpoint(saved, "float64")
    expected = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tiny[1])
    assert_identical(checkpoint.params, expected)


def test_a_context_of_the_calling_thread_applies_to_all_parameters(saved):
    with jax.enable_x64(True):
        checkpoint = models.load_checkpoint(saved, "float64")
    assert {x.dtype.name for x in jax.tree.leaves(checkpoint.params)} == {"float64"}


def test_each_tensor_is_sharded_by_its_logical_axes(saved, tiny):
    seen = []

    def place(axes):
        seen.append(axes)
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    params = tiny[1]
    assert_identical(models.load_checkpoint(saved, sharding_of=place).params, params)
    assert ("embed", "heads", "head_dim") in seen
    assert len(seen) == len(jax.tree.leaves(params))


# Token ids and tokenizers


def test_generation_config_goes_before_config(saved):
    edit_json(saved / "config.json", eos_token_id=4, bos_token_id=1)
    edit_json(saved / "generation_config.json", eos_token_id=[4, 6], bos_token_id=None)
    found = models.load_checkpoint(saved)
    assert (found.eos_token_ids, found.bos_token_id, found.pad_token_id) == ((4, 6), 1, None)


def test_token_ids_come_back_and_are_optional(tiny, tmp_path):
    path = tmp_path / "x"
    special = {"eos_token_ids": (3, 5), "bos_token_id": 1, "pad_token_id": 0}
    models.save_checkpoint(path, *tiny, **special)
    found = models.load_checkpoint(path)
    assert {name: getattr(found, name) for name in special} == special
    models.save_checkpoint(path, *tiny, eos_token_ids=[7], overwrite=True)
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == 7
    assert models.load_checkpoint(path).eos_token_ids == (7,)
    models.save_checkpoint(path, *tiny, overwrite=True)
    (path / "generation_config.json").unlink()
    found = models.load_checkpoint(path)
    assert (found.eos_token_ids, found.bos_token_id, found.pad_token_id) == ((), None, None)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_token_ids_of_a_wrong_type_are_errors(file, saved):
    several = "a token id, or an array of token ids"
    wrong = ("0", ["0"], {"a": 1}, 0.5, True, -1, [[1]])
    cases = [("eos_token_id", value, several) for value in wrong]
    cases += [(f"{kind}_token_id", [1], "a token id") for kind in ("bos", "pad")]
    for key, value, kind in cases:
        edit_json(saved / file, **{key: value})
        message = f"{saved / file} has {key}={json.dumps(value)}: it must be {kind}"
        for read in (models.load_checkpoint, models.special_tokens):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                read(saved)
        edit_json(saved / file, **{key: None})
    edit_json(saved / file, pad_token_id=-1)  # in files of LLaMA 1
    assert models.load_checkpoint(saved).pad_token_id == -1


def test_tokenizers_are_read_where_there_is_one(saved, tiny, tmp_path):
    import tokenizers
    import transformers

    assert models.load_tokenizer(saved) is None
    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>")
    plain = tokenizers.Tokenizer(words)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.save(str(saved / "tokenizer.json"))
    assert models.load_tokenizer(saved)("b a").input_ids == [2, 1]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="b")
    models.save_checkpoint(tmp_path / "x", *tiny, tokenizer=fast)
    found = models.load_tokenizer(tmp_path / "x")
    assert (found("b a").input_ids, found.eos_token_id) == ([2, 1], 2)


def test_damaged_tokenizers_are_errors_that_name_the_directory(saved):
    message = rf"the tokenizer in {saved} cannot be read .*: replace tokenizer.json and"
    for files in (
        {"tokenizer.json": '{"version"'},  # truncated
        {"tokenizer.json": "{}"},
        {"tokenizer_config.json": "{}"},  # alone
        {"tokenizer.json": "{", "tokenizer_config.json": "{}"},
    ):
        for name, content in files.items():
            (saved / name).write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            models.load_tokenizer(saved)
        assert "\n" not in str(error.value)
        for name in files:
            (saved / name).unlink()


# Harmless variations


@pytest.mark.parametrize("family", ["llama_tied", "opt_post_norm"])
def test_a_tied_matrix_may_be_stored_under_its_other_name(family, tmp_path, request):
    golden = request.path.parent / "golden" / family
    checkpoint = models.load_checkpoint(golden)
    models.save_checkpoint(tmp_path / "x", checkpoint.module, checkpoint.params)

    def rename(tensors):
        name = next(name for name in tensors if "embed_tokens" in name)
        tensors["lm_head.weight"] = tensors.pop(name)

    edit_tensors(tmp_path / "x", rename)
    assert_identical(models.load_checkpoint(tmp_path / "x").params, checkpoint.params)


@pytest.mark.parametrize("family", ["llama_tied", "opt_post_norm"])
def test_buffers_equal_output_matrices_and_missing_prefixes_are_harmless(family, tmp_path, request):
    golden = request.path.parent / "golden" / family
    checkpoint = models.load_checkpoint(golden)
    models.save_checkpoint(tmp_path / "x", checkpoint.module, checkpoint.params)
    prefix = models.FAMILIES[checkpoint.config.family].prefix

    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefix)]:
            tensors[name.removeprefix(prefix)] = tensors.pop(name)
        for buffer in ("inv_freq", "cos_cached", "sin_cached"):
            tensors[f"layers.0.self_attn.rotary_emb.{buffer}"] = np.ones(4, np.float32)
        for scale in ("kv_scale", "k_scale", "k_proj.k_scale", "v_proj.output_scale"):
            tensors[f"layers.0.self_attn.{scale}"] = np.ones(1, np.float32)
        tensors["lm_head.weight"] = np.asarray(checkpoint.params["params"]["embedding"]).copy()

    edit_tensors(tmp_path / "x", change)
    assert_identical(models.load_checkpoint(tmp_path / "x").params, checkpoint.params)


def test_a_tensor_is_read_from_the_file_that_the_index_names(tiny, tmp_path):
    path = tmp_path / "x"
    models.save_checkpoint(path, *tiny, max_shard_bytes=3000)
    index = json.loads((path / huggingface.INDEX).read_text())
    files = index["weight_map"]
    (first, one), (last, other) = (
        f(files.items(), key=lambda item: item[::-1]) for f in (min, max)
    )
    right = {file: safetensors.numpy.load_file(path / file) for file in (one, other)}
    for name, owner, file in ((first, one, other), (last, other, one)):
        stale = {name: np.zeros_like(right[owner][name])}
        safetensors.numpy.save_file(right[file] | stale, path / file)
    assert_identical(models.load_checkpoint(path).params, tiny[1])
    for file, tensors in right.items():
        safetensors.numpy.save_file(tensors, path / file)
    files[last] = one  # which does not have it
    edit_json(path / huggingface.INDEX, **index)
    assert_identical(models.load_checkpoint(path).params, tiny[1])


def test_json_files_may_begin_with_a_byte_order_mark(saved, tiny):
    for file in saved.glob("*.json"):
        file.write_text(file.read_text(), encoding="utf-8-sig")
    assert_identical(models.load_checkpoint(saved).params, tiny[1])


# Errors on reading

DAMAGED = {
    "a drafter": (
        lambda path: edit_tensors(path, lambda x: x.update({"fc.weight": np.zeros((8, 16))})),
        "/model: this is a drafter of kind EAGLE-1 or EAGLE-2, which reads the hidden states",
    ),
    "another tied matrix": (
        lambda path: edit_json(path / "config.json", tie_word_embeddings=True),
        r"lm_head\.weight differs from model\.embed",
    ),
    "no output matrix": (
        lambda path: edit_tensors(path, lambda x: x.pop("lm_head.weight")),
        r"missing lm_head\.weight",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        r"has no weights: it must hold model\.safetensors",
    ),
    "no config": (lambda path: (path / "config.json").unlink(), r"config\.json does not exist"),
    "an adapter": (
        lambda path: (path / "config.json").rename(path / "adapter_config.json"),
        r"model has a LoRA adapter \(adapter_config\.json\).*: merge it into its base model",
    ),
    "an adapter beside its base model": (
        lambda path: (path / "adapter_config.json").write_text("{}"),
        r"model has a LoRA adapter .*; if the weights are merged, remove adapter_config\.json",
    ),
    "an index without files": (
        lambda path: (path / huggingface.INDEX).write_text('{"metadata": {}}'),
        r"index\.json has no weight_map: download it again",
    ),
    "a file that is a number": (
        lambda path: (path / huggingface.INDEX).write_text('{"weight_map": {"x": 1}}'),
        r"index\.json has 1 as the file of x: download it again",
    ),
    "a truncated config": (
        lambda path: (path / "config.json").write_text('{"model_type"'),
        r"config\.json is not valid JSON .*: download it again",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_directory_is_an_error_that_names_the_damage(case, saved):
    damage, message = DAMAGED[case]
    damage(saved)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        models.load_checkpoint(saved)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "model.gguf"]
)
def test_the_pointers_of_git_lfs_are_errors_that_name_them(name, saved):
    file = saved / name
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    read = {"tokenizer.json": models.load_tokenizer, "model.gguf": lambda _: magicjax.load(file)}
    with pytest.raises(ValueError, match=rf"{file} is a pointer of Git LFS.*`git lfs pull`"):
        read.get(name, models.load_checkpoint)(saved)


def test_dtypes_that_cannot_be_read_are_errors(saved):
    for dtype, message in (
        ("float64", "dtype=float64 needs 64-bit mode"),
        ("int8", "dtype=int8 is not supported: it must be one of float16"),
    ):
        with pytest.raises(ValueError, match=message):
            models.load_checkpoint(saved, dtype)

    edit_tensors(saved, lambda x: x.update({n: v.astype(np.float64) for n, v in x.items()}))
    for read in (models.load_checkpoint, models.stored_dtype):
        with pytest.raises(ValueError, match="weights in float64.*: pass dtype='float32'$"):
            read(saved)
    with jax.enable_x64(True):
        assert models.load_checkpoint(saved).module.dtype == np.float64
    edit_tensors(saved, lambda x: x.update({n: v.astype(np.float32) for n, v in x.items()}))

    def narrow(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)

    edit_tensors(saved, narrow)
    edit_json(saved / "config.json", torch_dtype=...)
    with pytest.raises(ValueError, match=r"several dtypes \(F16, F32\).*pass dtype"):
        models.load_checkpoint(saved)
    assert models.load_checkpoint(saved, "float32").module.dtype == np.float32
    for key, dtype, name in (
        ("torch_dtype", "float16", "float16"),
        ("dtype", "bfloat16", "bfloat16"),
        ("dtype", "float16", "torch.float16"),
    ):
        edit_json(saved / "config.json", **{key: name})
        found = models.load_checkpoint(saved)
        assert found.module.dtype == models.stored_dtype(saved) == np.dtype(dtype)
        assert {x.dtype.name for x in jax.tree.leaves(found.params)} == {dtype}
    edit_json(saved / "config.json", dtype={"a": 1})
    with pytest.raises(ValueError, match=r"several dtypes \(F16, F32\).*pass dtype"):
        models.load_checkpoint(saved)


def test_all_mismatches_are_in_one_error(saved):
    def damage(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.extra.weight"] = np.ones(1, np.float32)
        tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((3, 8), np.float32)
        tensors["lm_head.weight"] = np.ones((19, 8), np.int8)

    edit_tensors(saved, damage)
    with pytest.raises(ValueError) as caught:
        models.load_checkpoint(saved)
    assert str(caught.value).splitlines() == [
        "the weights do not match config.json (4 problems):",
        "  missing model.norm.weight",
        "  unexpected model.layers.0.self_attn.extra.weight",
        "  lm_head.weight has dtype I8, supported: F16, BF16, F32, F64",
        "  model.layers.1.mlp.up_proj.weight has shape (3, 8), expected (12, 8)",
    ]


def test_a_few_of_many_mismatches_are_in_the_error(saved):
    def damage(tensors):
        for name in [name for name in tensors if ".layers.0." in name]:
            tensors[name.replace(".0.", ".7.")] = tensors.pop(name)

    edit_tensors(saved, damage)
    with pytest.raises(ValueError) as caught:
        models.load_checkpoint(saved)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the weights do not match config.json (32 problems):"
    assert (lines[6], lines[12:]) == ("  and 11 more missing", ["  and 11 more unexpected"])
    assert all("  missing model.layers.0." in line for line in lines[1:6])
    assert all("  unexpected model.layers.7." in line for line in lines[7:12])


@pytest.mark.parametrize("prefix", ["base_model.model.", "module."])
def test_a_prefix_of_all_names_is_in_the_error(prefix, saved, tiny):
    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    edit_tensors(saved, rename)
    with pytest.raises(
        ValueError, match=rf"problems\); the files' names begin with '{prefix}': save the tensors"
    ):
        models.load_checkpoint(saved)
    edit_tensors(
        saved,
        lambda x: [x.update({n.removeprefix(prefix): x.pop(n)}) for n in list(x)],
    )
    assert_identical(models.load_checkpoint(saved).params, tiny[1])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(saved, name):
    (saved / "model.safetensors").rename(saved / name)
    with pytest.raises(
        ValueError, match=rf"only weights in pickle format \({name}\).*convert them to safetensors"
    ):
        models.load_checkpoint(saved)


def test_truncated_weights_are_an_error(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"not a complete safetensors file .*: download it again"):
        models.load_checkpoint(saved)


def test_a_missing_shard_is_an_error(tiny, tmp_path):
    models.save_checkpoint(tmp_path / "x", *tiny, max_shard_bytes=3000)
    os.remove(min((tmp_path / "x").glob("*.safetensors")))
    with pytest.raises(FileNotFoundError, match=r"files that do not exist: \['model-00001-of-"):
        models.load_checkpoint(tmp_path / "x")
    (tmp_path / "x" / huggingface.INDEX).unlink()
    message = "x has model-00002-of-.*, and model.safetensors.index.json does not exist.*download"
    with pytest.raises(FileNotFoundError, match=message):
        models.load_checkpoint(tmp_path / "x")


# Errors on writing


def test_an_existing_directory_is_kept_without_overwrite(saved, tiny, random_params):
    module, params = tiny
    with pytest.raises(FileExistsError, match="exists: choose another path, or pass overwrite"):
        models.save_checkpoint(saved, module, params)
    other = random_params(module, 1)
    models.save_checkpoint(saved, module, other, overwrite=True)
    assert_identical(models.load_checkpoint(saved).params, other)
    assert [p.name for p in saved.parent.iterdir()] == ["model"]


def test_a_write_that_fails_leaves_the_old_directory_whole(saved, tiny, random_params):
    class Broken:
        def save_pretrained(self, path):
            raise OSError("disk full")

    module, params = tiny
    other = random_params(module, 1)
    with pytest.raises(OSError, match="disk full"):
        models.save_checkpoint(saved, module, other, tokenizer=Broken(), overwrite=True)
    assert_identical(models.load_checkpoint(saved).params, params)
    assert [p.name for p in saved.parent.iterdir()] == ["model"]


def test_parameters_of_another_module_are_an_error(tiny, tmp_path):
    module, params = tiny
    config = dataclasses.replace(module.config, num_layers=1, vocab_size=20, tie_embeddings=True)
    with pytest.raises(ValueError) as caught:
        models.save_checkpoint(tmp_path / "x", models.build(config), params)
    message = str(caught.value)
    assert "unexpected layers_1/mlp/up/weight" in message
    assert "unexpected unembedding" in message
    assert "embedding has shape (19, 8), expected (20, 8)" in message
    del params["params"]["norm"]
    with pytest.raises(ValueError, match="missing norm/scale"):
        models.save_checkpoint(tmp_path / "x", module, params)
    assert not list(tmp_path.iterdir())
