"""Quantized checkpoints: every layout is read as the matrices of its definition."""

import json
import pathlib
import shutil

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy

import magicjax
import models
from magicjax.parallel import offloading
from models import hf_parameters
from models import quantized_checkpoints as checkpoints
from models.gguf import blocks, files
from tests import gguf_cases
from tests.magicjax import keywords
from tests.models import quantized_layouts as layouts
from tests.models.quantized_layouts import CONFIG, write_pair
from tests.quick import quick

GOLDEN = pathlib.Path(__file__).parent / "golden_quantized"

# Readers


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_reader_returns_the_matrix_of_the_definition(name):
    settings, quantize = layouts.LAYOUTS[name]
    layout = checkpoints.read_quantization_config(settings)
    draw = np.random.default_rng(0)
    for _ in range(20):
        inputs, outputs = (8 * int(n) for n in draw.integers(1, 8, 2))
        parts, expected = quantize(draw, inputs, outputs)
        matrix = checkpoints.read_matrix(layout, parts, (outputs, inputs))
        np.testing.assert_array_equal(matrix.dequantized(), expected)
        if matrix.values.dtype == np.int8:
            assert np.abs(matrix.values.astype(int) + 0.5).max() <= 2 ** (matrix.bits - 1)


@pytest.mark.parametrize("name", ["packed", "packed, zeros", "packed, 8 bits"])
def test_sizes_need_not_fill_a_word(name):
    settings, quantize = layouts.LAYOUTS[name]
    parts, expected = quantize(np.random.default_rng(0), 24, 13)
    matrix = checkpoints.read_matrix(
        checkpoints.read_quantization_config(settings), parts, (13, 24)
    )
    np.testing.assert_array_equal(matrix.dequantized(), expected)


# The first bytes of the 16-bit numbers of blocks that `gguf` cannot quantize.
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)
}  # fmt: skip


