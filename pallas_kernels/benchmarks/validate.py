"""Validates a backend against the definition: `python -m pallas_kernels.benchmarks.validate`.

At full sizes, with edge-case lengths and a mask for each row, results are compared with `reference`
row by row in float32. Every call is also checked for three more properties:

- Results are finite after all free memory was filled with NaN. This detects parts of a result that
  the kernel never writes, if their memory was filled; passing does not prove that there are none.
- Repeated calls return the same bits; otherwise the kernel has a race.
- The result of a query that sees no key is exactly zero.

The rounding of a quantized prefix is part of its definition: a backend dequantizes it to the dtype
of the queries, or multiplies the scores by the scales in float32. A result has to agree with one.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.attention import BACKENDS, choose_backend, tree_attention
from pallas_kernels.benchmarks.bench import best_backend, write_json
from pallas_kernels.benchmarks.shapes import (
    FULL_HEADS,
    FULL_SIZES,
    SMALL_SHAPES,
    Shape,
    bench_shape,
    device_inputs,
)
from pallas_kernels.lse_merge import EMPTY_LSE
from pallas_kernels.mosaic_gpu import hopper_config
from pallas_kernels.quantized import dequantize, quantize

# bf16 keeps 8 bits. Three roundings, of the weights and of both results, each have a relative error
# of at most 2^-9. The log-sum-exp stays in float32; its error is that of a sum of D products,
# D * 2^-24 of the largest score, which is below 8 here.
TOLERANCE = {"bfloat16": 3 * 2**-9, "float16": 3 * 2**-12}
LSE_TOLERANCE = 1e-4
REPEATS = 3
FILL_FRACTION = 0.8  # of the free memory; programs need the remainder
FILL_BYTES = 2**28  # per array


@dataclasses.dataclass(frozen=True)
class Case:
    """A call to validate.

    Attributes:
      shape: sizes.
      dtype: dtype of queries and caches.
      bits: bits of a quantized prefix; 0: not quantized.
    """

    shape: Shape
    dtype: str
    bits: int = 0

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}" + (f" int{self.bits}" if self.bits else "")


def cases(small: bool) -> list[Case]:
    """Returns the calls to validate, at full or small sizes."""
    full = tuple(bench_shape(*size, *FULL_HEADS, 16) for size in FULL_SIZES)
    shapes = SMALL_SHAPES if small else full
    unquantized = [Case(shape, dtype) for shape in shapes for dtype in TOLERANCE]
    return [*unquantized, Case(shapes[0], "bfloat16", 8)]


def lengths_of(shape: Shape) -> Iterator[np.ndarray]:
    """Yields lengths [B] of consecutive calls: full, empty, and around the end of a block."""
    slots, block = shape.slots, hopper_config.ROWS
    edges = [slots, 0, 1, block - 1, block, block + 1, slots // 2 + 1, slots - 1]
    rows = -(-max(len(edges), shape.batch) // shape.batch) * shape.batch
    yield from np.resize(np.asarray(edges, np.int32), rows).reshape(-1, shape.batch)


def inputs_of(case: Case, lengths: np.ndarray, seed: int) -> dict[str, Any]:
    """Returns the arguments of `tree_attention`, with a different mask for each row.

    The first query of each row sees no new token, so in an empty row it sees no key at all.
    """
    shape = case.shape
    inputs: dict[str, Any] = device_inputs(shape, jnp.dtype(case.dtype), seed)
    if case.bits:
        for name in ("k_prefix", "v_prefix"):
            inputs[name] = jax.jit(quantize, static_argnums=1)(inputs[name], case.bits)
    mask = np.random.default_rng(seed).random((shape.batch, shape.nodes, shape.new)) < 0.4
    mask[:, 0] = False
    return inputs | {"lengths": jnp.asarray(lengths), "mask": jnp.asarray(mask)}


@functools.partial(jax.jit, static_argnums=2)
def _row(inputs: dict[str, Any], row: int, dtype: str) -> tuple[Array, Array]:
    """Returns the reference result of one row, of a prefix dequantized to `dtype`."""
    inputs = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), inputs)
    for name in ("k_prefix", "v_prefix"):
        if not isinstance(inputs[name], jax.Array):
            inputs[name] = dequantize(inputs[name], jnp.dtype(dtype))
    inputs = {k: x.astype(jnp.float32) if k[0] in "qkv" else x for k, x in inputs.items()}
    return tree_attention(**inputs, return_lse=True, backend="reference")  # type: ignore


def fill_with_nan(at_least: int) -> int:
    """Fills the device's free memory with NaN, frees it, and returns the number of bytes."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    count = max(1, int(FILL_FRACTION * free) // FILL_BYTES)
    size = FILL_BYTES if free else at_least
    filled = [jnp.full(size // 4, jnp.nan, jnp.float32) for _ in range(count)]
    jax.block_until_ready(filled)
    return count * size


def errors(case: Case, backend: str, lengths: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Returns the errors of a call: the largest relative error of a row, and failed properties.

    Args:
      case: the call.
      backend: a name from BACKENDS.
      lengths: int32 [B].
      seed: seed of the inputs.
    """
    inputs = inputs_of(case, lengths, seed)
    call = jax.jit(functools.partial(tree_attention, return_lse=True, backend=backend))
    sizes = [x.size * 4 for x in jax.block_until_ready(call(**inputs))]
    filled = fill_with_nan(max(sizes))
    results = [jax.device_get(call(**inputs)) for _ in range(REPEATS)]
    (out, lse), *others = [(np.asarray(out, np.float32), lse) for out, lse in results]
    changed = any((out != o).any() or (lse != x).any() for o, x in others)
    compared = [_difference(case, inputs, out, lse, dtype) for dtype in _definitions(case)]
    return {
        **min(compared, key=lambda difference: difference["lse error"]),
        "non-finite": int((~np.isfinite(out)).sum() + (~np.isfinite(lse)).sum()),
        "changed": bool(changed),
        "bytes filled with NaN": filled,
    }


def _definitions(case: Case) -> list[str]:
    """Returns the dtypes to which a backend may dequantize: that of the queries, or float32."""
    return [case.dtype, "float32"] if case.bits else [case.dtype]


def _difference(
    case: Case, inputs: dict[str, Any], out: np.ndarray, lse: np.ndarray, dtype: str
) -> dict[str, Any]:
    """Returns the errors of a result; the reference dequantizes the prefix to `dtype`."""
    rows = [jax.device_get(_row(inputs, row, dtype)) for row in range(case.shape.batch)]
    expected = np.concatenate([row for row, _ in rows])
    expected_lse = np.concatenate([x for _, x in rows])
    seen = expected_lse > EMPTY_LSE
    norms = np.linalg.norm((out - expected).reshape(len(out), -1), axis=1)
    per_row = norms / np.maximum(np.linalg.norm(expected.reshape(len(out), -1), axis=1), 1e-30)
    return {
        "error": float(per_row.max()),
        "lse error": float(np.abs(lse - expected_lse)[seen].max(initial=0)),
        "not empty": int((out[~seen] != 0).sum() + (lse[~seen] != expected_lse[~seen]).sum()),
    }


def passed(case: Case, result: dict[str, Any]) -> bool:
    """Returns whether a call is within tolerance and has all properties; NaN fails."""
    exact = result["error"] <= TOLERANCE[case.dtype] and result["lse error"] <= LSE_TOLERANCE
    return exact and not (result["non-finite"] or result["changed"] or result["not empty"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every call passes, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.benchmarks.validate", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument(
        "--backend", choices=sorted(BACKENDS), help="default: the best for the device"
    )
    parser.add_argument("--small", action="store_true", help="sizes that the interpreter can run")
    parser.add_argument("--out", help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    try:
        chosen = options.backend or best_backend(jnp.dtype("bfloat16"), FULL_HEADS[2], device)
        backend = choose_backend(chosen, jnp.dtype("bfloat16"), FULL_HEADS[2], device)
    except ValueError as error:
        parser.error(str(error))
    print(f"{device.device_kind}, jax {jax.__version__}, {backend} against reference")
    rows = []
    for case in cases(options.small):
        for seed, lengths in enumerate(lengths_of(case.shape)):
            result = errors(case, backend, lengths, seed)
            row = {"case": str(case), "lengths": lengths.tolist(), "passed": passed(case, result)}
            rows.append(row | {"tolerance": TOLERANCE[case.dtype]} | result)
            print(
                f"{'pass' if row['passed'] else 'FAIL'}  {case}  error {result['error']:.1e} of "
                f"{TOLERANCE[case.dtype]:.1e}, lse {result['lse error']:.1e}, non-finite "
                f"{result['non-finite']}, changed {result['changed']}, not empty "
                f"{result['not empty']}",
                flush=True,
            )
    all_passed = all(row["passed"] for row in rows)
    if options.out:
        about = {"device": device.device_kind, "jax": jax.__version__, "backend": backend}
        write_json(options.out, about | {"passed": all_passed, "rows": rows})
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
