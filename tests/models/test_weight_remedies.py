"""What an error about weights asks for is done word for word, and gives the right weights."""

import dataclasses
import json
import re
import shutil

import flax.traverse_util
import jax
import numpy as np
import pytest
import safetensors.numpy

import magicjax
import models
from magicjax import loading, sources
from models import huggingface, quantized_checkpoints
from pallas_kernels.cpu import build
from pallas_kernels.cpu.packed import ROUNDED
from tests import gguf_cases
from tests.magicjax import keywords
from tests.magicjax import tiny as tiny_models
from tests.models import quantized_layouts as layouts
from tests.models.conftest import GOLDEN, random_params
from tests.models.quantized_layouts import write_pair
from tests.models.test_huggingface import assert_identical, assert_same, edit_json, edit_tensors
from tests.models.test_quantized_checkpoints import converted
from tests.models.test_quantized_formats import same_weights
from tests.quick import quick

REMOVED = ...


# Directories


@pytest.fixture
def shards(tiny, tmp_path):
    """The directory of the tiny model in several files, twice: one to damage."""
    models.save_checkpoint(tmp_path / "whole", *tiny, max_shard_bytes=3000)
    return shutil.copytree(tmp_path / "whole", tmp_path / "model"), tmp_path / "whole"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json does not exist: a checkpoint directory must hold it"),
        ("config.json", b'{"model_type"', "is not valid JSON .*: download it again"),
        ("config.json", b"[1]", "has no settings, but a list: download it again"),
        ("model.safetensors.index.json", b"{}", "has no weight_map: download it again"),
        ("model-00002-*", None, r"do not exist: \['model-00002.*; download"),
        ("model-00002-*", b"1234567890", "not a complete .*: download it again"),
    ],
)
def test_a_file_that_is_there_again_is_read(name, content, message, shards):
    folder, whole = shards
    file = next(folder.glob(name))
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        models.load_checkpoint(folder)
    shutil.copy(whole / file.name, folder)
    assert_same(models.load_checkpoint(folder), models.load_checkpoint(whole))


def test_weights_of_another_name_are_read_by_the_one_that_the_error_names(tiny, tmp_path):
    models.save_checkpoint(tmp_path / "x", *tiny)
    file = tmp_path / "x" / "model.safetensors"
    right = models.load_checkpoint(tmp_path / "x")
    file.rename(tmp_path / "x" / "pytorch_model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"it must hold model\.safetensors or"):
        models.load_checkpoint(tmp_path / "x")
    (tmp_path / "x" / "pytorch_model.safetensors").rename(file)
    assert_same(models.load_checkpoint(tmp_path / "x"), right)


def test_a_file_beside_an_index_without_files_is_read_without_the_index(tiny, tmp_path):
    models.save_checkpoint(tmp_path / "x", *tiny)
    right, index = models.load_checkpoint(tmp_path / "x"), tmp_path / "x" / huggingface.INDEX
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}}))
    message = "'a.safetensors'.*download them, or remove the index to read model.safetensors"
    with pytest.raises(FileNotFoundError, match=message):
        models.load_checkpoint(tmp_path / "x")
    index.unlink()
    assert_same(models.load_checkpoint(tmp_path / "x"), right)


