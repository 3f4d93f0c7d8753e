"""Times tree attention beside the time its bytes take: `python -m pallas_kernels.bench`.

Prints a row for each number of query nodes and each backend, and writes the same as JSON.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.attention import choose_backend, tree_attention
from pallas_kernels.bandwidth import read_bandwidths
from pallas_kernels.shapes import Shape, bench_shape, random_inputs
from pallas_kernels.timing import fastest_seconds


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0 and at most 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=_positive, default=4, help="rows B")
    parser.add_argument("--context", type=_positive, default=8192, help="slots S of the cache")
    parser.add_argument("--fill", type=_fraction, default=1.0, help="live share of the slots")
    parser.add_argument("--kv-heads", type=_positive, default=4, help="key/value heads K")
    parser.add_argument("--group", type=_positive, default=1, help="query heads per KV head, G")
    parser.add_argument("--head-dim", type=_positive, default=64, help="head size D")
    parser.add_argument("--nodes", default="1,2,4,5,8", help="query nodes T, separated by commas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--backends", default="all", help="names separated by commas, or 'all' that serve it here"
    )
    parser.add_argument(
        "--layers", type=_positive, default=4, help="caches read in turn, to overflow the CPU's"
    )
    parser.add_argument("--rounds", type=_positive, default=7, help="timings; the best one counts")
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser


def _stack(layers: list[dict], lengths, mask, backend: str):
    """Returns a compiled function of no arguments: attention in every layer, one after another."""

    @jax.jit
    def run(q, layers, lengths, mask):
        for layer in layers:  # the output is the next query, so no two layers overlap
            q = tree_attention(q, **layer, lengths=lengths, mask=mask, backend=backend)
        return q

    layers = [dict(layer) for layer in layers]
    queries = [layer.pop("q") for layer in layers]
    return functools.partial(run, queries[0], layers, lengths, mask)


def measure(
    shape: Shape,
    dtype: jnp.dtype,
    backends: Sequence[str],
    *,
    fill: float = 1.0,
    layers: int = 4,
    rounds: int = 7,
) -> dict[str, dict[str, float]]:
    """Returns for each backend the seconds and the live bytes of one layer's attention.

    Args:
      shape: sizes of the call, T = N.
      dtype: of queries and caches.
      backends: names from BACKENDS.
      fill: share of the slots that is live.
      layers: caches read in turn by one timing.
      rounds: timings; the best one counts.
    """
    inputs = [random_inputs(shape, dtype, seed) for seed in range(layers)]
    live = max(1, round(fill * shape.slots))
    lengths = jnp.full(shape.batch, live, jnp.int32)
    mask = jnp.tri(shape.nodes, shape.new, dtype=bool)
    programs = {name: _stack(inputs, lengths, mask, name) for name in backends}
    seconds = fastest_seconds(programs, rounds=rounds)
    entry = shape.kv_heads * shape.head_dim * jnp.dtype(dtype).itemsize
    size = 2 * shape.batch * (live + shape.new) * entry  # keys and values, read once
    return {name: {"seconds": time / layers, "bytes": size} for name, time in seconds.items()}


def _backends(names: str, dtype: jnp.dtype, head_dim: int, device: jax.Device) -> list[str]:
    """Returns the backends of that name; of `all` those that serve such a call at full speed."""
    if names != "all":
        return [choose_backend(name, dtype, head_dim, device) for name in names.split(",")]
    mosaic_too = mosaic.why_not(dtype, head_dim, device) is None
    return ["reference", "xla"] + ["mosaic"] * mosaic_too


def write_json(path: str, content: Any) -> None:
    """Writes a JSON file under a temporary name first, so that a kill leaves no half of one."""
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
    os.replace(partial, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after printing the table; wrong arguments end the process with a message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        nodes = [_positive(text) for text in options.nodes.split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"--nodes {options.nodes}: {error}")
    device, dtype = jax.devices()[0], jnp.dtype(options.dtype)
    try:
        backends = _backends(options.backends, dtype, options.head_dim, device)
    except ValueError as error:
        parser.error(f"--backends: {error}")

    bandwidths = read_bandwidths(rounds=options.rounds)
    bandwidth = max(bandwidths.values())
    print(f"{device.device_kind}, jax {jax.__version__}, default {choose_backend()}")
    print("read " + ", ".join(f"{name} {x / 1e9:.1f} GB/s" for name, x in bandwidths.items()))
    print(f"{'T':>4} {'backend':<10} {'us/layer':>10} {'GB/s':>8} {'% of read':>10}")
    rows = []
    for count in nodes:
        shape = bench_shape(
            options.batch,
            options.context,
            options.kv_heads,
            options.group,
            options.head_dim,
            count,
        )
        measured = measure(
            shape,
            dtype,
            backends,
            fill=options.fill,
            layers=options.layers,
            rounds=options.rounds,
        )
        for name, result in measured.items():
            rate = result["bytes"] / result["seconds"]
            row = {"nodes": count, "backend": name, **result, "bytes_per_second": rate}
            rows.append(row | {"share_of_read_bandwidth": rate / bandwidth})
            print(
                f"{count:>4} {name:<10} {result['seconds'] * 1e6:>10.1f} {rate / 1e9:>8.1f} "
                f"{100 * rate / bandwidth:>10.1f}",
                flush=True,
            )
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        about = {"device": device.device_kind, "jax": jax.__version__, "settings": settings}
        write_json(options.out, about | {"read_bandwidth": bandwidths, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
