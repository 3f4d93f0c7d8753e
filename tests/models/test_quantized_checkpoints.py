"""Quantized checkpoints: every layout is read as the matrices of its definition."""

import pathlib

import gguf
import jax
import numpy as np
import pytest

import models
from models import gguf_blocks
from models import quantized_checkpoints as checkpoints
from tests import gguf_cases
from tests.models import quantized_layouts as layouts

GOLDEN = pathlib.Path(__file__).parent / "golden_quantized"

# Readers


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_reader_returns_the_matrix_of_the_definition(name):
    settings, quantize = layouts.LAYOUTS[name]
    layout = checkpoints.read_layout(settings)
    draw = np.random.default_rng(0)
    for _ in range(20):
        inputs, outputs = (8 * int(n) for n in draw.integers(1, 8, 2))
        parts, expected = quantize(draw, inputs, outputs)
        matrix = checkpoints.read_matrix(layout, parts, (outputs, inputs))
        np.testing.assert_array_equal(matrix.dequantized().T, expected)
        if matrix.values.dtype == np.int8:
            assert np.abs(matrix.values.astype(int) + 0.5).max() <= 2 ** (matrix.bits - 1)


@pytest.mark.parametrize("name", ["packed", "packed, zeros", "packed, 8 bits"])
def test_sizes_need_not_fill_a_word(name):
    settings, quantize = layouts.LAYOUTS[name]
    parts, expected = quantize(np.random.default_rng(0), 24, 13)
    matrix = checkpoints.read_matrix(checkpoints.read_layout(settings), parts, (13, 24))
    np.testing.assert_array_equal(matrix.dequantized().T, expected)


def gguf_bytes(kind, draw, rows, columns):
    """Random blocks of a GGUF type, which `gguf` can dequantize but not always quantize."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if not kind.name.endswith("K"):
        weights = draw.normal(0, 1, (rows, columns)).astype(np.float32)
        weights[0, :32], weights[-1, -32:] = 0, 0.5  # constant groups
        return gguf.quantize(weights, kind)
    blocks = draw.integers(0, 256, (rows, columns // elements, size)).astype(np.uint8)
    for first in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind.name]:  # numbers of 16 bits
        numbers = draw.normal(0, 1, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., first : first + 2] = numbers.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", gguf_blocks.KINDS, ids=lambda kind: kind.name)
def test_blocks_of_a_gguf_file_are_its_weights(kind):
    draw = np.random.default_rng(0)
    layout = checkpoints.Layout("gguf")
    for _ in range(5):
        rows, columns = int(draw.integers(1, 20)), 256 * int(draw.integers(1, 4))
        stored = gguf_bytes(kind, draw, rows, columns)
        parts = gguf_blocks.KINDS[kind].parts(stored)
        found = {
            name: (f"{x.dtype.kind}{8 * x.dtype.itemsize}".upper(), x.shape)
            for name, x in parts.items()
        }
        assert found == gguf_blocks.KINDS[kind].shapes((rows, columns))
        matrix = checkpoints.read_matrix(layout, parts, (rows, columns))
        expected = gguf.dequantize(stored, kind)
        # Equal but for Q4_K, of which gguf rounds value * scale + minimum to even in a tie.
        np.testing.assert_allclose(
            matrix.dequantized().T, expected, rtol=2e-7 * (kind.name == "Q4_K")
        )


# Models

CONFIG = gguf_cases.config(
    vocab_size=40, hidden_size=32, intermediate_size=48, head_dim=8, max_positions=64
)
TOKENS = np.arange(24).reshape(2, 12) % CONFIG.vocab_size


def relative_error(found, expected):
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


def write_pair(tmp_path, name, ignored=("lm_head",), config=CONFIG):
    return layouts.write_pair(tmp_path, config, gguf_cases.shapes_of(config), name, ignored)


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_logits_are_those_of_the_dequantized_matrices(name, tmp_path, logits_of):
    quantized, plain = write_pair(tmp_path, name)
    found, right = (models.load_checkpoint(path, "float32") for path in (quantized, plain))
    form = models.stored_weights(quantized)
    assert form is not None and found.module.weights == form
    assert found.params["params"]["layers_0"]["mlp"]["up"]["weight"].dtype == form.dtype
    both = [np.asarray(logits_of(c.module, c.params, TOKENS)) for c in (found, right)]
    assert relative_error(*both) < 2e-5
    dequantized = models.load_checkpoint(quantized, "float32", weights="none")
    assert dequantized.module == right.module
    assert jax.tree.all(jax.tree.map(np.array_equal, dequantized.params, right.params))


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_logits_are_those_of_compressed_tensors(folder, logits_of):
    expected = np.load(folder / "expected.npz")
    checkpoint = models.load_checkpoint(folder)
    assert checkpoint.module.weights == models.stored_weights(folder)
    found = logits_of(checkpoint.module, checkpoint.params, expected["tokens"])
    assert relative_error(found, expected["logits"]) < 2e-5
