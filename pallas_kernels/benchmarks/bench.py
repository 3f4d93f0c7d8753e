"""Times tree attention against the memory bandwidth: `python -m pallas_kernels.benchmarks.bench`.

Prints a row for each number of query nodes and each backend, and for the attention of other
libraries (`baselines.py`) on the same inputs, and writes the rows as JSON.
"""

import argparse
import functools
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import choose_backend, kernel_for, tree_attention
from pallas_kernels.benchmarks import baselines
from pallas_kernels.benchmarks.bandwidth import copy_bandwidths, read_bandwidths
from pallas_kernels.benchmarks.shapes import (
    PRESETS,
    Shape,
    bench_shape,
    device_inputs,
    emphasize_new_tokens,
    tree_mask,
)
from pallas_kernels.benchmarks.timing import fastest_seconds, queued_calls

FIGURES = ("us/layer", "GB/s", "% of read", "% of copy")
SIZES = ("batch", "context", "kv_heads", "group", "head_dim", "nodes")  # that a preset sets


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{value} must be above 0 and at most 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.benchmarks.bench",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, help="named shapes, instead of sizes")
    parser.add_argument("--batch", type=_positive, default=4, help="rows B")
    parser.add_argument("--context", type=_positive, default=8192, help="slots S of the cache")
    parser.add_argument(
        "--fill", type=_fraction, default=1.0, help="fraction of the slots that is live"
    )
    parser.add_argument("--kv-heads", type=_positive, default=4, help="key/value heads K")
    parser.add_argument("--group", type=_positive, default=1, help="query heads per KV head, G")
    parser.add_argument("--head-dim", type=_positive, default=64, help="head size D")
    parser.add_argument("--nodes", default="1,2,4,5,8", help="query nodes T, separated by commas")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32, or bfloat16 with --preset",
    )
    parser.add_argument(
        "--backends",
        default="all",
        help="names separated by commas, or all that are supported here",
    )
    parser.add_argument(
        "--baselines", default="", help="other libraries, separated by commas, or all"
    )
    parser.add_argument(
        "--layers", type=_positive, default=4, help="caches per timing, to exceed processor caches"
    )
    parser.add_argument("--repeats", type=_positive, default=7, help="timings; the shortest counts")
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser


def layered(layers: Sequence[baselines.Inputs], lengths, mask, backend: str) -> baselines.Program:
    """Returns a compiled function without arguments that runs attention layer after layer.

    The function returns the output of each layer, [B, T, H, D].

    Args:
      layers: q, k_prefix, v_prefix, k_new, v_new of each layer; only the first q is used.
      lengths, mask: as for `tree_attention`.
      backend: a name from BACKENDS.
    """

    @jax.jit
    def run(q, caches, lengths, mask):
        outs = []
        for cache in caches:  # the output is the next query, so layers do not overlap
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
    baseline_names: Sequence[str] = (),
    fill: float = 1.0,
    layers: int = 4,
    repeats: int = 7,
) -> dict[str, dict[str, Any]]:
    """Returns the seconds and live bytes of one layer's attention by backend and baseline.

    A baseline that cannot be timed has the reason in `skipped` instead of seconds. Timings of
    backends are interleaved. Baselines, which need separate caches, are timed one after another.

    Args:
      shape: sizes of the call, T = N.
      dtype: dtype of queries and caches.
      backends: names from BACKENDS; baselines are checked against the first.
      baseline_names: names from `baselines.BASELINES`.
      fill: fraction of the slots that is live.
      layers: caches that one timing reads.
      repeats: timings; the shortest counts.
    """
    inputs = [emphasize_new_tokens(device_inputs(shape, dtype, seed)) for seed in range(layers)]
    live = max(1, round(fill * shape.slots))
    lengths, mask = jnp.full(shape.batch, live, jnp.int32), tree_mask(shape.nodes)
    programs = {name: layered(inputs, lengths, jnp.asarray(mask), name) for name in backends}
    time_of = functools.partial(
        fastest_seconds, repeats=repeats, calls=queued_calls(), wait=baselines.wait
    )
    entry = shape.kv_heads * shape.head_dim * jnp.dtype(dtype).itemsize
    size = 2 * shape.batch * (live + shape.new) * entry  # keys and values, read once
    results: dict[str, dict[str, Any]] = {
        name: {"seconds": time / layers, "bytes": size} for name, time in time_of(programs).items()
    }
    if not baseline_names:
        return results
    expected = layered(inputs[:1], lengths, jnp.asarray(mask), backends[0])()[0]
    for name in baseline_names:
        reason = baselines.skip_reason(name, inputs, mask, live, expected)
        if reason is None:
            try:
                time = time_of({name: baselines.make_program(name, inputs, mask, live)})[name]
            except Exception as error:  # of another library; keep the other results
                reason = f"failed with all layers: {type(error).__name__}: {str(error)[:200]}"
            else:
                results[name] = {"seconds": time / layers, "bytes": size}
        if reason is not None:
            results[name] = {"skipped": reason}
    return results


