"""Times every configuration of the Hopper kernel: `python -m pallas_kernels.benchmarks.tune`.

Writes the table that `hopper_config.choose_config` reads. The table is written after every timing,
so an interrupted run resumes with the next call. The configuration of the rule is timed first, so a
table never holds a slower one. A configuration whose result differs from the rule's is rejected.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmarks.bench import layered, write_json
from pallas_kernels.benchmarks.shapes import (
    PRESETS,
    Shape,
    bench_shape,
    device_inputs,
    emphasize_new_tokens,
    tree_mask,
)
from pallas_kernels.benchmarks.timing import fastest_seconds, queued_calls
from pallas_kernels.benchmarks.validate import TOLERANCE
from pallas_kernels.mosaic_gpu import mosaic, tuned
from pallas_kernels.mosaic_gpu.hopper_config import (
    Config,
    candidates,
    multiprocessors,
    table,
    using,
)

DTYPE = "bfloat16"
LAYERS = 4


def key_of(shape: Shape) -> tuned.Key:
    """Returns the key of a shape in a table."""
    heads, rows = shape.batch * shape.kv_heads, shape.nodes * shape.group
    return tuned.Key(heads, rows, shape.slots, shape.head_dim)


class Timer:
    """Times configurations on one shape.

    Attributes:
      expected: the result of the rule's configuration.
    """

    def __init__(self, shape: Shape, rule: Config):
        dtype = jnp.dtype(DTYPE)
        layers = [emphasize_new_tokens(device_inputs(shape, dtype, i)) for i in range(LAYERS)]
        lengths = jnp.full(shape.batch, shape.slots, jnp.int32)
        self.arguments = layers, lengths, jnp.asarray(tree_mask(shape.nodes)), "mosaic"
        with using(rule):
            self.expected = np.asarray(layered(*self.arguments)()[0], np.float32)

    def seconds(self, config: Config) -> float | None:
        """Returns the shortest time of a layer, or None if the result differs from the rule's.

        The tolerance covers the rounding errors of both.
        """
        with using(config):
            program = layered(*self.arguments)
            out = np.asarray(program()[0], np.float32)
            error = np.linalg.norm(out - self.expected) / np.linalg.norm(self.expected)
            if not error <= TOLERANCE[DTYPE]:
                return None
            return fastest_seconds({"": program}, calls=queued_calls())[""] / LAYERS


def entry_of(timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns an entry of a table: the fastest configuration and all timings.

    Args:
      timings: each has `config` and either `seconds` or `failed`; the rule's comes first.
    """
    timed = [t for t in timings if "seconds" in t]
    best = min(timed, key=lambda t: t["seconds"])
    times = {"seconds": best["seconds"], "seconds_by_rule": timed[0]["seconds"]}
    return {"config": best["config"]} | times | {"timings": timings}


def write_table(
    path: pathlib.Path, about: Mapping[str, Any], entries: Mapping[tuned.Key, Mapping]
) -> None:
    """Writes a table, as `tuned.read` reads it."""
    rows = [key._asdict() | dict(entry) for key, entry in sorted(entries.items())]
    write_json(path, {**about, "entries": rows})


def tune(
    shapes: Sequence[Shape],
    path: pathlib.Path,
    about: dict[str, Any],
    *,
    seconds: float,
    make: Any = Timer,
) -> bool:
    """Times all configurations that are not in the table yet; returns whether all are timed.

    Args:
      shapes: to time.
      path: of the table.
      about: metadata of the table.
      seconds: no timing starts after this time; the remaining shapes share the remaining time.
      make: makes the Timer of a shape.
    """
    entries, end, done = tuned.read(path), time.monotonic() + seconds, True
    for i, shape in enumerate(shapes):
        key = key_of(shape)
        shape_end = time.monotonic() + (end - time.monotonic()) / (len(shapes) - i)
        configs = candidates(*key, multiprocessors())
        timings = list(entries[key]["timings"]) if key in entries else []
        timed = [t["config"] for t in timings]
        timer = None

        def save(timings: list[dict[str, Any]], key: tuned.Key = key) -> None:
            if timings:
                entries[key] = entry_of(timings)
                write_table(path, about, entries)

        for config in configs:
            fields = dataclasses.asdict(config)
            if fields in timed:
                continue
            if time.monotonic() >= shape_end:
                done = False
                break
            timer = timer or make(shape, configs[0])
            before = list(timings)
            # A configuration that hangs must not be timed again by the next call.
            timings.append({"config": fields, "failed": "started, but did not finish"})
            if before:
                save(timings)
            try:
                timings[-1] = {"config": fields} | _time(timer, config, is_rule=not before)
            except KeyboardInterrupt:
                save(before)
                raise
            save(timings)
        print(_line(shape, entries.get(key), len(timings), len(configs)), flush=True)
    return done


def _time(timer: Any, config: Config, is_rule: bool) -> dict[str, Any]:
    """Returns the seconds, or why a configuration failed; the rule's must not fail."""
    try:
        seconds = timer.seconds(config)
    except Exception as error:  # out of memory, unsupported sizes, or errors of the compiler
        if is_rule:
            raise
        # After a fault of the device, later timings in this process would fail too.
        jax.block_until_ready(jnp.arange(8).sum())
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"seconds": seconds} if seconds else {"failed": "its result differs from the rule's"}


def _line(shape: Shape, entry: dict[str, Any] | None, timed: int, total: int) -> str:
    head = f"{shape}: {timed} of {total} timed"
    if entry is None:
        return head
    microseconds, by_rule = 1e6 * entry["seconds"], 1e6 * entry["seconds_by_rule"]
    failed = sum("failed" in t for t in entry["timings"])
    best = Config(**entry["config"])
    return f"{head}, {failed} failed; {best} {microseconds:.1f} us, the rule's {by_rule:.1f} us"


def _shape(text: str) -> Shape:
    """Returns the shape of a text B,S,K,G,D,T."""
    try:
        batch, slots, kv_heads, group, head_dim, nodes = map(int, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must have the form B,S,K,G,D,T") from error
    return bench_shape(batch, slots, kv_heads, group, head_dim, nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if everything is timed, 3 if time ran out; the next call resumes."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.benchmarks.tune",
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="hopper", help="shapes to time")
    parser.add_argument("--shape", type=_shape, nargs="+", help="B,S,K,G,D,T instead of a preset")
    parser.add_argument("--seconds", type=float, default=420, help="start no timing after this")
    parser.add_argument("--list", action="store_true", help="print the configurations, on any CPU")
    options = parser.parse_args(arguments)
    shapes, device = options.shape or PRESETS[options.preset], jax.devices()[0]
    if options.list:
        for shape in shapes:
            for config in candidates(*key_of(shape), multiprocessors()):
                print(f"{shape}: {config}")
        return 0
    for shape in shapes:
        reason = mosaic.unsupported_reason(jnp.dtype(DTYPE), shape.head_dim, device)
        if reason:
            parser.error(f"the kernel {reason}; --list prints the configurations on any device")
    path = tuned.path_of(device.device_kind)
    about = {"device": device.device_kind, "jax": jax.__version__, "dtype": DTYPE}
    done = tune(shapes, path, about, seconds=options.seconds)
    table.cache_clear()  # a later call in this process reads the new table
    print(f"wrote {path}" + ("" if done else "; time ran out: rerun the command to resume"))
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