def gguf_bytes(kind, draw, rows, columns):
    """Random blocks of a GGUF type, which `gguf` can dequantize but not always quantize."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if kind.name not in HALVES:
        weights = draw.normal(0, 1, (rows, columns)).astype(np.float32)
        weights[0, :32], weights[-1, -32:] = 0, 0.5  # constant groups
        return gguf.quantize(weights, kind)
    blocks = draw.integers(0, 256, (rows, columns // elements, size)).astype(np.uint8)
    for first in HALVES[kind.name]:
        numbers = draw.normal(0, 1, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., first : first + 2] = numbers.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", blocks.BLOCK_FORMATS, ids=lambda kind: kind.name)
def test_blocks_of_a_gguf_file_are_its_weights(kind):
    draw = np.random.default_rng(0)
    layout = checkpoints.QuantizationConfig("gguf")
    for _ in range(5):
        rows, columns = int(draw.integers(1, 20)), 256 * int(draw.integers(1, 4))
        stored = gguf_bytes(kind, draw, rows, columns)
        parts = blocks.BLOCK_FORMATS[kind].parts(stored)
        found = {
            name: (f"{x.dtype.kind}{8 * x.dtype.itemsize}".upper(), x.shape)
            for name, x in parts.items()
        }
        assert found == blocks.BLOCK_FORMATS[kind].shapes((rows, columns))
        matrix = checkpoints.read_matrix(layout, parts, (rows, columns))
        expected = gguf.dequantize(stored, kind)
        # With minima, gguf rounds value * scale + minimum to even in a tie.
        np.testing.assert_allclose(
            matrix.dequantized(), expected, rtol=2e-7 * blocks.BLOCK_FORMATS[kind].has_minima
        )


# Models

TOKENS = np.arange(24).reshape(2, 12) % CONFIG.vocab_size


def relative_error(found, expected):
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


# The values of each layout are compared above.
@pytest.mark.parametrize("name", quick(layouts.LAYOUTS, "awq", "fp8, blocks"))
def test_logits_are_those_of_the_dequantized_matrices(name, tmp_path, logits_of):
    quantized, plain = write_pair(tmp_path, name)
    found, right = (models.load_checkpoint(path, "float32") for path in (quantized, plain))
    formats = models.matrix_formats(quantized)
    assert found.module.weights == formats and len(formats.in_blocks) == 1
    up = found.params["params"]["layers_0"]["mlp"]["up"]["weight"]
    assert up.dtype == models.WeightFormat.parse(str(formats)).dtype
    both = [np.asarray(logits_of(c.module, c.params, TOKENS)) for c in (found, right)]
    assert relative_error(*both) < 2e-5
    dequantized = models.load_checkpoint(quantized, "float32", weights="none")
    assert dequantized.module == right.module
    assert jax.tree.all(jax.tree.map(np.array_equal, dequantized.params, right.params))


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_logits_are_those_of_compressed_tensors(folder, logits_of):
    expected = np.load(folder / "expected.npz")
    checkpoint = models.load_checkpoint(folder)
    assert checkpoint.module.weights == models.matrix_formats(folder)
    found = logits_of(checkpoint.module, checkpoint.params, expected["tokens"])
    assert relative_error(found, expected["logits"]) < 2e-5


def converted(tmp_path, monkeypatch, kinds):
    """The directory of a GGUF file, and one with its dequantized weights."""
    monkeypatch.setattr(gguf_cases, "MATRICES", kinds)
    config = gguf_cases.config(num_layers=1)
    tensors, expected = gguf_cases.tensors_for(config)
    file = gguf_cases.write(tmp_path / "model.gguf", gguf_cases.metadata_of(config), tensors)
    folder = tmp_path / "converted"
    folder.mkdir()
    files.write_directory(files.read_gguf(file), folder)
    return folder, gguf_cases.save_directory(tmp_path / "plain", config, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds, form",
    [
        (("Q4_0",), "int4:32"),
        (("Q4_1",), "int4:32+zeros"),
        (("Q8_0",), "int8:32"),
        (("Q4_1", "Q8_0"), "int4:32+zeros+int8:32"),
        (("Q8_0", "F16"), "int8:32"),
        (("F16",), "none"),
    ],
)
def test_a_gguf_file_stays_quantized(kinds, form, tmp_path, monkeypatch, logits_of):
    folder, plain = converted(tmp_path, monkeypatch, kinds)
    found = models.load_checkpoint(folder, packed=False)
    right = models.load_checkpoint(plain)
    assert str(found.module.weights) == form
    both = [logits_of(c.module, c.params, TOKENS) for c in (found, right)]
    assert relative_error(both[0], np.asarray(both[1])) < 2e-5
    dequantized = models.load_checkpoint(folder, weights="none")
    assert jax.tree.all(jax.tree.map(np.array_equal, dequantized.params, right.params))


def tokens_on_a_mesh(folder):
    """The greedy tokens on two devices, each with half the groups or outputs of a matrix."""
    mesh = magicjax.make_mesh(model=2, devices=jax.devices()[:2])
    model = magicjax.load(folder, "float32", mesh=mesh)
    block = model.params["params"]["layers_0"]
    out, up = block["attention"]["out"], block["mlp"]["up"]
    for matrix, axes in (
        (out, dict(weight=1, scale=0, zero=0)),
        (up, dict(weight=0, scale=1, zero=1)),
    ):
        for name, axis in axes.items():
            part = matrix[name].addressable_shards[0].data
            assert part.shape[axis] == matrix[name].shape[axis] // 2
    return tokens(model, mesh)


def tokens(model, mesh=None):
    settings = {"max_tokens": 8, "drafter": "prompt-lookup:2", "tree": "chain:2"}
    return np.asarray(keywords.generate(model, TOKENS, mesh=mesh, **settings).tokens).tolist()


@pytest.mark.slow
def test_a_mesh_divides_groups_and_outputs(eight, tmp_path):
    folder, _ = write_pair(tmp_path, "awq")
    assert eight(tokens_on_a_mesh, folder=str(folder)) == tokens(magicjax.load(folder, "float32"))


@pytest.mark.slow
def test_offloaded_weights_stay_quantized(tmp_path):
    folder, _ = write_pair(tmp_path, "awq")
    resident, offloaded = (magicjax.load(folder, "float32", offload=o) for o in (False, True))
    assert offloaded.weights == resident.weights != models.MatrixFormats()
    assert tokens(offloaded) == tokens(resident)


def matrices_read(monkeypatch):
    """The shapes of the matrices that are unpacked from now on."""
    shapes = []

    def read(layout, parts, shape):
        shapes.append(shape)
        return checkpoints.read_matrix(layout, parts, shape)

    monkeypatch.setattr(hf_parameters, "read_matrix", read)
    return shapes


def test_host_memory_is_checked_before_blocks_are_read(tmp_path, monkeypatch):
    folder, _ = write_pair(tmp_path, "awq")
    read = matrices_read(monkeypatch)
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 1000)
    with pytest.raises(ValueError, match="offload needs .* GB of host memory"):
        magicjax.load(folder, "float32", offload=True)
    assert not read


def test_blocks_are_read_one_by_one(tmp_path, monkeypatch):
    folder, _ = write_pair(tmp_path, "awq")
    whole, read = models.load_checkpoint(folder), matrices_read(monkeypatch)
    lazy = models.load_checkpoint(folder, lazy_blocks=True)
    assert not read and not any(name.startswith("layers") for name in lazy.params["params"])
    block = lazy.read_block(1)
    assert len(read) == 7
    expected = whole.params["params"]["layers_1"]
    assert jax.tree.all(jax.tree.map(np.array_equal, block, expected))


def test_fused_matrices_of_a_checkpoint(tmp_path, monkeypatch):
    """Phi-3 stores q, k and v as one matrix, and gate and up as another."""
    golden = GOLDEN.parent / "golden" / "phi3"
    plain = models.load_checkpoint(golden, weights=models.WeightFormat(8, None))
    models.save_checkpoint(tmp_path / "x", plain.module, plain.params)
    stored = safetensors.numpy.load_file(tmp_path / "x" / "model.safetensors")
    matrices = [name for name in stored if name.endswith("weight_packed")]
    assert "model.layers.0.self_attn.qkv_proj.weight_packed" in matrices
    read = matrices_read(monkeypatch)
    found = models.load_checkpoint(tmp_path / "x")
    assert len(read) == len(matrices)
    assert found.module == plain.module
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, plain.params))


# Errors


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
REFUSED = {
    "method": (BITSANDBYTES, "quant_method='bitsandbytes', which is not supported: it must be one"),
    "format": (
        layouts.group_config("nvfp4-pack-quantized", 4, type="float"),
        "format='nvfp4-pack-quantized', which is not supported: it must be one of pack-quantized",
    ),
    "awq": ({**layouts.AWQ, "version": "gemv"}, "awq with version='gemv'.* must be one of gemm"),
    "gptq": ({**layouts.GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "rotation": (
        {**layouts.LAYOUTS["packed"][0], "transform_config": {"R1": {}}},
        "transform_config={'R1': {}}, which is not supported",
    ),
    "sparse": (
        {**layouts.LAYOUTS["int8"][0], "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config={'format': 'sparse-24-bitmask'}, which is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_are_not_supported_are_refused_by_name(name):
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        checkpoints.read_quantization_config(settings)


def test_the_settings_of_a_quantization_that_was_merged_away_can_be_removed(tmp_path):
    """As the error says, which QLoRA's merged models give."""
    plain = shutil.copytree(GOLDEN.with_name("golden") / "llama", tmp_path / "x")
    file, expected = plain / "config.json", models.load_checkpoint(plain)
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"quantization_config": BITSANDBYTES}))
    with pytest.raises(ValueError, match="not quantized, .*, remove quantization_config from conf"):
        models.load_checkpoint(plain)
    file.write_text(json.dumps(raw))
    found = models.load_checkpoint(plain)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, expected.params))