def test_pickled_weights_are_read_after_save_pretrained(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    torch.save({n: torch.from_numpy(x) for n, x in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="convert them to safetensors with save_pretrained of"):
        models.load_checkpoint(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "converted")
    found = models.load_checkpoint(tmp_path / "converted")
    assert_same(found, models.load_checkpoint(GOLDEN / "llama"))


def test_an_output_matrix_beside_a_tied_embedding_is_used_or_removed(tiny, tmp_path):
    module, params = tiny
    models.save_checkpoint(tmp_path / "x", module, params)
    config = tmp_path / "x" / "config.json"
    edit_json(config, tie_word_embeddings=True)
    with pytest.raises(
        ValueError, match="set tie_word_embeddings to false to use both, or remove the first"
    ) as error:
        models.load_checkpoint(tmp_path / "x")
    assert "but lm_head.weight differs from" in str(error.value)
    edit_json(config, tie_word_embeddings=False)
    assert_identical(models.load_checkpoint(tmp_path / "x").params, params)
    edit_json(config, tie_word_embeddings=True)
    edit_tensors(tmp_path / "x", lambda tensors: tensors.pop("lm_head.weight"))
    del params["params"]["unembedding"]
    assert_identical(models.load_checkpoint(tmp_path / "x").params, params)


def test_the_output_matrix_of_a_model_that_reads_images_is_that_of_the_whole_model(tmp_path):
    """Hugging Face reads `tie_word_embeddings` beside `text_config`."""
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    tensors = safetensors.numpy.load_file(GOLDEN / "gemma3" / "model.safetensors")
    output = tensors["model.embed_tokens.weight"][::-1].copy()
    safetensors.numpy.save_file(
        tensors | {"lm_head.weight": output}, tmp_path / "model.safetensors"
    )
    config = tmp_path / "config.json"
    text["tie_word_embeddings"] = False  # not read
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    with pytest.raises(ValueError, match="set tie_word_embeddings to false to use both"):
        models.load_checkpoint(tmp_path)
    edit_json(config, tie_word_embeddings=False)
    found = models.load_checkpoint(tmp_path).params["params"]
    right = models.load_checkpoint(GOLDEN / "gemma3").params["params"]
    assert_identical(found, right | {"unembedding": output})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtypes_that_errors_name_are_read(dtype, tiny, tmp_path):
    module, params = tiny
    models.save_checkpoint(tmp_path / "x", module, params)
    expected = models.build(module.config, dtype)
    for wrong, load in (("int8", models.load_checkpoint), ("int8", magicjax.load)):
        with pytest.raises(ValueError, match=f"not supported: .*{dtype}") as error:
            load(tmp_path / "x", wrong)
    assert "or None; to quantize the weights, pass weights='int8'" in str(error.value)
    assert str(magicjax.load(tmp_path / "x", None, weights="int8").weights) == "int8"
    assert magicjax.load(tmp_path / "x", None).dtype == np.float32
    name = "model.norm.weight"
    edit_tensors(tmp_path / "x", lambda x: x.update({name: x[name].astype(np.float16)}))
    edit_json(tmp_path / "x" / "config.json", torch_dtype=...)
    with pytest.raises(ValueError, match="pass dtype to convert them"):
        models.load_checkpoint(tmp_path / "x")
    params["params"]["norm"]["scale"] = params["params"]["norm"]["scale"].astype(np.float16)
    found = models.load_checkpoint(tmp_path / "x", dtype)
    assert found.module == expected
    assert_identical(found.params, jax.tree.map(lambda x: np.asarray(x).astype(dtype), params))


def test_float64_is_read_as_the_error_says(tiny, tmp_path):
    models.save_checkpoint(tmp_path / "x", *tiny)
    with pytest.raises(ValueError, match="call jax.config.update.*, or pass dtype=.float32"):
        models.load_checkpoint(tmp_path / "x", "float64")
    assert models.load_checkpoint(tmp_path / "x", dtype="float32").module.dtype == np.float32
    try:
        jax.config.update("jax_enable_x64", True)
        found = models.load_checkpoint(tmp_path / "x", "float64").params
        assert_identical(found, jax.tree.map(lambda x: np.asarray(x, np.float64), tiny[1]))
    finally:
        jax.config.update("jax_enable_x64", False)


# Quantized checkpoints


def settings(**changes):
    """Returns a change of `quantization_config`."""

    def change(raw):
        own = raw.setdefault("quantization_config", {})
        for key, value in changes.items():
            own.pop(key) if value is REMOVED else own.update({key: value})

    return change


def replaced(value):
    return lambda raw: raw.update(quantization_config=value)


def removed(raw):
    del raw["quantization_config"]


GPTQ_FILE = {"bits": 4, "group_size": 8, "desc_act": False, "sym": False}  # quantize_config.json
AWQ_FILE = {"zero_point": True, "q_group_size": 8, "w_bit": 4, "version": "GEMM"}
BLOCKS = layouts.group_config("float-quantized", 8, type="float", block_structure="large")
TRANSFORM = {"transform_config": {"R1": {}}}
SPARSE = {"sparsity_config": {"format": "sparse-24-bitmask"}}
# The layout, a change of its config, the error, and changes that it asks for.
QUANTIZED = {
    "no settings": ("awq", removed, "add the one of the checkpoint", [replaced(layouts.AWQ)]),
    "AutoGPTQ's file": (
        "gptq",
        removed,
        "or the contents of its quantize_config.json or quant_config.json with quant_method",
        [replaced(GPTQ_FILE | {"quant_method": "gptq"})],
    ),
    "AutoAWQ's file": (
        "awq",
        removed,
        "or the contents of its quantize_config.json or quant_config.json with quant_method",
        [replaced(AWQ_FILE | {"quant_method": "awq"})],
    ),
    "no method": (
        "gptq",
        settings(quant_method=REMOVED),
        "quant_method=None, which is not supported: it must be one of awq, gptq, compressed-",
        [settings(quant_method="gptq")],
    ),
    "version": (
        "awq",
        settings(version="gemv"),
        "version='gemv', which is not supported: it must be one of gemm",
        [settings(version="gemm")],
    ),
    "backend": (
        "awq",
        settings(backend="llm-awq"),
        "backend='llm-awq', which is not supported: load a checkpoint of AutoAWQ, or the unq",
        [settings(backend="autoawq")],
    ),
    "checkpoint_format": (
        "gptq_v2",
        settings(checkpoint_format="marlin"),
        "checkpoint_format='marlin', which is not supported: it must be one of gptq, gptq_v2",
        [settings(checkpoint_format="gptq_v2")],
    ),
    "format": (
        "packed",
        settings(format="marlin-24"),
        "format='marlin-24', which is not supported: it must be one of pack-quantized",
        [settings(format="pack-quantized")],
    ),
    "rotation": (
        "packed",
        settings(**TRANSFORM),
        "load a checkpoint without it",
        [settings(transform_config=REMOVED)],
    ),
    "sparse": (
        "int8",
        settings(**SPARSE),
        "load a checkpoint without it",
        [settings(sparsity_config=REMOVED)],
    ),
    "block": (
        "fp8, blocks",
        replaced(BLOCKS),
        "block_structure='large': it must be two numbers, such as [128, 128]",
        [replaced(layouts.group_config("float-quantized", 8, block_structure=[16, 8]))],
    ),
    "group_size": (
        "awq",
        settings(group_size=16),
        "group_size=16: set group_size to 8",
        [settings(group_size=8)],
    ),
    "zero points of 'gptq'": (
        "gptq",
        settings(sym=True),
        "sym=true: set it to false",
        [settings(sym=False)],
    ),
    "zero points of 'gptq_v2'": (
        "gptq_v2",
        settings(sym=True),
        "sym=true: set it to false",
        [settings(sym=False)],
    ),
}


TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)


@pytest.mark.parametrize("case", QUANTIZED)
@pytest.mark.slow
def test_what_an_error_about_quantized_weights_asks_for_gives_them(case, tmp_path, logits_of):
    layout, damage, message, remedies = QUANTIZED[case]
    folder, plain = write_pair(tmp_path, layout)
    right, file = models.load_checkpoint(plain), folder / "config.json"
    raw = json.loads(file.read_text())
    damage(raw)
    for remedy in remedies:
        file.write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=re.escape(message)):
            models.load_checkpoint(folder)
        edited = json.loads(json.dumps(raw))
        remedy(edited)
        file.write_text(json.dumps(edited))
        found = models.load_checkpoint(folder, "float32")
        assert same_weights(found, right)
        logits = [np.asarray(logits_of(c.module, c.params, TOKENS)) for c in (found, right)]
        np.testing.assert_allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
