"""Times all matrices of a model with few rows: `python -m magicjax.benchmarks.products`.

Prints, for each format of the weights and number of rows, the milliseconds of the products of one
pass with the native kernels and with XLA, interleaved, and the share of the memory bandwidth.
"""

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import models
from magicjax.benchmarks.tables import record_table
from magicjax.loading import load
from magicjax.model import DTYPES, Model
from models.linear import products
from pallas_kernels import choose_backend
from pallas_kernels.benchmarks.bandwidth import read_bandwidth
from pallas_kernels.benchmarks.bench import write_json
from pallas_kernels.benchmarks.timing import fastest_seconds
from pallas_kernels.cpu.linear import Matrix
from pallas_kernels.cpu.packed import OUTPUTS, Packed
from sharding import array_bytes

# Matrices with the same input, and its number of axes.
FUSED = (
    ("attention", "qkv", 1),
    ("attention", ("out",), 2),
    ("mlp", ("gate", "up"), 1),
    ("mlp", ("down",), 1),
)


def groups_of(model: Model) -> list[list[Matrix | Packed]]:
    """Returns the matrices of a pass, [outputs, inputs]; those of a group have the same input."""
    weights = model.module.weights

    def matrix_of(path: str, found: Any, axes: int) -> Matrix | Packed:
        if not isinstance(form := weights.of(path), str):
            return flat_matrix(found, axes)
        return Packed(found["weight"], form, (OUTPUTS * len(found["weight"]),))

    params, groups = model.params["params"], []
    for layer in range(model.config.num_layers):
        block = params[f"layers_{layer}"]
        for part, names, axes in FUSED:
            found = {name: block[part][name] for name in names if name in block[part]}
            prefix = f"layers_{layer}/{part}"
            groups.append([matrix_of(f"{prefix}/{n}", x, axes) for n, x in found.items()])
    output = models.output_matrix(model.module, model.params)
    return [*groups, [output if isinstance(output, Packed) else Matrix(output)]]


def flat_matrix(found: dict[str, jax.Array], axes: int) -> Matrix:
    """Returns the parameters of a projection with one axis of inputs and one of outputs."""
    weight, inputs = found["weight"], math.prod(found["weight"].shape[-axes:])
    parts = [
        found[name].reshape(len(found[name]), -1) for name in ("scale", "zero") if name in found
    ]
    return Matrix(weight.reshape(-1, inputs), *parts)


def chained(groups: Sequence[Sequence[Matrix | Packed]], x: jax.Array, backend: str) -> jax.Array:
    """Returns a number that depends on the products of all groups, one after another."""
    total: Any = jnp.zeros((), jnp.float32)
    for group in groups:
        first = group[0]
        inputs = first.inputs if isinstance(first, Packed) else first.weight.shape[1]
        rows = jnp.resize(x, (len(x), inputs)) + total.astype(x.dtype)
        total = 1e-9 * sum(y.sum(dtype=jnp.float32) for y in products(rows, group, 1, backend))
    return total


def measure(model: Model, rows: int, backends: Sequence[str], repeats: int) -> dict[str, Any]:
    """Returns the milliseconds by backend, and GB/s of the first."""
    groups = groups_of(model)
    x = jnp.ones((rows, model.config.hidden_size), model.dtype)
    programs = {b: jax.jit(functools.partial(chained, backend=b)) for b in backends}
    calls = {b: functools.partial(program, groups, x) for b, program in programs.items()}
    seconds = fastest_seconds(calls, repeats=repeats)
    size = sum(array_bytes(part.shape, part.dtype) for part in jax.tree.leaves(groups))
    record = {f"{backend} ms": 1e3 * time for backend, time in seconds.items()}
    return record | {"GB/s": size / seconds[backends[0]] / 1e9}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m magicjax.benchmarks.products",
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="smollm2", help="directory, GGUF file or preset")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of activations")
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["none", "int8", "int4:32"],
        help='formats of `magicjax.load`; "stored": those of the file',
    )
    parser.add_argument("--no-xla", action="store_true", help="time only the native kernels")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 8, 16])
    parser.add_argument("--repeats", type=int, default=9, help="timings; the shortest counts")
    parser.add_argument("--out", help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    bandwidth, records = read_bandwidth(), []
    backends = list(dict.fromkeys([choose_backend(), *["xla"] * (not options.no_xla)]))
    for weights in options.weights:
        form = None if weights == "stored" else weights
        model = load(options.target, options.dtype, weights=form)
        for rows in options.rows:
            cell = {"dtype": options.dtype, "weights": weights, "rows": rows}
            measured = measure(model, rows, backends, options.repeats)
            share = {"of bandwidth": 1e9 * measured["GB/s"] / bandwidth}
            records.append(cell | measured | share)
    print(record_table(records))
    print(f"\nreads {bandwidth / 1e9:.1f} GB/s, jax {jax.__version__}")
    if options.out:
        write_json(options.out, {"read_bandwidth": bandwidth, "rows": records})
    return 0


if __name__ == "__main__":
    sys.exit(main())
