"""Times every way to divide the Hopper kernel's work: `python -m pallas_kernels.benchmarks.tune`.

Writes the table that `hopper_config.choose_config` reads, after every timing, so that a kill loses
one and the next call goes on from there. The rule's own choice is timed first: a table never holds
anything slower. A configuration whose result differs from the rule's is reported and left out.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmarks.bench import stacked
from pallas_kernels.benchmarks.shapes import (
    PRESETS,
    Shape,
    attentive,
    bench_shape,
    device_inputs,
    tree_mask,
)
from pallas_kernels.benchmarks.timing import calls_in_a_row, fastest_seconds
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
    """Returns the sizes by which a table knows a shape."""
    heads, rows = shape.batch * shape.kv_heads, shape.nodes * shape.group
    return tuned.Key(heads, rows, shape.slots, shape.head_dim)


class Timer:
    """Times configurations on one shape, with inputs of its own.

    Attributes:
      wanted: the result of the rule's own configuration, which others must give too.
    """

    def __init__(self, shape: Shape, rule: Config):
        dtype = jnp.dtype(DTYPE)
        layers = [attentive(device_inputs(shape, dtype, seed)) for seed in range(LAYERS)]
        lengths = jnp.full(shape.batch, shape.slots, jnp.int32)
        self.call = layers, lengths, jnp.asarray(tree_mask(shape.nodes)), "mosaic"
        with using(rule):
            self.wanted = np.asarray(stacked(*self.call)()[0], np.float32)

    def seconds(self, config: Config) -> float | None:
        """Returns the shortest time of a layer, or None if the result is another than the rule's.

        Another beyond rounding: both err by so much.
        """
        with using(config):
            program = stacked(*self.call)
            found = np.asarray(program()[0], np.float32)
            off = np.linalg.norm(found - self.wanted) / np.linalg.norm(self.wanted)
            if not off <= TOLERANCE[DTYPE]:
                return None
            return fastest_seconds({"it": program}, calls=calls_in_a_row())["it"] / LAYERS


def entry_of(timings: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns an entry of a table: the fastest configuration, and every time that was taken.

    Args:
      timings: each has `config` and `seconds`, or `failed`; the rule's own comes first.
    """
    timed = [t for t in timings if "seconds" in t]
    best = min(timed, key=lambda t: t["seconds"])
    times = {"seconds": best["seconds"], "seconds_by_rule": timed[0]["seconds"]}
    return {"config": best["config"]} | times | {"timings": timings}


def tune(
    shapes: Sequence[Shape],
    path: pathlib.Path,
    about: dict[str, Any],
    *,
    seconds: float,
    make: Any = Timer,
) -> bool:
    """Returns whether everything has been timed; what is in the table already is not timed again.

    Args:
      shapes: to time.
      path: of the table.
      about: what the table says of itself.
      seconds: begin no further timing after so long; shapes share what is left.
      make: makes the Timer of a shape.
    """
    entries, end, done = tuned.read(path), time.monotonic() + seconds, True
    for i, shape in enumerate(shapes):
        key = key_of(shape)
        left = (end - time.monotonic()) / (len(shapes) - i)
        shape_end = time.monotonic() + left
        configs = candidates(*key, multiprocessors())
        timings = list(entries[key]["timings"]) if key in entries else []
        there = [t["config"] for t in timings]
        timer = None
        for config in configs:
            fields = dataclasses.asdict(config)
            if fields in there:
                continue
            if time.monotonic() >= shape_end:
                done = False
                break
            timer = timer or make(shape, configs[0])
            by_rule = not timings
            timings.append({"config": fields, "failed": "begun, and did not end"})
            if not by_rule:  # or a configuration that hangs would be the first again and again
                entries[key] = entry_of(timings)
                tuned.write(path, about, entries)
            try:
                timings[-1] = {"config": fields} | _time(timer, config, by_rule)
            except KeyboardInterrupt:
                if not by_rule:
                    entries[key] = entry_of(timings[:-1])
                    tuned.write(path, about, entries)
                raise
            entries[key] = entry_of(timings)
            tuned.write(path, about, entries)
        print(_line(shape, entries.get(key), len(timings), len(configs)), flush=True)
    return done


def _time(timer: Any, config: Config, by_rule: bool) -> dict[str, Any]:
    """Returns the seconds, or why a configuration cannot be used; the rule's own must be usable."""
    try:
        seconds = timer.seconds(config)
    except Exception as error:  # too little memory, sizes refused, or the compiler's own faults
        if by_rule:
            raise
        # A fault of the device stays: what is timed after it in this process would fail too.
        jax.block_until_ready(jnp.arange(8).sum())
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"seconds": seconds} if seconds else {"failed": "its result differs from the rule's"}


def _line(shape: Shape, entry: dict[str, Any] | None, timed: int, all_of_them: int) -> str:
    head = f"{shape}: {timed} of {all_of_them} timed"
    if entry is None:
        return head
    microseconds, by_rule = 1e6 * entry["seconds"], 1e6 * entry["seconds_by_rule"]
    failed = sum("failed" in t for t in entry["timings"])
    best = Config(**entry["config"])
    return f"{head}, {failed} failed; {best} {microseconds:.1f} us, the rule's {by_rule:.1f} us"


def _shape(text: str) -> Shape:
    """Returns the shape written as B,S,K,G,D,T."""
    try:
        batch, slots, kv_heads, group, head_dim, nodes = map(int, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not written B,S,K,G,D,T") from error
    return bench_shape(batch, slots, kv_heads, group, head_dim, nodes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all is timed, 3 if time ran out: call it again to go on."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.benchmarks.tune",
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="hopper", help="shapes to time")
    parser.add_argument("--shape", type=_shape, nargs="+", help="B,S,K,G,D,T instead of a preset")
    parser.add_argument("--seconds", type=float, default=420, help="begin nothing new after")
    parser.add_argument("--list", action="store_true", help="print what would be timed, on any CPU")
    options = parser.parse_args(arguments)
    shapes, device = options.shape or PRESETS[options.preset], jax.devices()[0]
    if options.list:
        for shape in shapes:
            for config in candidates(*key_of(shape), multiprocessors()):
                print(f"{shape}: {config}")
        return 0
    for shape in shapes:
        reason = mosaic.why_not(jnp.dtype(DTYPE), shape.head_dim, device)
        if reason:
            parser.error(f"the kernel {reason}; --list prints what would be timed")
    path = tuned.path_of(device.device_kind)
    about = {"device": device.device_kind, "jax": jax.__version__, "dtype": DTYPE}
    done = tune(shapes, path, about, seconds=options.seconds)
    table.cache_clear()  # a later call in this process reads the new one
    print(f"written to {path}" + ("" if done else "; time ran out: call it again to go on"))
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