def test_zero_points_of_two_wrong_settings_are_read_after_two_remedies(stored, tmp_path):
    """First `sym`, then the format, which is told by the values: means of weights are near 0."""
    draw, outputs, inputs = np.random.default_rng(0), 32, 64
    q = draw.normal(8, 1.5, (inputs, outputs)).round().clip(0, 15).astype(int)
    zeros = draw.integers(7, 10, (8, outputs))
    q = (q + np.repeat(zeros - 8, 8, 0)).clip(0, 15)
    scales = np.ones((8, outputs), np.float16)
    offset = int(stored == "gptq")
    parts = {
        "qweight": layouts.pack_columns(q, 4),
        "qzeros": layouts.pack_rows((zeros - offset) % 16, 4),
        "scales": scales,
    }
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[stored]
    raw = layouts.GPTQ | {"sym": True, "checkpoint_format": other}

    def read():
        quantization = quantized_checkpoints.read_quantization_config(raw)
        return quantized_checkpoints.read_matrix(quantization, parts, (outputs, inputs))

    with pytest.raises(ValueError, match="sym=true: set it to false"):
        read()
    raw["sym"] = False
    with pytest.raises(ValueError, match=f"set checkpoint_format .* to '{stored}'"):
        read()
    raw["checkpoint_format"] = stored
    np.testing.assert_array_equal(read().dequantized(), layouts.dequantized(q, zeros, scales).T)


