"""`magicjax calibrate`: measures this device, and fits the constants that plans are made with.

Read bandwidth and the rate of matrix products are measured by themselves. Plain steps, passes over
n nodes and whole rounds are timed on a small grid (`magicjax.bench`), and the shares of those two
rates that decoding reaches, the time of a layer and that of a round are what fits them best. A
draft's time is within its round's: alone it would be a difference, and mostly noise where drafts
are cheap. Links between devices are not measured.
"""

import argparse
import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from magicjax import bench, costs
from magicjax.costs.profile import device_kind
from magicjax.costs.work import Part
from magicjax.generation import load
from pallas_kernels.bandwidth import read_bandwidth
from pallas_kernels.timing import fastest_seconds

MATRIX_SIZE = {"cpu": 2048}
MATRIX_SIZE_ELSEWHERE = 8192
EFFICIENCIES = np.geomspace(0.02, 1.0, 80)
TILES = (1, 2, 4, 8)
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Timed:
    """A step, timed.

    Attributes:
      batch, context: B, and the tokens of a row.
      nodes: of the pass; 1 of plain decoding.
      budget: of a self-speculating draft of nodes - 1 tokens before the pass; None: no draft.
      seconds: measured; where there are several nodes, with what a round adds.
    """

    batch: int
    context: int
    nodes: int
    budget: int | None
    seconds: float

    @property
    def name(self) -> str:
        if self.nodes == 1:
            return "plain"
        return f"verify {self.nodes}" if self.budget is None else f"round {self.budget}"


def matrix_rate(dtype: str, *, rounds: int = 5) -> float:
    """Returns the FLOP a second of a product of two large matrices on this device."""
    size = MATRIX_SIZE.get(jax.default_backend(), MATRIX_SIZE_ELSEWHERE)
    a, b = (jnp.full((size, size), value, dtype) for value in (0.5, 0.25))
    product = functools.partial(jax.jit(jnp.matmul), a, b)
    return 2 * size**3 / fastest_seconds({"product": product}, rounds=rounds)["product"]


def timed_grid(
    setup: bench.Setup,
    batches: Sequence[int],
    contexts: Sequence[int],
    nodes: Sequence[int],
    budgets: Sequence[int],
    *,
    gamma: int,
    turns: int,
) -> list[Timed]:
    """Returns plain steps, passes and rounds, timed at every batch and context.

    All are timed in several turns, and the shortest time counts: a busy moment meets one turn.
    """
    shortest: dict[tuple[int, int, int, int | None], float] = {}

    def time(batch: int, context: int, n: int, budget: int | None, *, seconds: float) -> None:
        place = batch, context, n, budget
        shortest[place] = min(seconds, shortest.get(place, np.inf))

    for _, batch, context in itertools.product(range(turns), batches, contexts):
        times = bench.measure(setup, batch, context, nodes, budgets, [gamma])
        time(batch, context, 1, None, seconds=times.target)
        for n, seconds in times.verify.items():
            time(batch, context, n, None, seconds=seconds)
        for (budget, _), seconds in times.draft.items():
            whole = times.verify[gamma + 1] + gamma * seconds
            time(batch, context, gamma + 1, budget, seconds=whole)
    return sorted(
        (Timed(*place, seconds) for place, seconds in shortest.items()),
        key=lambda row: (row.batch, row.context, row.budget or 0, row.nodes),
    )


def fit(
    sizes: costs.Sizes, rows: Sequence[Timed], device: costs.Device
) -> tuple[costs.Device, Float[np.ndarray, "rows"]]:
    """Returns (the device with fitted constants, what it then foretells of each row in seconds).

    The sum of squared logarithms of foretold / measured is smallest: efficiencies and tile are
    searched; the times of a layer and a round follow from them, by least relative squares.

    Args:
      sizes: of the model that was timed.
      rows: what was timed.
      device: with the rates that were measured.
    """
    measured = np.array([row.seconds for row in rows])
    fixed = np.array([[_layers(sizes, row), row.nodes > 1] for row in rows], float)
    best = (np.inf, device)
    for tile in TILES:
        tiled = dataclasses.replace(device, tile=tile)
        parts = [_parts(sizes, row, tiled) for row in rows]
        read = _table(parts, "bytes") / device.bandwidth
        worked = _table(parts, "flops") / device.matrix_rate
        for bandwidth_share in EFFICIENCIES:
            # For all shares of the matrix rate at once: [shares, rows].
            moved = np.maximum(read / bandwidth_share, worked / EFFICIENCIES[:, None, None]).sum(2)
            times = _non_negative(fixed / measured[:, None], (measured - moved) / measured)
            errors = (np.log((moved + times @ fixed.T) / measured) ** 2).sum(1)
            place = int(errors.argmin())
            if errors[place] < best[0]:
                layer, of_round = map(float, times[place])
                best = (
                    float(errors[place]),
                    dataclasses.replace(
                        tiled,
                        bandwidth_efficiency=float(bandwidth_share),
                        matrix_efficiency=float(EFFICIENCIES[place]),
                        layer_seconds=layer,
                        round_seconds=of_round,
                    ),
                )
    return best[1], np.array([foretold(sizes, row, best[1]) for row in rows])


def foretold(sizes: costs.Sizes, row: Timed, device: costs.Device) -> float:
    """Returns the seconds that a device of these constants would take."""
    parts = {str(i): part for i, part in enumerate(_parts(sizes, row, device))}
    rest = device.round_seconds if row.nodes > 1 else 0.0
    return sum(costs.seconds(parts, device).values()) + rest