@pytest.mark.parametrize(
    "name, part, dtype, message",
    [
        ("int8", "weight", np.float16, "weight has dtype F16, supported: I8, F8_E4M3"),
        ("int8", "weight_scale", np.int8, "weight_scale has dtype I8, supported: F16, BF16, F32"),
        ("packed", "weight_packed", np.int8, "weight_packed has dtype I8, supported: I32"),
        ("packed, zeros", "weight_zero_point", np.int8, "weight_zero_point has dtype I8, suppor"),
        ("awq", "qzeros", np.float32, "qzeros has dtype F32, supported: I32"),
    ],
)
def test_parts_of_another_dtype_are_refused(name, part, dtype, message, tmp_path):
    folder, _ = write_pair(tmp_path, name)
    file, part = folder / "model.safetensors", f"model.layers.0.self_attn.q_proj.{part}"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file(tensors | {part: tensors[part].astype(dtype)}, file)
    with pytest.raises(ValueError, match=message):
        models.load_checkpoint(folder)


QUERY, OUT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"


def group_size(size):
    return lambda raw, tensors: raw["quantization_config"].update(group_size=size)


def tensor(name, value):
    return lambda raw, tensors: tensors.update({name: value})


def changed(tmp_path, name, change):
    """Returns a quantized directory after a change of its config and tensors."""
    folder, _ = write_pair(tmp_path, name)
    config, file = folder / "config.json", folder / "model.safetensors"
    raw, tensors = json.loads(config.read_text()), safetensors.numpy.load_file(file)
    change(raw, tensors)
    config.write_text(json.dumps(raw))
    safetensors.numpy.save_file(tensors, file)
    return folder