# The argument `weights`


def assert_rounded(found, plain):
    """Each value of a quantized matrix is at most a step from that of the floating-point one."""
    flat, exact = (flax.traverse_util.flatten_dict(x["params"]) for x in (found, plain))
    scales = [path[:-1] for path in flat if path[-1] == "scale"]
    matrices = [path for path in scales if (*path, "weight") in flat]
    assert matrices
    for path in matrices:
        weight, scale = (flat[*path, name] for name in ("weight", "scale"))
        groups, *outputs = scale.shape
        error = np.abs(np.asarray(models.dequantize(weight, scale)) - exact[*path, "weight"])
        largest = error.reshape(*outputs, groups, -1).max(-1)
        assert (largest <= 1.001 * np.abs(np.moveaxis(np.asarray(scale), 0, -1))).all()


@pytest.fixture
def wide(tmp_path, random_params):
    """A directory whose matrices fit all formats but groups of 128."""
    module = models.build(gguf_cases.config(num_layers=1))
    models.save_checkpoint(tmp_path / "wide", module, random_params(module))
    return tmp_path / "wide"


GROUPS = "do not divide the 64 inputs of attention/q: use int4:32 or int4:16 or int4:8"

FORMATS = "use 'int8', 'int4', or either with a group, such as 'int4:32'"
EXCLUDES = "excludes offload=True and activations='float': omit them, or use 'int4:32' or 'int8'"
WEIGHTS = [
    (dict(weights="int5"), FORMATS, [dict(weights="int8"), dict(weights="int4:32")]),
    (
        dict(weights="int5"),
        "on a CPU also 'Q4_0' or 'Q8_0'",
        [dict(weights="Q4_0"), dict(weights="Q8_0")],
    ),
    (dict(weights="float8"), FORMATS, [dict(weights="int8"), dict(weights="int4:32")]),
    (dict(weights="int4"), GROUPS, [dict(weights=f"int4:{size}") for size in (32, 16, 8)]),
    *(
        (
            dict(weights="Q4_0") | other,
            EXCLUDES,
            [dict(weights="Q4_0"), *(dict(weights=w) | other for w in ("int4:32", "int8"))],
        )
        for other in (dict(offload=True), dict(activations="float"))
    ),
]


