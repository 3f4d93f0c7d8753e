"""Compares small calls of the kernels with the reference.

`build` runs this module once per library, in a process of its own: a crash, the settings of JAX and
the trace in which kernels are first needed do not matter.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.cpu import attention, build, linear
from pallas_kernels.cpu.linear import Matrix
from pallas_kernels.quantized import Quantized

TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2, jnp.float16: 1e-2}


def check() -> str | None:
    """Returns the first mismatch, None if every kernel agrees with the reference."""
    return _check_linear() or _check_attention()


def _check_linear() -> str | None:
    """Returns the first mismatch of products with floating-point and quantized matrices."""
    random = np.random.default_rng(0)
    for dtype in TOLERANCES:
        x = jnp.asarray(random.standard_normal((9, 128)), dtype)
        weights = [random.standard_normal((outputs, 128)) for outputs in (5, 67)]
        cases = {"floating-point": [Matrix(jnp.asarray(weight, dtype)) for weight in weights]}
        for bits in (8, 4):
            for groups in (1, 2):
                cases[f"int{bits}, {groups} groups"] = [
                    _rounded(weight, bits, groups) for weight in weights
                ]
        for case, matrices in cases.items():
            rows = x[: 1 if dtype == jnp.float16 else 9]
            actual = linear.products(rows, matrices, 1, jnp.float32)
            for y, matrix in zip(actual, matrices, strict=True):
                expected = np.asarray(rows, float) @ _dequantized(matrix).T
                where = f"linear, {case}, x in {jnp.dtype(dtype)}"
                if mismatch := _mismatch(where, y, expected, 1e-5):
                    return mismatch
            if mismatch := _check_expert(f"linear, expert, {case}", rows, matrices[1], actual[1]):
                return mismatch
            alone = linear.products(rows[:1], matrices, 1, jnp.float32)
            if any((one[0] != y[0]).any() for one, y in zip(alone, actual, strict=True)):
                return f"linear, {case}, x in {jnp.dtype(dtype)}: a row has other bits alone"
    return None


def _check_expert(where: str, x: Any, matrix: Matrix, expected: Any) -> str | None:
    """Returns the first mismatch of a matrix that is the second of two experts'."""
    weight = jnp.stack([jnp.zeros_like(matrix.weight), matrix.weight])
    parts = [part if part is None else jnp.stack([part, part], 1) for part in matrix[1:]]
    both = Matrix(weight, *parts)
    (actual,) = linear.products(x, [both], 1, jnp.float32, jnp.int32(1))
    return None if (actual == expected).all() else f"{where}: an expert has other bits alone"


