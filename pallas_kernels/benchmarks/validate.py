"""Says whether a backend computes what the definition says: `python -m
pallas_kernels.benchmarks.validate`.

At the sizes that matter on a GPU, rows of every awkward length and a mask for each row are compared
with `reference`, one row at a time, in float32. Three more things are asked of every call:

- Results are finite after all free memory was filled with NaN. A part of a result that the kernel
  never writes then shows, if its memory came out of what was filled; a NaN is proof of a fault, and
  none is no proof of its absence.
- Repeated calls give the same bits: an error that moves is a race.
- A query that sees nothing gets exactly zeros.
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

# bf16 keeps 8 bits. The weights are rounded before they meet the values, and two results are
# rounded at their end: each errs by at most 2^-9 of itself. A log-sum-exp stays in float32: its
# error is that of a sum of D products, D * 2^-24 of the largest score, which is below 8 here.
TOLERANCE = {"bfloat16": 3 * 2**-9, "float16": 3 * 2**-12}
LSE_TOLERANCE = 1e-4
REPEATS = 3
FILLED = 0.8  # of the free memory; the rest is for programs
FILL_BYTES = 2**28  # at a time


@dataclasses.dataclass(frozen=True)
class Case:
    """A call to check.

    Attributes:
      shape: its sizes.
      dtype: of queries and caches.
      bits: of a quantized prefix; 0: none.
    """

    shape: Shape
    dtype: str
    bits: int = 0

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}" + (f" int{self.bits}" if self.bits else "")


def cases(small: bool) -> list[Case]:
    """Returns the calls to check."""
    full = tuple(bench_shape(*size, *FULL_HEADS, 16) for size in FULL_SIZES)
    shapes = SMALL_SHAPES if small else full
    found = [Case(shape, dtype) for shape in shapes for dtype in TOLERANCE]
    return [*found, Case(shapes[0], "bfloat16", 8)]


def lengths_of(shape: Shape) -> Iterator[np.ndarray]:
    """Yields lengths [B], of one call after another: full, empty, and around a block's end."""
    slots, block = shape.slots, hopper_config.ROWS
    edges = [slots, 0, 1, block - 1, block, block + 1, slots // 2 + 1, slots - 1]
    rows = -(-max(len(edges), shape.batch) // shape.batch) * shape.batch
    yield from np.resize(np.asarray(edges, np.int32), rows).reshape(-1, shape.batch)


def inputs_of(case: Case, lengths: np.ndarray, seed: int) -> dict[str, Any]:
    """Returns every argument of `tree_attention`; each row has a mask of its own.

    The first query of each row sees no new token, so in an empty row it sees nothing at all.
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
    """Returns what the definition says of one row."""
    of_row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), inputs)
    for name in ("k_prefix", "v_prefix"):
        if not isinstance(of_row[name], jax.Array):
            of_row[name] = dequantize(of_row[name], jnp.dtype(dtype))
    of_row = {k: x.astype(jnp.float32) if k[0] in "qkv" else x for k, x in of_row.items()}
    return tree_attention(**of_row, return_lse=True, backend="reference")  # type: ignore


def fill_with_nan(at_least: int) -> int:
    """Returns how many bytes of this device's free memory were filled with NaN, and freed again."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    count = max(1, int(FILLED * free) // FILL_BYTES)
    size = FILL_BYTES if free else at_least
    filled = [jnp.full(size // 4, jnp.nan, jnp.float32) for _ in range(count)]
    jax.block_until_ready(filled)
    return count * size


def errors(case: Case, backend: str, lengths: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Returns what a call got wrong: the largest error of a row, and what else is asked.

    Args:
      case: the call.
      backend: a name from BACKENDS.
      lengths: int32 [B].
      seed: of the inputs.
    """
    inputs = inputs_of(case, lengths, seed)
    call = jax.jit(functools.partial(tree_attention, return_lse=True, backend=backend))
    sizes = [x.size * 4 for x in jax.block_until_ready(call(**inputs))]
    filled = fill_with_nan(max(sizes))
    found = [jax.device_get(call(**inputs)) for _ in range(REPEATS)]
    (out, lse), *again = [(np.asarray(out, np.float32), lse) for out, lse in found]
    moved = any((out != o).any() or (lse != x).any() for o, x in again)
    rows = [jax.device_get(_row(inputs, row, case.dtype)) for row in range(case.shape.batch)]
    wanted = np.concatenate([row for row, _ in rows])
    wanted_lse = np.concatenate([x for _, x in rows])
    seen = wanted_lse > EMPTY_LSE
    norms = np.linalg.norm((out - wanted).reshape(len(out), -1), axis=1)
    of_rows = norms / np.maximum(np.linalg.norm(wanted.reshape(len(out), -1), axis=1), 1e-30)
    return {
        "error": float(of_rows.max()),
        "lse error": float(np.abs(lse - wanted_lse)[seen].max(initial=0)),
        "unwritten": int((~np.isfinite(out)).sum() + (~np.isfinite(lse)).sum()),
        "moved": bool(moved),
        "not empty": int((out[~seen] != 0).sum() + (lse[~seen] != wanted_lse[~seen]).sum()),
        "bytes filled with NaN": filled,
    }


def passed(case: Case, found: dict[str, Any]) -> bool:
    """Returns whether a call did all that is asked; NaN never does."""
    right = found["error"] <= TOLERANCE[case.dtype] and found["lse error"] <= LSE_TOLERANCE
    return right and not (found["unwritten"] or found["moved"] or found["not empty"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every call is right, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.benchmarks.validate", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--backend", choices=sorted(BACKENDS), help="default: meant for the device")
    parser.add_argument("--small", action="store_true", help="sizes that an interpreter can run")
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
            found = errors(case, backend, lengths, seed)
            row = {"case": str(case), "lengths": lengths.tolist(), "passed": passed(case, found)}
            rows.append(row | {"bound": TOLERANCE[case.dtype]} | found)
            print(
                f"{'pass' if row['passed'] else 'FAIL'}  {case}  error {found['error']:.1e} of "
                f"{TOLERANCE[case.dtype]:.1e}, lse {found['lse error']:.1e}, unwritten "
                f"{found['unwritten']}, moved {found['moved']}, not empty {found['not empty']}",
                flush=True,
            )
    good = all(row["passed"] for row in rows)
    if options.out:
        about = {"device": device.device_kind, "jax": jax.__version__, "backend": backend}
        write_json(options.out, about | {"passed": good, "rows": rows})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
