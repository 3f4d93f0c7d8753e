"""Compares small calls of an attention kernel with the reference, before a machine uses it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.lse_merge import EMPTY_LSE
from pallas_kernels.quantized import Quantized

TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
G = 3  # query heads for each KV head

CASES = (  # name, KV heads, slots, rows, nodes, first_row
    ("decoding", 2, 2360, 3, 1, None),
    ("tree", 2, 75, 3, 9, 1),
    ("prompt chunk", 8, 1160, 1, 512, 1),
)


def mismatch(attend: Callable, dtype: Any, head_dim: int = 64) -> str | None:
    """Returns the first mismatch of a backend's `attend`; None if there is none.

    It decodes single tokens and verifies a tree, with a cache of more rows, and a large one whose
    prefix and rows are divided into several blocks, also in 8 bits; last a ring.
    """
    compare = _Comparison(attend, jnp.dtype(dtype))
    for case, heads, slots, rows, nodes, first_row in CASES:
        inputs = _inputs(heads, slots, rows, nodes, first_row or 0, head_dim)
        if message := compare(case, inputs, inputs, first_row):
            return message
    q, k_prefix, v_prefix, k_new, v_new = inputs
    values = [np.clip(np.round(40 * x), -127, 127) for x in (k_prefix, v_prefix)]
    scales = np.linspace(0.02, 0.03, values[0][..., 0].size, dtype=np.float32)
    scales = scales.reshape(values[0].shape[:3])
    int8 = [Quantized(jnp.asarray(x, jnp.int8), jnp.asarray(scales), 8) for x in values]
    dequantized = [q, *(x * scales[..., None] for x in values), k_new, v_new]
    if message := compare("int8 cache", [q, *int8, k_new, v_new], dequantized, first_row):
        return message
    inputs = _inputs(2, 64, 3, 9, 1, head_dim)
    seen_from = np.array([[0], [20], [600]], np.int32) + np.arange(9, dtype=np.int32)
    lengths = np.array([0, 75, 640], np.int32)
    return compare("ring", inputs, inputs, 1, lengths, seen_from)


def _inputs(
    heads: int, slots: int, rows: int, nodes: int, other_rows: int, head_dim: int
) -> list[np.ndarray]:
    """Returns q, k_prefix, v_prefix, k_new and v_new; the caches have `other_rows` in front."""
    random = np.random.default_rng(0)
    prefix, new = (rows + other_rows, heads, slots, head_dim), (rows, nodes, heads, head_dim)
    shapes = ((rows, nodes, heads * G, head_dim), prefix, prefix, new, new)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


class _Comparison:
    """Compares a backend with the reference, on the same inputs in float32."""

    def __init__(self, attend: Callable, dtype: jnp.dtype):
        self.attend, self.dtype = attend, dtype

    def __call__(
        self,
        case: str,
        inputs: list,
        dequantized: list,
        first_row: int | None,
        lengths: np.ndarray | None = None,
        seen_from: np.ndarray | None = None,
    ) -> str | None:
        """Returns a mismatch; `dequantized` are the inputs dequantized."""
        rows, nodes = inputs[0].shape[:2]
        if lengths is None:
            slots = inputs[1].shape[2]
            lengths = np.resize(np.array([slots, 0, slots // 2], np.int32), rows)
        mask = np.random.default_rng(1).random((rows, nodes, nodes)) < 0.5
        mask[:, -1] = nodes == 1  # of a tree, the last query of row 1 sees no key
        inputs = [x if isinstance(x, Quantized) else jnp.asarray(x, self.dtype) for x in inputs]
        rounded = [np.asarray(jnp.asarray(x, self.dtype), np.float32) for x in dequantized]
        rounded = [
            w if isinstance(x, Quantized) else r
            for x, w, r in zip(inputs, dequantized, rounded, strict=True)
        ]
        actual, expected = (
            jax.jit(attend)(*x[:3], lengths, *x[3:], mask, first_row, seen_from)
            for attend, x in ((self.attend, inputs), (reference.attend, rounded))
        )
        (out, lse), (expected_out, expected_lse) = actual, expected
        tolerance = TOLERANCES[self.dtype.name]
        label = f"tree_attention, {case} in {self.dtype}"
        if message := difference(f"{label}, out", out, expected_out, tolerance):
            return message
        # The lse of a query that sees no key is EMPTY_LSE, which would hide the others.
        sees = np.asarray(expected_lse) > EMPTY_LSE / 2
        if not np.array_equal(np.asarray(lse) > EMPTY_LSE / 2, sees):
            return f"{label}, lse: a query that sees a key has none, or one has that sees none"
        return difference(f"{label}, lse", lse[sees], expected_lse[sees], tolerance)


def difference(label: str, actual: Any, expected: Any, tolerance: float) -> str | None:
    """Returns a message unless the relative error is at most the tolerance."""
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    if error <= tolerance:
        return None
    return f"{label}: relative error {error:.1e}, at most {tolerance:.0e}"  # nan is an error
