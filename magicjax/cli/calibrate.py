"""`magicjax calibrate`: measures this device, and fits the constants that plans are made with.

Plain steps, passes over n nodes and whole rounds are timed on a small grid of batches and contexts
(`magicjax.benchmarks.step_times`). Plans of that model are made from these times. For others, read
bandwidth
and the rate of matrix products are measured by themselves, and the shares of them that decoding
reaches, the time of a layer and that of a round are what fits the times best. (Not those of an
offloaded model: the link hides what a layer computes.) Links between devices are not measured.
"""

import argparse
import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from magicjax import cost_model
from magicjax.benchmarks import bench, step_times
from magicjax.benchmarks.step_times import StepTimes
from magicjax.cost_model.profile import device_kind
from magicjax.cost_model.work import Part
from magicjax.drafters import Drafter
from magicjax.drafters.spec import DRAFTERS, make_drafter
from magicjax.generation import load
from magicjax.model import DTYPES
from magicjax.parallel import offloading
from magicjax.planner.candidates import draft_of
from magicjax.trees.token_tree import chain
from pallas_kernels.benchmarks.bandwidth import host_bandwidth, read_bandwidth
from pallas_kernels.benchmarks.timing import fastest_seconds

MATRIX_SIZE = {"cpu": 2048}
MATRIX_SIZE_ELSEWHERE = 8192
EFFICIENCIES = np.geomspace(0.02, 1.0, 80)
TILES = (1, 2, 4, 8)
BUDGETS = (64, 256, 1024)
SHORTEST = 1e-9  # seconds: stands for a difference that noise made negative; no plan believes it


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


def matrix_rate(dtype: str, *, rounds: int = 5) -> float:
    """Returns the FLOP a second of a product of two large matrices on this device."""
    size = MATRIX_SIZE.get(jax.default_backend(), MATRIX_SIZE_ELSEWHERE)
    a, b = (jnp.full((size, size), value, dtype) for value in (0.5, 0.25))
    product = functools.partial(jax.jit(jnp.matmul), a, b)
    return 2 * size**3 / fastest_seconds({"product": product}, rounds=rounds)["product"]


def rows_of(
    batch: int, context: int, times: StepTimes, budgets: Mapping[str, int], gamma: int
) -> list[Timed]:
    """Returns what the constants are fitted to: plain steps, passes, rounds of the target's drafts.

    Args:
      batch, context, times: of one place of the grid.
      budgets: of the drafters that are the target itself, by name.
      gamma: tokens that they drafted in a round.
    """
    rows = [Timed(batch, context, n, None, seconds) for n, seconds in times.passes.items()]
    rows += [
        Timed(batch, context, gamma + 1, budget, times.rounds[name])
        for name, budget in budgets.items()
    ]
    return rows


def steps_of(
    sizes: cost_model.Sizes,
    drafts: Mapping[str, cost_model.Draft],
    times: Mapping[tuple[int, int], StepTimes],
) -> tuple[cost_model.Steps, ...]:
    """Returns what was timed as tables, by model.

    Args:
      sizes: the target's.
      drafts: by name.
      times: of each batch and context.
    """
    batches, contexts = (tuple(sorted(set(axis))) for axis in zip(*times, strict=True))
    nodes = tuple(sorted(next(iter(times.values())).passes))
    places = itertools.product(batches, contexts, nodes)
    passes = [times[batch, context].passes[n] for batch, context, n in places]
    found = [cost_model.Steps(sizes.key, cost_model.PASS, batches, contexts, nodes, tuple(passes))]
    # A level's time by model and slots; what has a budget costs the same at every context.
    levels: dict[str, dict[tuple[int, int], list[float]]] = {}
    for (batch, context), of_place in times.items():
        for name, seconds in of_place.drafts.items():
            draft = drafts[name]
            if draft.sizes is not None:
                at = batch, draft.slots(context)
                levels.setdefault(draft.sizes.key, {}).setdefault(at, []).append(seconds)
    for key, table in levels.items():
        slots = tuple(sorted({at[1] for at in table}))
        medians = (np.median(table[at]) for at in itertools.product(batches, slots))
        found_of_model = tuple(max(float(seconds), SHORTEST) for seconds in medians)
        found.append(cost_model.Steps(key, cost_model.DRAFT, batches, slots, (1,), found_of_model))
    return tuple(found)


def fit(
    sizes: cost_model.Sizes, rows: Sequence[Timed], device: cost_model.Device
) -> tuple[cost_model.Device, Float[np.ndarray, "rows"]]:
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


def foretold(sizes: cost_model.Sizes, row: Timed, device: cost_model.Device) -> float:
    """Returns the seconds that a device of these constants would take."""
    parts = {str(i): part for i, part in enumerate(_parts(sizes, row, device))}
    rest = device.round_seconds if row.nodes > 1 else 0.0
    return sum(cost_model.seconds(parts, device).values()) + rest


def _parts(sizes: cost_model.Sizes, row: Timed, device: cost_model.Device) -> list[Part]:
    """Returns the parts of the pass, and those of every draft step before it."""
    passes = functools.partial(cost_model.pass_parts, sizes, cost_model.Machine(device), row.batch)
    parts = [*passes(row.nodes, row.context).values()]
    if row.budget is not None:
        parts += [*passes(1, min(row.budget, row.context)).values()] * (row.nodes - 1)
    return parts


