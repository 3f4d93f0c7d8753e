"""Quantized checkpoints: every layout is read as the matrices of its definition."""

import pathlib

import gguf
import numpy as np
import pytest

from models import gguf_blocks
from models import quantized_checkpoints as checkpoints
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_gguf_file_are_its_weights(kind):
    kind = gguf.GGMLQuantizationType[kind]
    draw = np.random.default_rng(0)
    layout = checkpoints.Layout("gguf")
    for _ in range(5):
        rows, columns = int(draw.integers(1, 20)), 32 * int(draw.integers(1, 8))
        weights = draw.normal(0, 1, (rows, columns)).astype(np.float32)
        weights[0, :32], weights[-1, -32:] = 0, 0.5  # constant groups
        stored = gguf.quantize(weights, kind)
        parts = gguf_blocks.KINDS[kind].parts(stored)
        shapes = {
            name: (f"{x.dtype.kind}{8 * x.dtype.itemsize}".upper(), x.shape)
            for name, x in parts.items()
        }
        assert shapes == gguf_blocks.KINDS[kind].shapes((rows, columns))
        matrix = checkpoints.read_matrix(layout, parts, (rows, columns))
        np.testing.assert_array_equal(matrix.dequantized().T, gguf.dequantize(stored, kind))