@pytest.mark.parametrize(
    ("wrong", "message", "remedies"),
    quick(WEIGHTS, WEIGHTS[0], WEIGHTS[3], WEIGHTS[4]),
    ids=lambda x: str(x)[:40] if type(x) is dict else "",
)
@pytest.mark.slow
def test_weights_that_an_error_names_are_rounded_to(wrong, message, remedies, wide):
    with pytest.raises(ValueError, match=re.escape(message)):
        magicjax.load(wide, **wrong)
    plain = models.load_checkpoint(wide)
    for remedy in remedies:
        if remedy["weights"] in ROUNDED and not build.is_available():
            continue
        found = magicjax.load(wide, **remedy)
        assert str(found.weights) == remedy["weights"]
        if remedy["weights"] in ROUNDED:
            continue  # `test_gguf_families` compares their values
        if found.offload:
            resident = magicjax.load(wide, weights=remedy["weights"])
            assert greedy(found) == greedy(resident)
        else:
            assert_rounded(found.params, plain.params)


def greedy(model):
    return np.asarray(keywords.generate(model, TOKENS, max_tokens=6).tokens).tolist()


@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
@pytest.mark.slow
def test_types_of_files_for_models_that_do_not_have_them_are_replaced(tiny, tmp_path):
    models.save_checkpoint(tmp_path / "narrow", *tiny)
    mixture = GOLDEN / "mixtral"
    for folder, message, remedies in (
        (tmp_path / "narrow", "multiples of 16 and 32: use 'int8'", ["int8"]),
        (mixture, "needs a dense model in files, .* or use 'int4:32' or 'int8'", ["int8"]),
        (mixture, "needs a dense model in files, .* or use 'int4:32' or 'int8'", ["int4:8"]),
    ):
        with pytest.raises(ValueError, match=message):
            models.load_checkpoint(folder, weights="Q4_0")
        if remedies == ["int4:8"]:  # which the error about "int4:32" names
            with pytest.raises(ValueError, match="inputs of attention/q: use int4:8$"):
                models.load_checkpoint(folder, weights="int4:32")
        plain = models.load_checkpoint(folder)
        for weights in remedies:
            assert_rounded(models.load_checkpoint(folder, weights=weights).params, plain.params)


def test_groups_that_a_mesh_would_divide_are_smaller_as_the_error_says(tmp_path):
    folder, _ = write_pair(tmp_path, "awq")
    whole = models.load_checkpoint(folder, "float32")
    inputs = whole.config.matrix_inputs(8)  # 4 of `out` and 6 of `down` on each of 8 devices
    with pytest.raises(ValueError, match="weights='int4:8.zeros'.* 8 devices: use int4:2$"):
        whole.module.weights.check(inputs, 8)
    found = models.load_checkpoint(folder, "float32", weights="int4:2")
    found.module.weights.check(inputs, 8)
    assert same_weights(found, whole)


# Options of `magicjax.load`


@pytest.mark.slow
def test_a_preset_for_which_memory_is_short_has_the_options_of_the_error(monkeypatch):
    config = gguf_cases.config(num_layers=2, vocab_size=64)
    monkeypatch.setattr(models, "preset", lambda name: config)
    monkeypatch.setattr(sources, "_find", lambda name: None)
    for form in (None, "int8", "int4:32"):
        options = dict(dtype="bfloat16") | (dict(weights=form) if form else {})
        text = " and ".join(f"{name}={value!r}" for name, value in options.items())
        formats = models.blocks_in(config, form)
        free = loading._bytes_of(models.build(config, "bfloat16", formats))
        monkeypatch.setattr(loading.offloading, "free_host_memory", lambda free=free: free)
        with pytest.raises(ValueError, match=f"use a smaller preset, or {re.escape(text)}$"):
            magicjax.load("large", dtype="float32")
        assert loading._bytes_of(magicjax.load("large", **options).module) == free
    monkeypatch.setattr(loading.offloading, "free_host_memory", lambda: 1)
    with pytest.raises(ValueError, match="use a smaller preset$"):
        magicjax.load("large")


