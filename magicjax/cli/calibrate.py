"""`magicjax calibrate`: measures this device and fits the constants of the cost model.

It times plain steps, passes over n nodes and whole rounds on a grid of batches and contexts
(`magicjax.benchmarks.step_times`), which serve plans for that model. Plans for other models use
constants: memory bandwidth and matrix throughput are measured, and the efficiencies that decoding
reaches, the time per layer and the time per round are fitted. They are not fitted for an offloaded
model, where the host link hides computation. Links between devices are not measured.
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
from scipy.optimize import nnls

from magicjax import files
from magicjax.benchmarks.step_times import StepTimes, new_tokens, step_times
from magicjax.benchmarks.synthetic import Setup, synthetic_request
from magicjax.cli import model_options
from magicjax.drafters import Drafter
from magicjax.drafters.spec import DRAFTER_SYNTAX, make_drafter
from magicjax.loading import load
from magicjax.model import DTYPES
from magicjax.options import token_count
from magicjax.parallel import offloading
from magicjax.prediction import cost_model
from magicjax.prediction.cost_model.profile import device_kind
from magicjax.prediction.cost_model.work import Work
from magicjax.prediction.planner.candidates import make_draft
from magicjax.sources import Source
from magicjax.trees.token_tree import chain
from pallas_kernels.benchmarks.bandwidth import host_bandwidth, read_bandwidth
from pallas_kernels.benchmarks.timing import fastest_seconds

MATRIX_SIZE = {"cpu": 2048}
MATRIX_SIZE_ELSEWHERE = 8192
EFFICIENCIES = np.geomspace(0.02, 1.0, 80)
TILES = (1, 2, 4, 8)
BUDGETS = (64, 256, 1024)
SHORTEST = 1e-9  # seconds; replaces a negative difference of noisy times, and plans ignore it


@dataclasses.dataclass(frozen=True)
class Timed:
    """The measured time of a pass, or of a round of self-speculation.

    Attributes:
      batch, context: B, and the tokens of a row.
      nodes: tokens per row in the pass; 1 for plain decoding.
      budget: the draft cache's budget, for a draft of nodes - 1 tokens before the pass; None
        without a draft.
      seconds: measured, for more than one node including the overhead of a round.
    """

    batch: int
    context: int
    nodes: int
    budget: int | None
    seconds: float


def matrix_rate(dtype: str) -> float:
    """Returns the FLOP/s of a product of two large matrices on this device."""
    size = MATRIX_SIZE.get(jax.default_backend(), MATRIX_SIZE_ELSEWHERE)
    a, b = (jnp.full((size, size), value, dtype) for value in (0.5, 0.25))
    product = functools.partial(jax.jit(jnp.matmul), a, b)
    return 2 * size**3 / fastest_seconds({"product": product}, repeats=5)["product"]


def rows_of(
    sizes: cost_model.Sizes,
    drafts: Mapping[str, cost_model.Draft],
    times: Mapping[tuple[int, int], StepTimes],
    gamma: int,
) -> list[Timed]:
    """Returns the times to which the constants are fitted: passes and self-speculation rounds.

    Drafts on pages are omitted, here and in `steps_of`: they move more bytes for each slot.
    """
    rows = []
    for (batch, context), step in times.items():
        rows += [Timed(batch, context, n, None, seconds) for n, seconds in step.passes.items()]
        rows += [
            Timed(batch, context, gamma + 1, draft.slots(context), step.rounds[name])
            for name, draft in drafts.items()
            if draft.sizes == sizes and draft.page_size is None
        ]
    return rows


def steps_of(
    sizes: cost_model.Sizes,
    drafts: Mapping[str, cost_model.Draft],
    times: Mapping[tuple[int, int], StepTimes],
) -> tuple[cost_model.Steps, ...]:
    """Returns the measured times, which are by batch and context, as one table per model."""
    batches, contexts = (tuple(sorted(set(axis))) for axis in zip(*times, strict=True))
    nodes = tuple(sorted(next(iter(times.values())).passes))
    grid = itertools.product(batches, contexts, nodes)
    passes = tuple(times[batch, context].passes[n] for batch, context, n in grid)
    tables = [cost_model.Steps(sizes.key, cost_model.PASS, batches, contexts, nodes, passes)]
    # Times of a draft level by model, batch and slots: with a budget, contexts share the slots.
    levels: dict[str, dict[tuple[int, int], list[float]]] = {}
    for (batch, context), step in times.items():
        for name, seconds in step.drafts.items():
            draft = drafts[name]
            if draft.sizes is not None and draft.page_size is None:
                by_size = levels.setdefault(draft.sizes.key, {})
                by_size.setdefault((batch, draft.slots(context)), []).append(seconds)
    for key, by_size in levels.items():
        slots = tuple(sorted({slots for _, slots in by_size}))
        medians = tuple(
            max(float(np.median(by_size[size])), SHORTEST)
            for size in itertools.product(batches, slots)
        )
        tables.append(cost_model.Steps(key, cost_model.DRAFT, batches, slots, (1,), medians))
    return tuple(tables)


def fit(
    sizes: cost_model.Sizes, rows: Sequence[Timed], device: cost_model.Device
) -> tuple[cost_model.Device, Float[np.ndarray, "rows"]]:
    """Returns (the device with fitted constants, the predicted seconds of each row).

    The fit minimizes the sum of squared logarithms of predicted / measured: a search over the
    efficiencies and the tile, with the times per layer and per round from relative least squares.
    """
    measured = np.array([row.seconds for row in rows])
    best_error, best_device = np.inf, device
    for tile in TILES:
        tiled = dataclasses.replace(device, tile=tile)
        parts = [_parts(sizes, row, tiled) for row in rows]
        read_s = _table(parts, "bytes") / device.bandwidth
        matmul_s = _table(parts, "flops") / device.matrix_rate
        layers = _table(parts, "layers").sum(1)
        overheads = np.stack([layers, [row.nodes > 1 for row in rows]], axis=1)
        for bandwidth_share, matrix_share in itertools.product(EFFICIENCIES, EFFICIENCIES):
            work_s = np.maximum(read_s / bandwidth_share, matmul_s / matrix_share).sum(1)
            times, _ = nnls(overheads / measured[:, None], (measured - work_s) / measured)
            error = (np.log((work_s + overheads @ times) / measured) ** 2).sum()
            if error < best_error:
                best_error = float(error)
                best_device = dataclasses.replace(
                    tiled,
                    bandwidth_efficiency=float(bandwidth_share),
                    matrix_efficiency=float(matrix_share),
                    layer_seconds=float(times[0]),
                    round_seconds=float(times[1]),
                )
    return best_device, np.array([predicted(sizes, row, best_device) for row in rows])


def predicted(sizes: cost_model.Sizes, row: Timed, device: cost_model.Device) -> float:
    """Returns the predicted seconds of a row on a device with these constants."""
    parts = {str(i): part for i, part in enumerate(_parts(sizes, row, device))}
    overhead = device.round_seconds if row.nodes > 1 else 0.0
    return sum(cost_model.seconds(parts, device).values()) + overhead


def _parts(sizes: cost_model.Sizes, row: Timed, device: cost_model.Device) -> list[Work]:
    """Returns the parts of the pass and of the draft steps before it."""
    passes = functools.partial(cost_model.pass_parts, sizes, cost_model.Machine(device), row.batch)
    parts = [*passes(row.nodes, row.context).values()]
    if row.budget is not None:
        level = passes(1, min(row.budget, row.context), sizes.slot_bytes(None))
        parts += [*level.values()] * (row.nodes - 1)
    return parts


def _table(parts: Sequence[Sequence[Work]], name: str) -> Float[np.ndarray, "rows parts"]:
    """Returns one attribute of all parts, padded with zeros."""
    values = [[getattr(part, name) for part in row] for row in parts]
    return np.array([*itertools.zip_longest(*values, fillvalue=0.0)]).T


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "calibrate",
        description="Times the parts of decoding on this device, fits the constants of the cost "
        "model, and writes both to a profile, for `magicjax plan --device FILE.json` and "
        "`drafter='auto'`. Plans for the timed model and its drafts use the measured times, plans "
        "for other models the constants. It times every --batch with every --context, 9 pairs by "
        "default, which takes minutes, more for large models: pass those of your use, such as "
        "--batch 1 --context 2k.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        help="profile to write, a .json file; default: profile-DEVICE.json in "
        f"{files.cache_folder()}, with the name of this device, which `auto` reads",
    )
    parser.add_argument(
        "--target", default="llama-3.2-1b", help=f"{model_options.SOURCE}; default: llama-3.2-1b"
    )
    parser.add_argument(
        "--drafter",
        nargs="+",
        help=f"drafters to time: {DRAFTER_SYNTAX}; default: self:streaming with budgets of "
        f"{', '.join(map(str, BUDGETS))}",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of all models; default: as stored")
    model_options.add_weights(parser)
    model_options.add_activations(parser)
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 4, 16],
        help="numbers of rows to time; default: 1 4 16",
    )
    parser.add_argument(
        "--context",
        type=token_count,
        nargs="+",
        default=[1024, 4096, 8192],
        help="tokens per row to time, for each --batch; default: 1024 4096 8192",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[2, 3, 4, 5, 6, 9],
        help="tree sizes of T_verify; default: 2 3 4 5 6 9",
    )
    parser.add_argument(
        "--gamma", type=int, default=8, help="drafted tokens of a timed round; default: 8"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=9,
        help="repeats of every measurement; medians are reported; default: 9",
    )
    model_options.add_backend(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints the fit, and writes the profile.

    Raises:
      ValueError, OSError: invalid input.
    """
    out = arguments.out or cost_model.default_profile()
    if not str(out).endswith(".json"):
        raise ValueError(f"--out {out} must be a .json file")
    minimum = {"batch": 1, "context": 1, "nodes": 2, "gamma": 1, "repeats": 1}
    for name, least in minimum.items():
        if (value := np.min(getattr(arguments, name))) < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    source = Source(arguments.target)
    target = load(
        source,
        dtype=arguments.dtype,
        weights=arguments.weights,
        kv_dtype=arguments.kv_dtype,
        activations=arguments.activations,
        offload=arguments.offload,
    )
    dtype = str(target.dtype)
    deepest = max(*arguments.nodes, arguments.gamma + 1)
    setup = Setup(target, arguments.backend, new_tokens(deepest))
    drafters = _drafters(arguments, dtype)
    model_options.check_context(source, max(arguments.context), setup.new_tokens)
    for drafter in (None, *drafters.values()):
        for context in arguments.context:  # reports invalid input before measuring
            tree = None if drafter is None else chain(deepest - 1)
            synthetic_request(setup, 1, context, drafter, tree)
    sizes = cost_model.sizes_of(
        target.config,
        dtype,
        arguments.target,
        arguments.offload,
        target.weights,
        target.kv_bits,
    )
    drafts = {name: make_draft(drafter, sizes, dtype) for name, drafter in drafters.items()}
    device = _device(dtype)
    rounds = {name: (drafter, arguments.gamma) for name, drafter in drafters.items()}
    times = {}
    grid = itertools.product(*(sorted({*axis}) for axis in (arguments.batch, arguments.context)))
    for batch, context in grid:
        step = step_times(setup, batch, context, arguments.nodes, rounds, arguments.repeats)
        times[batch, context] = step
        print(_progress(batch, context, step), flush=True)
    if arguments.offload:
        print("constants for other models: not fitted, because the host link hides computation")
    else:
        rows = rows_of(sizes, drafts, times, arguments.gamma)
        device, fitted = fit(sizes, rows, device)
        print(_constants(device, rows, fitted))
    device = dataclasses.replace(device, measured=steps_of(sizes, drafts, times))
    names = ("target", "weights", "kv_dtype", "offload", "backend", "gamma", "repeats")
    cost_model.save_profile(out, device, {name: getattr(arguments, name) for name in names})
    print(f"wrote {out}")