DAMAGED = [
    (
        "awq",
        lambda raw, tensors: tensors.update({f"{QUERY}.qzeros": tensors[f"{QUERY}.qzeros"][:2]}),
        f"{QUERY}.weight cannot be read: it has values of shape",
    ),
    ("awq", lambda raw, tensors: tensors.pop(f"{QUERY}.scales"), f"{QUERY}.scales"),
    (
        "awq",
        tensor("model.layers.0.mlp.act.scales", np.ones(48, np.float16)),
        r"\(1 problem\):\n  unexpected model.layers.0.mlp.act.scales$",
    ),
    (
        "awq",
        group_size(16),
        "q_proj.weight cannot be read: it has 4 groups for 32 inputs, .* group_size=16",
    ),
    (
        "gptq",
        group_size(12),
        "q_proj.weight cannot be read: its 32 inputs are not a multiple of group_size=12",
    ),
    (
        "awq",
        lambda raw, tensors: raw.pop("quantization_config"),
        "is quantized, and config.json has no quantization_config",
    ),
    (
        "gptq",
        lambda raw, tensors: tensors.update(
            {f"{QUERY}.g_idx": tensors[f"{QUERY}.g_idx"][::-1].copy()}
        ),
        "g_idx orders its inputs by activation .act-order.",
    ),
    ("gptq", tensor(f"{OUT}.bias", np.ones(32, np.float16)), f"unexpected {OUT}.bias"),
]


@pytest.mark.parametrize("case", DAMAGED, ids=lambda case: case[2][:30])
def test_damaged_checkpoints_are_refused(case, tmp_path):
    name, change, message = case
    with pytest.raises(ValueError, match=message):
        models.load_checkpoint(changed(tmp_path, name, change))


@pytest.mark.parametrize("stored", [7, 8])
@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_of_the_other_format_are_found_by_their_values(stored, kind, symmetric):
    """GPTQModel wrote those of "gptq_v2" under the name "gptq", and readers made wrong weights."""
    q = np.clip(np.random.default_rng(0).normal(8, 2, (32, 32)).round(), 0, 15).astype(int)
    parts = {
        "qweight": layouts.pack_columns(q, 4),
        "qzeros": layouts.pack_rows(np.full((4, 32), stored), 4),
        "scales": np.ones((4, 32), np.float16),
    }

    def read(kind):
        settings = layouts.GPTQ | {"sym": symmetric, "checkpoint_format": kind}
        quantization = checkpoints.read_quantization_config(settings)
        return checkpoints.read_matrix(quantization, parts, (32, 32)).dequantized()

    right = {7: "gptq", 8: "gptq_v2"}[stored]
    if not symmetric and kind != right:
        with pytest.raises(ValueError, match=f"set checkpoint_format .* to '{right}'"):
            read(kind)
        kind = right
    np.testing.assert_array_equal(read(kind), (q - 8).T)


