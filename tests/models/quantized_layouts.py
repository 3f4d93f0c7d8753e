"""Layouts of quantized checkpoints, written element by element from their definitions.

Each layout draws integers q, scales and zero points of a random matrix, and returns the tensors
that a checkpoint stores for it and the matrix, (q - zero point) * scale in float32. The readers of
`models.quantized_checkpoints` unpack whole arrays instead.
"""

import itertools
import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors.numpy

from models.hf_config_writing import write_config
from models.hf_tensors import tensors_of
from tests import gguf_cases

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds


def pack(numbers, bits, order=None):
    """Returns a list of unsigned integers in words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    order = range(per_word) if order is None else order
    words = [0] * -(-len(numbers) // per_word)
    for word in range(len(words)):
        for slot, index in enumerate(order):
            if word * per_word + index < len(numbers):
                words[word] |= int(numbers[word * per_word + index]) << (bits * slot)
    return np.array(words, np.uint32).view(np.int32)


def pack_rows(numbers, bits, order=None):
    """Returns [M, N] packed along the second axis."""
    return np.stack([pack(row, bits, order) for row in numbers])


def pack_columns(numbers, bits):
    """Returns [M, N] packed along the first axis."""
    return pack_rows(numbers.T, bits).T


def dequantized(q, zeros, scales):
    """Returns the matrix [inputs, outputs] of integers and their groups' zeros and scales."""
    matrix = np.zeros(q.shape, np.float32)
    group = q.shape[0] // scales.shape[0]
    for i in range(q.shape[0]):
        matrix[i] = (q[i] - zeros[i // group]) * scales[i // group].astype(np.float32)
    return matrix


def draw_groups(draw, inputs, outputs, group, bits, dtype=np.float16):
    """Returns random integers [inputs, outputs], zero points and scales [groups, outputs]."""
    groups = inputs // group
    q = draw.integers(0, 2**bits, (inputs, outputs))
    zeros = draw.integers(0, 2**bits, (groups, outputs))
    scales = draw.uniform(0.5, 2, (groups, outputs)) / (2 ** (bits - 1) * inputs**0.5)
    return q, zeros, scales.astype(dtype)


def awq(draw, inputs, outputs, group=8):
    q, zeros, scales = draw_groups(draw, inputs, outputs, group, 4)
    tensors = {
        "qweight": pack_rows(q, 4, AWQ_ORDER),
        "qzeros": pack_rows(zeros, 4, AWQ_ORDER),
        "scales": scales,
    }
    return tensors, dequantized(q, zeros, scales).T


def gptq(draw, inputs, outputs, group=8, bits=4, offset=1):
    """Stores zero points minus `offset`: 1 in the format "gptq", 0 in "gptq_v2"."""
    q, zeros, scales = draw_groups(draw, inputs, outputs, group, bits)
    tensors = {
        "qweight": pack_columns(q, bits),
        "qzeros": pack_rows((zeros - offset) % 2**bits, bits),
        "scales": scales,
        "g_idx": np.arange(inputs, dtype=np.int32) // group,
    }
    return tensors, dequantized(q, zeros, scales).T


def packed(draw, inputs, outputs, group=8, bits=4, symmetric=True):
    """compressed-tensors' "pack-quantized": signed integers plus half their range."""
    q, zeros, scales = draw_groups(draw, inputs, outputs, group, bits, ml_dtypes.bfloat16)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    tensors = {
        "weight_packed": pack_rows(q.T, bits),
        "weight_scale": scales.T,
        "weight_shape": np.array([outputs, inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_columns(zeros.T, bits)
    return tensors, dequantized(q, zeros, scales).T


def int8(draw, inputs, outputs):
    """compressed-tensors' "int-quantized": a scale per output channel."""
    q = draw.integers(-127, 128, (inputs, outputs))
    scales = draw.uniform(0.5, 2, (1, outputs)).astype(np.float32) / (127 * inputs**0.5)
    tensors = {"weight": q.T.astype(np.int8), "weight_scale": scales.T}
    return tensors, dequantized(q, np.zeros_like(scales), scales).T


def float8(draw, inputs, outputs, blocks=None, scale="weight_scale"):
    """float8 e4m3 with a scale for the tensor, or for each block of (outputs, inputs)."""
    weight = draw.normal(0, 50, (outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    rows, columns = blocks or (outputs, inputs)
    grid = -(-outputs // rows), -(-inputs // columns)
    scales = draw.uniform(0.5, 2, grid).astype(np.float32) / (50 * inputs**0.5)
    matrix = np.zeros((outputs, inputs), np.float32)
    for i in range(outputs):
        for j in range(inputs):
            matrix[i, j] = np.float32(weight[i, j]) * scales[i // rows, j // columns]
    return {"weight": weight, scale: scales if blocks else scales.reshape(())}, matrix


def group_config(kind, bits, **weights):
    """Returns the `quantization_config` of compressed-tensors."""
    args = {"num_bits": bits, "symmetric": True, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
GROUP = {"type": "int", "strategy": "group", "group_size": 8}
CHANNEL = {"type": "int", "strategy": "channel"}
# By name: `quantization_config`, and the layout of each quantized matrix.
LAYOUTS = {
    "awq": (AWQ, awq),
    "gptq": ({**GPTQ, "checkpoint_format": "gptq"}, gptq),
    "gptq_v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda *shape: gptq(*shape, offset=0)),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, lambda *shape: gptq(*shape, bits=8)),
    "packed": (group_config("pack-quantized", 4, **GROUP), packed),
    "packed, zeros": (
        group_config("pack-quantized", 4, **GROUP, symmetric=False),
        lambda *shape: packed(*shape, symmetric=False),
    ),
    "packed, 8 bits": (
        group_config("pack-quantized", 8, **CHANNEL),
        lambda draw, inputs, outputs: packed(draw, inputs, outputs, group=inputs, bits=8),
    ),
    "int8": (group_config("int-quantized", 8, **CHANNEL), int8),
    "float8": (group_config("float-quantized", 8, type="float", strategy="tensor"), float8),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, float8),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 8]},
        lambda *shape: float8(*shape, blocks=(16, 8), scale="weight_scale_inv"),
    ),
}


def is_quantized(tensor, ignored=()):
    """Returns whether checkpoints of these tests quantize a tensor."""
    return tensor.inputs > 0 and not any(part in tensor.name for part in ignored)


CONFIG = gguf_cases.config(
    vocab_size=40, hidden_size=32, intermediate_size=48, head_dim=8, max_positions=64
)


def write_pair(path: pathlib.Path, layout, ignored=("lm_head",)):
    """Writes path/quantized, and path/plain with the same weights in float32; returns both.

    Args:
      path: an existing folder.
      layout: a name of `LAYOUTS`, or several, which matrices have in turn.
      ignored: parts of names of matrices that are not quantized.
    """
    layouts = [LAYOUTS[name] for name in ([layout] if isinstance(layout, str) else layout)]
    settings, in_turn = layouts[0][0], itertools.cycle(quantize for _, quantize in layouts)
    draw = np.random.default_rng(0)
    stored, plain, shapes = {}, {}, gguf_cases.shapes_of(CONFIG)
    for tensor in tensors_of(CONFIG):
        shape = shapes[tensor.name]
        if is_quantized(tensor, ignored):
            parts, plain[tensor.name] = next(in_turn)(draw, shape[1], shape[0])
            module = tensor.name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": value for suffix, value in parts.items()}
        else:
            value = draw.normal(0, 0.3, shape).astype(np.float16)
            stored[tensor.name], plain[tensor.name] = value, value.astype(np.float32)
    raw = write_config(CONFIG)
    folders = path / "quantized", path / "plain"
    for folder, tensors, extra in zip(
        folders, (stored, plain), ({"quantization_config": settings}, {}), strict=True
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw | extra))
        arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
        safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return folders