def _drafters(arguments: argparse.Namespace, dtype: str) -> dict[str, Drafter]:
    """Returns the drafters to time, by name."""
    shortest = min(arguments.context)
    names = arguments.drafter or [f"self:streaming:{n}" for n in BUDGETS if n <= shortest]
    make = functools.partial(load, dtype=dtype)
    return {name: make_drafter(name, make) for name in names}


def _device(dtype: str) -> cost_model.Device:
    """Returns this device, with measured rates."""
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = cost_model.Device(
        name=device_kind(),
        bandwidth=read_bandwidth(),
        matrix_rate=matrix_rate(dtype),
        memory=float(offloading.device_memory() or host_memory),
        link=None,
        host_link=host_bandwidth(),
        host_link_efficiency=1.0,  # the measurement includes it
        overlaps_fetch=jax.default_backend() != "cpu",
        dtype=dtype,
    )
    link = device.host_link if device.overlaps_fetch else None  # a CPU has none
    print(
        f"{device.name}: memory {device.bandwidth / 1e9:.1f} GB/s, matrix products "
        f"{device.matrix_rate / 1e12:.3g} TFLOP/s in {device.dtype}"
        + (f", host link {link / 1e9:.1f} GB/s" if link else ""),
        flush=True,
    )
    return device


def _progress(batch: int, context: int, times: StepTimes) -> str:
    passes = "  ".join(f"{n}: {1e3 * s:.2f}" for n, s in times.passes.items())
    drafts = "  ".join(
        f"{name}: {1e3 * s:.2f}" if s > 0 else f"{name}: below noise"
        for name, s in times.drafts.items()
    )
    return (
        f"batch {batch}, context {context}: ms per pass, by nodes  {passes}\n"
        f"    ms per drafted token  {drafts}"
    )


def _constants(
    device: cost_model.Device, rows: Sequence[Timed], times: Float[np.ndarray, "rows"]
) -> str:
    errors = np.abs(times / np.array([row.seconds for row in rows]) - 1)
    return (
        f"constants for other models: bandwidth efficiency {device.bandwidth_efficiency:.2f}, "
        f"matrix efficiency {device.matrix_efficiency:.2f}, "
        f"{1e6 * device.layer_seconds:.1f} us per layer, "
        f"{1e3 * device.round_seconds:.3f} ms per round, tiles of {device.tile} "
        f"token{'s' if device.tile > 1 else ''}; "
        f"relative error of the fit: mean {errors.mean():.1%}, maximum {errors.max():.1%}"
    )