def test_options_that_a_model_does_not_have_are_omitted(tmp_path, tiny):
    models.save_checkpoint(tmp_path / "x", *tiny)
    for options, message in (
        (dict(draft_vocab=17), "use a multiple of 16, at least 16 and below the model's 19 tokens"),
        (dict(shards=2), "requires a mesh: pass mesh, or remove shards"),
        (dict(stages=2), "requires a mesh: pass mesh, or remove stages"),
        (dict(kv_dtype="int4"), "use 'int8', or omit it"),
        (dict(activations="int4"), "use 'int8' or 'float'"),
        (dict(offload="int8"), "use True or False, and weights='int8' for quantized weights"),
    ):
        with pytest.raises(ValueError, match=message):
            magicjax.load(tmp_path / "x", **options)
    assert_same(magicjax.load(tmp_path / "x"), models.load_checkpoint(tmp_path / "x"))
    assert magicjax.load(tmp_path / "x", draft_vocab=16).config.draft_vocab_size == 16
    assert magicjax.load(tmp_path / "x", kv_dtype="int8").kv_bits == 8
    assert magicjax.load(tmp_path / "x", activations="float").dtype == np.float32
    with pytest.raises(ValueError, match="with ALiBi: omit kv_dtype"):
        magicjax.load(GOLDEN / "mpt", kv_dtype="int8")
    module, params = models.with_draft_vocab(*tiny, 16, ())
    with pytest.raises(ValueError, match="vocabulary of its own; omit draft_vocab"):
        models.with_draft_vocab(module, params, 16, ())


@pytest.mark.parametrize("drafter", ["self:streaming:256", "prompt-lookup:4"])
@pytest.mark.slow
def test_drafters_in_the_error_about_another_head_draft(drafter, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 5}))
    with pytest.raises(ValueError, match="a drafter of kind medusa, ") as error:
        magicjax.load(tmp_path)
    assert drafter in str(error.value)
    target = tiny_models.model()
    found = keywords.generate(target, TOKENS, max_tokens=8, drafter=drafter, tree="chain:2")
    plain = keywords.generate(target, TOKENS, max_tokens=8)
    np.testing.assert_array_equal(found.tokens, plain.tokens)


# Saving


@pytest.mark.parametrize("case", ["gpt2", "gguf", "draft_vocab", "family"])
def test_a_model_that_cannot_be_written_is_written_as_the_error_says(
    case, tiny, tmp_path, monkeypatch
):
    again = "load (the model|it) with weights='none' to save it"
    if case == "gpt2":  # transposed
        wrong = models.load_checkpoint(GOLDEN / "gpt2", weights="int8")
        right = models.load_checkpoint(GOLDEN / "gpt2", weights="none")
    elif case == "gguf":  # minima that are no integers
        folder, _ = converted(tmp_path, monkeypatch, ("Q4_1",))
        wrong = models.load_checkpoint(folder, packed=False)
        right = models.load_checkpoint(folder, weights="none")
    elif case == "draft_vocab":
        again = "load the model without draft_vocab to save it"
        models.save_checkpoint(tmp_path / "x", *tiny)
        wrong, right = magicjax.load(tmp_path / "x", draft_vocab=16), magicjax.load(tmp_path / "x")
    else:
        again = "family='llama' cannot express qkv_bias=True: change the family"
        config = gguf_cases.config("qwen2", num_layers=1)
        module = models.build(dataclasses.replace(config, family="llama"))
        wrong = magicjax.Model(module, random_params(module))
        right = magicjax.Model(models.build(config), wrong.params)
    with pytest.raises(ValueError, match=again):
        models.save_checkpoint(tmp_path / "saved", wrong.module, wrong.params)
    models.save_checkpoint(tmp_path / "saved", right.module, right.params)
    assert_same(models.load_checkpoint(tmp_path / "saved"), right)
