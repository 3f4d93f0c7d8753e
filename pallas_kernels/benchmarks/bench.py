"""Times tree attention beside the time its bytes take: `python -m pallas_kernels.benchmarks.bench`.

Prints a row for each number of query nodes and each backend, and for other libraries' attention
(`peers.py`) on the same question; writes the same as JSON.
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

from pallas_kernels.attention import choose_backend, tree_attention
from pallas_kernels.benchmarks import baselines
from pallas_kernels.benchmarks.bandwidth import copy_bandwidths, read_bandwidths
from pallas_kernels.benchmarks.shapes import (
    PRESETS,
    Shape,
    attentive,
    bench_shape,
    device_inputs,
    tree_mask,
)
from pallas_kernels.benchmarks.timing import calls_in_a_row, fastest_seconds
from pallas_kernels.mosaic_gpu import mosaic

OF_SHAPE = ("batch", "context", "kv_heads", "group", "head_dim", "nodes")  # what a preset gives


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
        prog="python -m pallas_kernels.benchmarks.bench",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, help="shapes by name, instead of sizes")
    parser.add_argument("--batch", type=_positive, default=4, help="rows B")
    parser.add_argument("--context", type=_positive, default=8192, help="slots S of the cache")
    parser.add_argument("--fill", type=_fraction, default=1.0, help="live share of the slots")
    parser.add_argument("--kv-heads", type=_positive, default=4, help="key/value heads K")
    parser.add_argument("--group", type=_positive, default=1, help="query heads per KV head, G")
    parser.add_argument("--head-dim", type=_positive, default=64, help="head size D")
    parser.add_argument("--nodes", default="1,2,4,5,8", help="query nodes T, separated by commas")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="float32 if not given, with --preset bfloat16",
    )
    parser.add_argument(
        "--backends", default="all", help="names separated by commas, or 'all' that serve it here"
    )
    parser.add_argument(
        "--peers", default="", help="names separated by commas, or 'all'; empty: none"
    )
    parser.add_argument(
        "--layers", type=_positive, default=4, help="caches read in turn, to overflow the CPU's"
    )
    parser.add_argument("--rounds", type=_positive, default=7, help="timings; the best one counts")
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser


def stacked(layers: Sequence[baselines.Inputs], lengths, mask, backend: str) -> baselines.Program:
    """Returns a compiled function of no arguments: attention in every layer, one after another.

    The function returns what each layer gave, [B, T, H, D].

    Args:
      layers: q, k_prefix, v_prefix, k_new, v_new of each; the first one's q is asked.
      lengths, mask: as for `tree_attention`.
      backend: a name from BACKENDS.
    """

    @jax.jit
    def run(q, caches, lengths, mask):
        outs = []
        for cache in caches:  # the output is the next query, so no two layers overlap
            q = tree_attention(q, **cache, lengths=lengths, mask=mask, backend=backend)
            outs.append(q)
        return outs

    caches = [{name: x for name, x in layer.items() if name != "q"} for layer in layers]
    return functools.partial(run, layers[0]["q"], caches, lengths, mask)


def measure(
    shape: Shape,
    dtype: jnp.dtype,
    backends: Sequence[str],
    *,
    others: Sequence[str] = (),
    fill: float = 1.0,
    layers: int = 4,
    rounds: int = 7,
) -> dict[str, dict[str, Any]]:
    """Returns for each backend and peer the seconds and the live bytes of one layer's attention.

    A peer that cannot be timed has `why` instead of seconds. Backends take turns; peers, which need
    caches of their own, are timed one after another.

    Args:
      shape: sizes of the call, T = N.
      dtype: of queries and caches.
      backends: names from BACKENDS; the first is what peers are checked against.
      others: names from `peers.PEERS`.
      fill: share of the slots that is live.
      layers: caches read in turn by one timing.
      rounds: timings; the best one counts.
    """
    inputs = [attentive(device_inputs(shape, dtype, seed)) for seed in range(layers)]
    live = max(1, round(fill * shape.slots))
    lengths, mask = jnp.full(shape.batch, live, jnp.int32), tree_mask(shape.nodes)
    programs = {name: stacked(inputs, lengths, jnp.asarray(mask), name) for name in backends}
    time_of = functools.partial(
        fastest_seconds, rounds=rounds, calls=calls_in_a_row(), wait=baselines.wait
    )
    entry = shape.kv_heads * shape.head_dim * jnp.dtype(dtype).itemsize
    size = 2 * shape.batch * (live + shape.new) * entry  # keys and values, read once
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": time / layers, "bytes": size} for name, time in time_of(programs).items()
    }
    if not others:
        return found
    ours = stacked(inputs[:1], lengths, jnp.asarray(mask), backends[0])()[0]
    for name in others:
        reason = baselines.why_not(name, inputs, mask, live, ours)
        if reason is None:
            try:
                time = time_of({name: baselines.make(name, inputs, mask, live)})[name]
            except Exception as error:  # another library's; ours are measured already
                reason = f"failed with all layers: {type(error).__name__}: {str(error)[:200]}"
            else:
                found[name] = {"seconds": time / layers, "bytes": size}
        if reason is not None:
            found[name] = {"why": reason, "bytes": size}
    return found


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


def best_backend(dtype: jnp.dtype, head_dim: int, device: jax.Device) -> str:
    """Returns the backend that is meant for this device: mosaic where it can run, else xla."""
    return "xla" if mosaic.why_not(dtype, head_dim, device) else "mosaic"


def _peers(names: str) -> list[str]:
    """Returns the peers of that name.

    Raises:
      ValueError: one is unknown.
    """
    chosen = list(baselines.PEERS) if names == "all" else [n for n in names.split(",") if n]
    unknown = [name for name in chosen if name not in baselines.PEERS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is unknown: use {', '.join(baselines.PEERS)}, or all")
    return chosen


def _shapes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Shape]:
    """Returns the shapes of a preset, or of the sizes that were given."""
    if options.preset:
        given = [n for n in OF_SHAPE if getattr(options, n) != parser.get_default(n)]
        if given:
            parser.error(f"--preset has its own --{given[0].replace('_', '-')}: leave one out")
        return list(PRESETS[options.preset])
    try:
        nodes = [_positive(text) for text in options.nodes.split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"--nodes {options.nodes}: {error}")
    sizes = options.batch, options.context, options.kv_heads, options.group, options.head_dim
    return [bench_shape(*sizes, count) for count in nodes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after printing the table; wrong arguments end the process with a message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    shapes = _shapes(parser, options)
    options.dtype = options.dtype or ("bfloat16" if options.preset else "float32")
    device, dtype = jax.devices()[0], jnp.dtype(options.dtype)
    try:
        backends = _backends(options.backends, dtype, shapes[0].head_dim, device)
        others = _peers(options.peers)
    except ValueError as error:
        parser.error(f"--backends, --peers: {error}")

    reads, copies = read_bandwidths(rounds=options.rounds), copy_bandwidths(rounds=options.rounds)
    read, copy = max(reads.values()), max(copies.values())
    print(f"{device.device_kind}, jax {jax.__version__}, default {choose_backend()}")
    for what, rates in (("read", reads), ("copy, read + written", copies)):
        print(what + " " + ", ".join(f"{name} {x / 1e9:.1f} GB/s" for name, x in rates.items()))
    print(
        f"{'B':>4} {'S':>7} {'T':>4} {'backend':<20} {'us/layer':>10} {'GB/s':>8} "
        f"{'% of read':>10} {'% of copy':>10}"
    )
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    about = {"device": device.device_kind, "jax": jax.__version__, "settings": settings}
    about |= {"read_bandwidth": reads, "copy_bandwidth": copies}
    timing = {"fill": options.fill, "layers": options.layers, "rounds": options.rounds}
    rows = []
    for shape in shapes:
        for name, result in measure(shape, dtype, backends, others=others, **timing).items():
            sizes = {"batch": shape.batch, "context": shape.slots, "nodes": shape.nodes}
            rows.append(sizes | {"backend": name} | _rates(result, read, copy))
            print(_line(rows[-1]), flush=True)
        if options.out:  # after every shape, so that a kill loses one at most
            write_json(options.out, about | {"rows": rows})
    return 0


def _rates(result: dict[str, Any], read: float, copy: float) -> dict[str, Any]:
    """Returns a result with its bytes per second, and their share of two bandwidths."""
    if "why" in result:
        return result
    rate = result["bytes"] / result["seconds"]
    shares = {"share_of_read_bandwidth": rate / read, "share_of_copy_bandwidth": rate / copy}
    return result | {"bytes_per_second": rate} | shares


def _line(row: dict[str, Any]) -> str:
    head = f"{row['batch']:>4} {row['context']:>7} {row['nodes']:>4} {row['backend']:<20} "
    if "why" in row:
        return head + row["why"]
    return head + (
        f"{row['seconds'] * 1e6:>10.1f} {row['bytes_per_second'] / 1e9:>8.1f} "
        f"{100 * row['share_of_read_bandwidth']:>10.1f} "
        f"{100 * row['share_of_copy_bandwidth']:>10.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