def _rounded(weight: np.ndarray, bits: int, groups: int) -> Matrix:
    """Returns a matrix in 8 bits, or in 4 bits with zero points."""
    grouped = np.abs(weight).reshape(len(weight), groups, -1)
    scale = grouped.max(-1) / (2 ** (bits - 1) - 1)
    values = np.rint(weight / np.repeat(scale, weight.shape[1] // groups, 1))
    integers = jnp.asarray(values, jnp.int8).astype(jnp.int4 if bits == 4 else jnp.int8)
    zeros = jnp.linspace(-2, 2, scale.size, dtype=jnp.float32).reshape(groups, -1)
    return Matrix(integers, jnp.asarray(scale.T, jnp.float32), zeros if bits == 4 else None)


def _dequantized(matrix: Matrix) -> np.ndarray:
    """Returns a matrix [N, K] in float64."""
    weight = np.asarray(matrix.weight.astype(jnp.float32), float)
    if matrix.scale is None:
        return weight
    zero = jnp.zeros_like(matrix.scale) if matrix.zero is None else matrix.zero
    size = weight.shape[1] // len(matrix.scale)
    scales, zeros = (np.repeat(np.asarray(x, float).T, size, 1) for x in (matrix.scale, zero))
    return (weight - zeros) * scales


def _check_attention() -> str | None:
    """Returns the first mismatch of `attend` in all dtypes, for single tokens and for trees."""
    for dtype, tolerance in TOLERANCES.items():
        for case, rows, nodes, first_row in (("decoding", 2, 1, None), ("tree", 3, 9, 1)):
            inputs = [x.astype(dtype) for x in _attention_inputs(rows, nodes, first_row or 0)]
            where = f"tree_attention, {case} in {jnp.dtype(dtype)}"
            if mismatch := _compare_attention(where, inputs, inputs, first_row, tolerance):
                return mismatch
    q, k_prefix, v_prefix, k_new, v_new = _attention_inputs(3, 9, 1)
    values = [np.clip(np.round(40 * x), -127, 127) for x in (k_prefix, v_prefix)]
    scales = np.linspace(0.02, 0.03, values[0][..., 0].size, dtype=np.float32)
    scales = scales.reshape(values[0].shape[:3])
    int8 = [Quantized(jnp.asarray(x, jnp.int8), jnp.asarray(scales), 8) for x in values]
    wide = [q, *(x * scales[..., None] for x in values), k_new, v_new]
    where = "tree_attention, int8 cache"
    if mismatch := _compare_attention(where, [q, *int8, k_new, v_new], wide, 1, 1e-5):
        return mismatch
    inputs = [q, k_prefix[:, :, :64], v_prefix[:, :, :64], k_new, v_new]
    seen_from = np.array([[0], [20], [600]], np.int32) + np.arange(9, dtype=np.int32)
    lengths = np.array([0, 75, 640], np.int32)
    return _compare_attention("tree_attention, ring", inputs, inputs, 1, 1e-5, lengths, seen_from)


def _attention_inputs(rows: int, nodes: int, other_rows: int) -> list[np.ndarray]:
    """Returns q, k_prefix, v_prefix, k_new and v_new; the caches have `other_rows` in front."""
    K, G, S, D = 2, 3, 75, 64
    random = np.random.default_rng(0)
    prefix, new = (rows + other_rows, K, S, D), (rows, nodes, K, D)
    shapes = ((rows, nodes, K * G, D), prefix, prefix, new, new)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def _compare_attention(
    where: str,
    inputs: list,
    wide: list,
    first_row: int | None,
    tolerance: float,
    lengths: np.ndarray | None = None,
    seen_from: np.ndarray | None = None,
) -> str | None:
    """Returns the first mismatch with the reference on the same inputs in float32."""
    rows, nodes = inputs[0].shape[:2]
    if lengths is None:
        lengths = np.resize(np.array([0, 75, 37], np.int32), rows)
    mask = np.random.default_rng(1).random((rows, nodes, nodes)) < 0.5
    mask[:, -1] = nodes == 1  # of a tree, the last query of row 0 sees no key
    wide = [x.astype(np.float32) for x in wide]
    actual, expected = (
        jax.jit(attend)(*x[:3], lengths, *x[3:], mask, first_row, seen_from)
        for attend, x in ((attention.attend, inputs), (reference.attend, wide))
    )
    # The lse of a query that sees no key is -1e29, which would hide the others.
    lses = [np.maximum(lse, -100) for lse in (actual[1], expected[1])]
    return _mismatch(f"{where}, out", actual[0], expected[0], tolerance) or _mismatch(
        f"{where}, lse", lses[0], lses[1], tolerance
    )


def _mismatch(where: str, actual: Any, expected: Any, tolerance: float) -> str | None:
    """Returns a message unless the relative error is at most the tolerance."""
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    if error <= tolerance:
        return None
    return f"{where}: relative error {error:.1e}, at most {tolerance:.0e}"  # nan is an error


def main() -> int:
    """Prints the first mismatch; returns the exit code."""
    message = build.unavailable_reason() or check()
    print(message or "", end="")
    return 1 if message else 0


if __name__ == "__main__":
    sys.exit(main())
