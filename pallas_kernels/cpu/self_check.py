"""Compares small calls of the kernels with the reference.

`build` runs this module once per library, in a process of its own: a crash, the settings of JAX and
the trace in which kernels are first needed do not matter.
"""

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention_check
from pallas_kernels.attention_check import difference
from pallas_kernels.cpu import attention, build, linear, packed
from pallas_kernels.cpu.linear import Matrix

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check() -> str | None:
    """Returns the first mismatch, None if every kernel agrees with the reference."""
    return _check_linear() or _check_packed() or _check_attention()


def _check_linear() -> str | None:
    """Returns the first mismatch of products with floating-point and quantized matrices."""
    random = np.random.default_rng(0)
    for dtype in DTYPES:
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
                label = f"linear, {case}, x in {jnp.dtype(dtype)}"
                if mismatch := difference(label, y, expected, 1e-5):
                    return mismatch
            if mismatch := _check_expert(f"linear, expert, {case}", rows, matrices[1], actual[1]):
                return mismatch
            alone = linear.products(rows[:1], matrices, 1, jnp.float32)
            if any((one[0] != y[0]).any() for one, y in zip(alone, actual, strict=True)):
                return f"linear, {case}, x in {jnp.dtype(dtype)}: a row has other bits alone"
    return None


def _check_packed() -> str | None:
    """Returns the first mismatch of products with packed matrices."""
    random = np.random.default_rng(0)
    x = random.standard_normal((9, 512)).astype(np.float32)
    integers, scales = packed.round_activations(x)
    rounded = integers * np.repeat(scales, packed.GROUP, 1).astype(float)
    for name, fmt in packed.FORMATS.items():
        data = random.integers(0, 256, fmt.shape(32, 512), np.uint8)
        halves = random.uniform(-0.02, 0.02, (*data.shape[:2], fmt.first // 2)).astype(np.float16)
        data[..., : fmt.first] = halves.view(np.uint8)
        weight = packed.dequantize(packed.Packed(data, name, (32,)), np).astype(float)
        matrix = packed.Packed(jnp.asarray(data), name, (32,))
        (actual,) = packed.products(jnp.asarray(x), [matrix], 1, jnp.float32)
        terms = np.abs(rounded) @ np.abs(weight.T)
        if not (np.abs(actual - rounded @ weight.T) <= 1e-6 * terms).all():
            return f"packed, {name}: the products differ from those of integers"
        (alone,) = packed.products(jnp.asarray(x[:1]), [matrix], 1, jnp.float32)
        if (alone[0] != actual[0]).any():
            return f"packed, {name}: a row has other bits alone"
        if (packed.rows(matrix, jnp.arange(32)) != weight).any():
            return f"packed, {name}: the rows differ from those of the matrix"
    return None


def _check_expert(label: str, x: Any, matrix: Matrix, expected: Any) -> str | None:
    """Returns the first mismatch of a matrix that is the second of two experts'."""

    def twice(x: Any) -> Any:
        return None if x is None else jnp.stack([x, x], 1)

    both = Matrix(
        weight=jnp.stack([jnp.zeros_like(matrix.weight), matrix.weight]),
        scale=twice(matrix.scale),
        zero=twice(matrix.zero),
    )
    (actual,) = linear.products(x, [both], 1, jnp.float32, jnp.int32(1))
    return None if (actual == expected).all() else f"{label}: an expert has other bits alone"


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
    """Returns the first mismatch of `attend` in all dtypes."""
    for dtype in DTYPES:
        if message := attention_check.mismatch(attention.attend, dtype):
            return message
    return None


def main() -> int:
    """Prints the first mismatch; returns the exit code."""
    message = build.unavailable_reason() or check()
    print(message or "", end="")
    return 1 if message else 0


if __name__ == "__main__":
    sys.exit(main())