def test_blocks_are_lists_or_texts():
    def block(structure):
        settings = layouts.group_config("float-quantized", 8, block_structure=structure)
        return checkpoints.read_quantization_config(settings).block

    assert block([128, 64]) == block("128x64") == (128, 64) and block(None) is None
    with pytest.raises(ValueError, match="block_structure='large'"):
        block("large")


HARMLESS = [
    ("awq", group_size(None), "int4:8+zeros"),
    ("gptq", tensor(f"{OUT}.bias", np.zeros(32, np.float16)), "int4:8+zeros"),  # by AutoGPTQ
    ("int8", tensor(f"{QUERY}.input_scale", np.ones(1, np.float32)), "int8"),
    ("int8", tensor(f"{QUERY}.input_zero_point", np.zeros(1, np.int8)), "int8"),
]


@pytest.mark.parametrize("case", HARMLESS, ids=["no group", "empty bias", "scale", "zero"])
def test_parts_without_effect_are_ignored(case, tmp_path):
    name, change, form = case
    assert str(models.load_checkpoint(changed(tmp_path, name, change)).module.weights) == form


def test_the_scheme_of_a_float8_cache_is_ignored_with_one_line(tmp_path, caplog):
    def change(raw, tensors):
        raw["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
        tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)

    folder = changed(tmp_path, "int8", change)
    found = [models.load_checkpoint(folder) for _ in range(2)]
    assert str(found[0].module.weights) == "int8"
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder / 'config.json'} has settings that are ignored, as KV caches are not in float8: "
        "kv_cache_scheme of quantization_config"
    ]


# Saving


@pytest.mark.parametrize("name", ["awq", "gptq, 8 bits", "packed", "packed, 8 bits", "float8"])
def test_a_round_trip_is_exact_to_the_bit(name, tmp_path):
    first = models.load_checkpoint(write_pair(tmp_path, name)[0])
    models.save_checkpoint(tmp_path / "x", first.module, first.params, max_shard_bytes=9000)
    second = models.load_checkpoint(tmp_path / "x")
    assert second.module == first.module
    assert jax.tree.all(jax.tree.map(np.array_equal, first.params, second.params))


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_compressed_tensors_reads_our_checkpoints(folder, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    checkpoint = models.load_checkpoint(folder)
    models.save_checkpoint(tmp_path / "x", checkpoint.module, checkpoint.params)
    expected = np.load(folder / "expected.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "x",
        torch_dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    with torch.no_grad():
        found = model.eval()(torch.tensor(expected["tokens"], dtype=torch.long)).logits.numpy()
    assert relative_error(found, expected["logits"]) < 2e-5


def test_matrices_that_cannot_be_saved_quantized_are_refused(tmp_path, monkeypatch):
    folder, _ = converted(tmp_path, monkeypatch, ("Q4_1",))
    minima = models.load_checkpoint(folder, packed=False)
    packed = models.load_checkpoint(folder)
    golden = GOLDEN.parent / "golden" / "gpt2"
    transposed = models.load_checkpoint(golden, weights=models.WeightFormat(8, None))
    for found, message in (
        (packed, "matrices in Q4_1 cannot be written: .* weights='none' to save it"),
        (minima, "q_proj.weight cannot be written: its zero points are"),
        (transposed, "matrices of family='gpt2' cannot be written: .* weights='none' to save it"),
    ):
        with pytest.raises(ValueError, match=message):
            models.save_checkpoint(tmp_path / "x", found.module, found.params)
        assert not (tmp_path / "x").exists()