def _backends(names: str, dtype: jnp.dtype, head_dim: int, device: jax.Device) -> list[str]:
    """Returns the named backends, once; `all` excludes interpreted ones, `best` is the kernel."""
    if names != "all":
        best = best_backend(dtype, head_dim, device)
        named = [best if name == "best" else name for name in names.split(",")]
        return list(dict.fromkeys(choose_backend(name, dtype, head_dim, device) for name in named))
    kernel = kernel_for(dtype, head_dim, device)
    return ["reference", "xla", *([kernel] if kernel else [])]


def write_json(path: str | pathlib.Path, content: Any) -> None:
    """Writes a JSON file under a temporary name, then renames it; creates the folder."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    partial.replace(path)


def best_backend(dtype: jnp.dtype, head_dim: int, device: jax.Device) -> str:
    """Returns the kernel for a device, whether or not it passed its self-check, or the default."""
    return kernel_for(dtype, head_dim, device) or choose_backend(device=device)


def _baselines(names: str) -> list[str]:
    """Returns the named baselines.

    Raises:
      ValueError: a name is unknown.
    """
    known = list(baselines.BASELINES)
    chosen = known if names == "all" else [n for n in names.split(",") if n]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is unknown: use {', '.join(known)}, or all")
    return chosen


def _shapes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Shape]:
    """Returns the shapes of the preset or of the sizes."""
    if options.preset:
        changed = [n for n in SIZES if getattr(options, n) != parser.get_default(n)]
        if changed:
            parser.error(f"--preset sets --{changed[0].replace('_', '-')}: omit one of the two")
        return list(PRESETS[options.preset])
    try:
        nodes = [_positive(text) for text in options.nodes.split(",")]
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"--nodes {options.nodes}: {error}")
    sizes = options.batch, options.context, options.kv_heads, options.group, options.head_dim
    return [bench_shape(*sizes, count) for count in nodes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and returns 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    shapes = _shapes(parser, options)
    options.dtype = options.dtype or ("bfloat16" if options.preset else "float32")
    device, dtype = jax.devices()[0], jnp.dtype(options.dtype)
    try:
        backends = _backends(options.backends, dtype, shapes[0].head_dim, device)
        baseline_names = _baselines(options.baselines)
    except ValueError as error:
        parser.error(f"--backends, --baselines: {error}")

    reads, copies = (
        read_bandwidths(repeats=options.repeats),
        copy_bandwidths(repeats=options.repeats),
    )
    read, copy = max(reads.values()), max(copies.values())
    print(f"{device.device_kind}, jax {jax.__version__}, default {choose_backend()}")
    for name, rates in (("read", reads), ("copy, read + written", copies)):
        print(name, ", ".join(f"{kernel} {x / 1e9:.1f} GB/s" for kernel, x in rates.items()))
    print(
        f"{'B':>4} {'S':>7} {'T':>4} {'backend':<20} "
        + " ".join(name.rjust(10) for name in FIGURES)
    )
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    about = {"device": device.device_kind, "jax": jax.__version__, "settings": settings}
    about |= {"read_bandwidth": reads, "copy_bandwidth": copies}
    timing = {name: getattr(options, name) for name in ("fill", "layers", "repeats")}
    timing["baseline_names"] = baseline_names
    rows = []
    for shape in shapes:
        for name, result in measure(shape, dtype, backends, **timing).items():
            sizes = {"batch": shape.batch, "context": shape.slots, "nodes": shape.nodes}
            rows.append(sizes | {"backend": name} | _columns(result, read, copy))
            print(_line(rows[-1]), flush=True)
        if options.out:  # after every shape, so that an interrupted run keeps its results
            write_json(options.out, about | {"rows": rows})
    return 0


def _columns(result: dict[str, Any], read: float, copy: float) -> dict[str, Any]:
    """Returns a result as the columns of the table."""
    if "skipped" in result:
        return result
    rate = result["bytes"] / result["seconds"]
    times = {"us/layer": 1e6 * result["seconds"], "GB/s": 1e-9 * rate}
    return times | {"% of read": 100 * rate / read, "% of copy": 100 * rate / copy}


def _line(row: dict[str, Any]) -> str:
    head = f"{row['batch']:>4} {row['context']:>7} {row['nodes']:>4} {row['backend']:<20} "
    return head + (row.get("skipped") or " ".join(f"{row[name]:>10.1f}" for name in FIGURES))


if __name__ == "__main__":
    sys.exit(main())