def _parts(sizes: costs.Sizes, row: Timed, device: costs.Device) -> list[Part]:
    """Returns the parts of the pass, and those of every draft step before it."""
    passes = functools.partial(costs.pass_parts, sizes, costs.Machine(device), row.batch)
    parts = [*passes(row.nodes, row.context).values()]
    if row.budget is not None:
        parts += [*passes(1, min(row.budget, row.context)).values()] * (row.nodes - 1)
    return parts


def _layers(sizes: costs.Sizes, row: Timed) -> int:
    """Returns the layers that are started."""
    return sizes.num_layers * (1 if row.budget is None else row.nodes)


def _table(parts: Sequence[Sequence[Part]], name: str) -> Float[np.ndarray, "rows parts"]:
    """Returns one number of all parts, rows of fewer filled with zeros."""
    most = max(map(len, parts))
    rows = [[getattr(part, name) for part in row] + [0.0] * (most - len(row)) for row in parts]
    return np.array(rows)


def _non_negative(
    columns: Float[np.ndarray, "rows two"], wanted: Float[np.ndarray, "cases rows"]
) -> Float[np.ndarray, "cases two"]:
    """Returns least-squares solutions without negative numbers, by trying which are zero."""
    least, found = (wanted**2).sum(1), np.zeros((len(wanted), 2))
    for kept in ([0], [1], [0, 1]):
        x = np.zeros_like(found)
        x[:, kept] = wanted @ np.linalg.pinv(columns[:, kept]).T
        errors = ((x @ columns.T - wanted) ** 2).sum(1)
        better = (x >= 0).all(1) & (errors < least)
        least[better], found[better] = errors[better], x[better]
    return found


def memory_of_device() -> float:
    """Returns the bytes that this device's programs can use."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def add(commands: Any) -> None:
    """Adds the sub-command to those of `magicjax`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this device for `magicjax plan`",
        description="Times the parts of decoding on this device, fits the constants of the cost "
        "model, and writes them as a profile for `magicjax plan --device FILE.json`.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", required=True, help="the profile, a .json file")
    parser.add_argument("--target", default="llama-3.2-1b", help="preset or model directory")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 5, 8], help="of T_verify")
    parser.add_argument("--budget", type=int, nargs="+", default=[64, 256], help="of T_draft")
    parser.add_argument("--gamma", type=int, default=3, help="drafted tokens of a round")
    parser.add_argument("--steps", type=int, default=5, help="timed in a turn; the median counts")
    parser.add_argument("--turns", type=int, default=3, help="the shortest turn counts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints the fit, and writes the profile.

    Raises:
      ValueError, OSError: what `magicjax` prints before it ends.
    """
    if not arguments.out.endswith(".json"):
        raise ValueError(f"--out {arguments.out}: a profile is a .json file")
    for name, least in (
        ("batch", 1),
        ("context", 1),
        ("nodes", 2),
        ("gamma", 1),
        ("steps", 1),
        ("turns", 1),
    ):
        lowest = np.min(getattr(arguments, name))
        if lowest < least:
            raise ValueError(f"--{name} {lowest} must be at least {least}")
    target = load(arguments.target, dtype=arguments.dtype)
    setup = bench.Setup(target, steps=arguments.steps)
    for context in arguments.context:
        bench.request_of(setup, 1, context, None, None)  # says what is wrong before measuring
    device = costs.Device(
        name=device_kind(),
        bandwidth=read_bandwidth(),
        matrix_rate=matrix_rate(arguments.dtype),
        memory=memory_of_device(),
        link=None,
        dtype=arguments.dtype,
    )
    print(
        f"{device.name}: reads {device.bandwidth / 1e9:.1f} GB/s, multiplies "
        f"{device.matrix_rate / 1e12:.3g} TFLOP/s in {device.dtype}",
        flush=True,
    )
    grid = arguments.batch, arguments.context, arguments.nodes, arguments.budget
    rows = timed_grid(setup, *grid, gamma=arguments.gamma, turns=arguments.turns)
    sizes = costs.sizes_of(target.config, arguments.dtype, arguments.target)
    device, times = fit(sizes, rows, device)
    for row, seconds in zip(rows, times, strict=True):
        print(_line(row, seconds))
    print(_constants(device, rows, times))
    measured = [dataclasses.asdict(row) for row in rows]
    costs.save_profile(arguments.out, device, {"target": arguments.target, "rows": measured})
    print(f"written to {arguments.out}")


def _line(row: Timed, seconds: float) -> str:
    return (
        f"batch {row.batch:3}  context {row.context:6}  {row.name:11} {1e3 * row.seconds:9.3f} ms, "
        f"fitted {1e3 * seconds:9.3f} {seconds / row.seconds - 1:+7.1%}"
    )


def _constants(
    device: costs.Device, rows: Sequence[Timed], times: Float[np.ndarray, "rows"]
) -> str:
    measured = np.array([row.seconds for row in rows])
    errors = np.abs(times / measured - 1)
    return (
        f"bandwidth x {device.bandwidth_efficiency:.2f}, matrices x "
        f"{device.matrix_efficiency:.2f}, {1e6 * device.layer_seconds:.1f} us a layer, "
        f"{1e3 * device.round_seconds:.3f} ms a round, FLOPs in steps of {device.tile} tokens; "
        f"errors: mean {errors.mean():.1%}, largest {errors.max():.1%}"
    )