def _layers(sizes: cost_model.Sizes, row: Timed) -> int:
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
        "model, and writes both as a profile, for `magicjax plan --device FILE.json` and "
        "`drafter='auto'`. Of the model that was timed, and its drafts, plans are made from the "
        "times themselves; of others from the constants.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", help="the profile, a .json file; the default is where auto looks")
    parser.add_argument("--target", default="llama-3.2-1b", help="preset or model directory")
    parser.add_argument(
        "--drafter",
        nargs="+",
        help=f"what is timed: {DRAFTERS}; the target on budgets of "
        f"{', '.join(map(str, BUDGETS))} if not given",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    offloading.add_option(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[2, 3, 4, 5, 6, 9], help="of T_verify"
    )
    parser.add_argument("--gamma", type=int, default=8, help="drafted tokens of a timed round")
    parser.add_argument("--turns", type=int, default=9, help="of all that is timed; medians count")
    parser.add_argument("--backend", help="of the attention; xla if not given")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints the fit, and writes the profile.

    Raises:
      ValueError, OSError: what `magicjax` prints before it ends.
    """
    out = arguments.out or cost_model.default_profile()
    if not str(out).endswith(".json"):
        raise ValueError(f"--out {out}: a profile is a .json file")
    least = {"batch": 1, "context": 1, "nodes": 2, "gamma": 1, "turns": 1}
    for name, allowed in least.items():
        lowest = np.min(getattr(arguments, name))
        if lowest < allowed:
            raise ValueError(f"--{name} {lowest} must be at least {allowed}")
    target = load(arguments.target, dtype=arguments.dtype, offload=arguments.offload)
    deepest = max(*arguments.nodes, arguments.gamma + 1)
    setup = bench.Setup(target, arguments.backend, step_times.new_tokens(deepest))
    drafters = _drafters(arguments)
    for drafter in (None, *drafters.values()):
        for context in arguments.context:  # says what is wrong before measuring
            tree = None if drafter is None else chain(deepest - 1)
            bench.request_of(setup, 1, context, drafter, tree)
    sizes = cost_model.sizes_of(target.config, arguments.dtype, arguments.target, arguments.offload)
    drafts = {name: draft_of(drafter, sizes, arguments.dtype) for name, drafter in drafters.items()}
    device = _device(arguments.dtype)
    times, rows = {}, []
    for batch, context, found in step_times.grid(
        setup,
        sorted(set(arguments.batch)),
        sorted(set(arguments.context)),
        arguments.nodes,
        drafters,
        arguments.gamma,
        arguments.turns,
    ):
        times[batch, context] = found
        budgets = {
            name: draft.slots(context) for name, draft in drafts.items() if draft.sizes == sizes
        }
        rows += rows_of(batch, context, found, budgets, arguments.gamma)
        print(_progress(batch, context, found), flush=True)
    if arguments.offload:
        print("constants for other models are not fitted: the link hides what a layer computes")
    else:
        device, foretold = fit(sizes, rows, device)
        print(_constants(device, rows, foretold))
    device = dataclasses.replace(device, measured=steps_of(sizes, drafts, times))
    names = ("target", "offload", "backend", "gamma", "turns")
    about = {name: getattr(arguments, name) for name in names}
    cost_model.save_profile(out, device, about)
    print(f"written to {out}")


def _drafters(arguments: argparse.Namespace) -> dict[str, Drafter]:
    """Returns the drafters that are timed, by name."""
    shortest = min(arguments.context)
    names = arguments.drafter or [f"self:streaming:{n}" for n in BUDGETS if n <= shortest]
    make = functools.partial(load, dtype=arguments.dtype)
    return {name: make_drafter(name, make) for name in names}


def _device(dtype: str) -> cost_model.Device:
    """Returns this device, with the rates that are measured by themselves."""
    device = cost_model.Device(
        name=device_kind(),
        bandwidth=read_bandwidth(),
        matrix_rate=matrix_rate(dtype),
        memory=memory_of_device(),
        link=None,
        host_link=host_bandwidth(),
        host_link_efficiency=1.0,  # it is measured as it is used
        fetches_beside=jax.default_backend() != "cpu",
        dtype=dtype,
    )
    link = device.host_link if device.fetches_beside else None  # a CPU has none
    print(
        f"{device.name}: reads {device.bandwidth / 1e9:.1f} GB/s, multiplies "
        f"{device.matrix_rate / 1e12:.3g} TFLOP/s in {device.dtype}"
        + (f", fetches {link / 1e9:.1f} GB/s from its host" if link else ""),
        flush=True,
    )
    return device


def _progress(batch: int, context: int, times: StepTimes) -> str:
    passes = "  ".join(f"{n}: {1e3 * s:.2f}" for n, s in times.passes.items())
    drafts = "  ".join(
        f"{name}: {1e3 * s:.2f}" if s else f"{name}: lost in noise"
        for name, s in times.drafts.items()
    )
    return (
        f"batch {batch}, context {context}: ms of a pass by nodes  {passes}\n"
        f"    ms of a drafted token  {drafts}"
    )


def _constants(
    device: cost_model.Device, rows: Sequence[Timed], times: Float[np.ndarray, "rows"]
) -> str:
    measured = np.array([row.seconds for row in rows])
    errors = np.abs(times / measured - 1)
    return (
        f"constants for other models: bandwidth x {device.bandwidth_efficiency:.2f}, matrices x "
        f"{device.matrix_efficiency:.2f}, {1e6 * device.layer_seconds:.1f} us a layer, "
        f"{1e3 * device.round_seconds:.3f} ms a round, FLOPs in steps of {device.tile} tokens; "
        f"beside what was timed they err by {errors.mean():.1%}, at most {errors.max():.1%}"
    )
