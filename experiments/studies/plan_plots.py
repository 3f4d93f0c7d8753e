"""Plots predicted speedups by batch and context: `python -m experiments.studies.plan_plots`.

The planner (`magicjax.planner`) predicts from measured acceptance: a table given by `--acceptance`,
or, for Llama-3.1-8B, what MagicDec's authors published. A context without measurements takes the
acceptance between two measured contexts, or that of the nearest one, as `magicjax plan` does.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.studies import cost_tables
from experiments.studies.plots import ABSENT, COLOURS, add_legend, annotated_image, clean, write_png
from magicjax import cost_model, planner
from magicjax.cli import plan
from magicjax.loading import config_of, skeleton
from magicjax.model import DTYPES
from magicjax.planner import acceptance

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
SPLIT_CONTEXT = 32000
LINES = (1, 8, 32, 128, 256)
BESIDE: dict[str, Any] = {"frameon": False, "loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
# Parts of a pass as the time split shows them.
SPLIT = {
    "matrices": ("projections", "MLP", "logits", "selection"),
    "attention": ("attention",),
    "collectives": ("collectives",),
    "kernel launches": ("overhead",),
}

Point = tuple[int, int]  # batch, context
Plans = dict[Point, planner.Plan]


@dataclasses.dataclass(frozen=True)
class Study:
    """What the plots show.

    Attributes:
      target: its sizes.
      dtype: of models and caches.
      machine: what it runs on.
      measured: acceptance.
      drafter: the one in plots of a single drafter.
      source: where the acceptance comes from, in words.
    """

    target: cost_model.Sizes
    dtype: str
    machine: cost_model.Machine
    measured: tuple[acceptance.Measured, ...]
    drafter: str
    source: str

    def candidates(self, context: int) -> list[planner.Candidate]:
        """Returns the drafters at a context."""
        tables = acceptance.at_context(self.measured, context)
        target = skeleton(self.target.name, self.dtype)
        return [
            plan.candidate(name, table, target, self.machine, context)
            for name, (table, _) in tables.items()
        ]

    def candidate(self, context: int) -> planner.Candidate:
        """Returns the drafter in plots of a single one."""
        return next(c for c in self.candidates(context) if c.name == self.drafter)

    def fits(self, batch: int, context: int) -> bool:
        """Returns whether the target and at least one draft fit into memory."""
        where = self.machine, batch, context
        left = planner.free_memory(self.target, *where)
        return left >= 0 and any(
            c.draft.memory(*where, c.shared) <= left for c in self.candidates(context)
        )

    def contexts(self) -> list[int]:
        """Returns the contexts at which at least one row fits."""
        return [context for context in CONTEXTS if self.fits(1, context)]


def plans(study: Study) -> Plans:
    """Returns the plan of each (batch, context) that fits into memory."""
    return {
        (batch, context): planner.plan(
            study.target, study.candidates(context), study.machine, batch, context
        )
        for context in study.contexts()
        for batch in BATCHES
        if study.fits(batch, context)
    }


def write(study: Study, directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes the plots, each atomically, and returns their paths."""
    by_point = plans(study)
    plots = {
        "speedup": speedups(study, by_point),
        "best": best(study, by_point),
        "break_even": break_evens(study, by_point),
        "time_split": time_split(study),
        "inflection": inflections(study),
    }
    for name, plot in plots.items():
        write_png(directory / f"{name}.png", plot)
    return [directory / f"{name}.png" for name in plots]


def _figure(study: Study, title: str, width: float = 8.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 5.4), layout="constrained")
    axes = figure.subplots()
    machine = f"{study.machine.devices} × {study.machine.device.name}"
    axes.set_title(f"{title}\n{study.target.name}, {study.dtype}, {machine}", fontsize=11)
    figure.supxlabel(f"Predicted. Acceptance: {study.source}.", fontsize=7.5, color="#444444")
    return figure, axes


def _grid(
    axes: Axes,
    study: Study,
    values: dict[Point, float],
    texts: dict[Point, str],
    colours: Colormap,
    norm: Normalize,
) -> Any:
    """Returns the image of the values with texts on it; points that do not fit are grey."""
    contexts = study.contexts()
    points = [[(batch, context) for batch in BATCHES] for context in contexts]
    table = np.array([[values.get(point, np.nan) for point in row] for row in points])
    labels = np.array([[texts.get(point, "memory") for point in row] for row in points])
    axes.set(xlabel="batch", ylabel="context")
    return annotated_image(axes, table, labels, BATCHES, contexts, colours, norm)


def speedups(study: Study, by_point: Plans) -> Figure:
    """Returns the best speedup by batch and context; orange is slower than plain decoding."""
    figure, axes = _figure(study, "Speedup of the best drafter over plain decoding")
    values = {point: plan.best.speedup for point, plan in by_point.items()}
    texts = {point: f"{value:.2f}" for point, value in values.items()}
    norm = TwoSlopeNorm(1.0, min(0.5, *values.values()), max(1.5, *values.values()))
    image = _grid(axes, study, values, texts, colormaps["PuOr"], norm)
    figure.colorbar(image, ax=axes, label="speedup")
    return figure


def best(study: Study, by_point: Plans) -> Figure:
    """Returns the best drafter by batch and context as colours, its γ as numbers."""
    figure, axes = _figure(study, "Best drafter and budget (colour) and chain length γ", 9.6)
    names = list(dict.fromkeys(measured.drafter for measured in study.measured))
    colours = ListedColormap([COLOURS[i % len(COLOURS)] for i in range(len(names))])
    values = {p: float(names.index(f.best.drafter)) for p, f in by_point.items() if f.speculate}
    texts = {point: _tree(plan) if plan.speculate else "off" for point, plan in by_point.items()}
    _grid(axes, study, values, texts, colours, Normalize(-0.5, len(names) - 0.5))
    shown = sorted({int(value) for value in values.values()})
    handles = [Patch(color=colours(i), label=names[i]) for i in shown]
    handles.append(Patch(color=ABSENT, label="off: plain decoding is faster,\nor out of memory"))
    axes.legend(handles=handles, fontsize=8.5, **BESIDE)
    return figure


def _tree(plan: planner.Plan) -> str:
    tree = plan.best.tree
    return str(tree.depth) if tree.width == 1 else f"{tree.num_nodes}/{tree.depth}"


def break_evens(study: Study, by_point: Plans) -> Figure:
    """Returns the break-even acceptance of one drafter by batch and context."""
    figure, axes = _figure(study, f"Break-even acceptance of {study.drafter}")
    rates = {
        (batch, context): planner.break_even(
            study.target, study.candidate(context), study.machine, batch, context
        )
        for batch, context in by_point
    }
    values = {point: rate for point, rate in rates.items() if rate is not None}
    texts = {point: "never" if rate is None else f"{rate:.2f}" for point, rate in rates.items()}
    image = _grid(axes, study, values, texts, colormaps["cividis"], Normalize(0, 1))
    figure.colorbar(image, ax=axes, label="acceptance above which drafting is faster")
    return figure


def time_split(study: Study) -> Figure:
    """Returns the parts of a round by batch as shares, with its milliseconds above."""
    context = max(context for context in study.contexts() if context <= SPLIT_CONTEXT)
    batches = [batch for batch in BATCHES if study.fits(batch, context)]
    figure, axes = _figure(study, f"Time of a round of {study.drafter}, context {context:,}", 9.6)
    x, tops = range(len(batches)), np.zeros(len(batches))
    rounds = [_best_round(study, batch, context) for batch in batches]
    for pass_name, hatch in (("draft", "//"), ("verify", "")):
        for colour, (label, names) in zip(COLOURS, SPLIT.items(), strict=False):
            seconds = [sum(r.parts.get((pass_name, n), 0.0) for n in names) for r in rounds]
            shares = np.array([s / r.total for s, r in zip(seconds, rounds, strict=True)])
            style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white"}
            axes.bar(x, shares, 0.8, tops, label=f"{pass_name}: {label}", **style)
            tops += shares
    axes.bar(x, 1 - tops, 0.8, tops, color="#999999", label="remainder of the round")
    for i, cost in enumerate(rounds):
        label = f"γ {cost.depth}\n{1e3 * cost.total:.1f} ms"
        axes.text(i, 1.01, label, ha="center", va="bottom", fontsize=8)
    axes.set_xticks(x, [str(batch) for batch in batches])
    axes.set_yticks(np.linspace(0, 1, 6), [f"{share:.0%}" for share in np.linspace(0, 1, 6)])
    axes.set(ylim=(0, 1.1), xlabel="batch", ylabel="share of the round's time")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5, reverse=True, **BESIDE)
    return figure


def _chains(study: Study, batch: int, context: int) -> dict[int, planner.Prediction]:
    """Returns the prediction for the drafter's chain of each depth."""
    where = study.machine, batch, context
    every = planner.predictions(study.target, study.candidate(context), *where)
    return {p.tree.depth: p for p in every if p.tree.width == 1}


def _best_round(study: Study, batch: int, context: int) -> cost_model.RoundCost:
    """Returns the round of the drafter's best chain."""
    return max(_chains(study, batch, context).values(), key=lambda p: p.speedup).cost


def inflections(study: Study) -> Figure:
    """Returns the speedup by context for several batches, and the inflection context."""
    gamma = cost_tables.CLAIM_GAMMA
    figure, axes = _figure(study, f"Speedup of {study.drafter}, γ {gamma}, by context")
    largest = study.contexts()[-1]
    contexts = np.unique(np.geomspace(500, largest, 60).astype(int)).tolist()
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(LINES)))
    styles = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
    for batch, colour, style in zip(LINES, colours, styles, strict=False):
        x = [context for context in contexts if study.fits(batch, context)]
        y = [_chains(study, batch, context)[gamma].speedup for context in x]
        axes.plot(x, y, color=colour, linestyle=style, label=f"batch {batch}", linewidth=2)
    ends = LINES[0], LINES[-1]
    candidate = study.candidate(study.contexts()[0])
    turn = planner.inflection(study.target, candidate, study.machine, gamma, ends)
    if turn is not None:
        axes.axvline(turn, color="#D55E00", linewidth=1)
        axes.annotate(
            f"inflection: {turn:,.0f}\n(batch {ends[1]} overtakes {ends[0]})",
            (turn, axes.get_ylim()[1]),
            (6, -4),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color="#A04000",
        )
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    ticks = (500, *study.contexts())
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8.5)
    axes.minorticks_off()
    axes.set(xlabel="context", ylabel="speedup over plain decoding")
    clean(axes)
    add_legend(axes, 9)
    return figure


def study_of(options: argparse.Namespace) -> Study:
    """Returns the study that the options describe.

    Raises:
      ValueError, FileNotFoundError: no such target, device or table, or no acceptance.
    """
    machine = cost_model.Machine(cost_model.device_of(options.device), model=options.gpus)
    config = config_of(options.target)
    if options.acceptance:
        measured = acceptance.read_table(options.acceptance, options.target)
        source = options.acceptance
    elif options.target.lower() == cost_tables.TARGET:
        measured = cost_tables.published_acceptance()
        source = "published by MagicDec for PG-19, interpolated between contexts"
    else:
        raise ValueError(f"--acceptance is missing for {options.target}: {acceptance.HOW}")
    names = list(dict.fromkeys(row.drafter for row in measured))
    drafter = options.drafter or names[0]
    if drafter not in names:
        raise ValueError(f"--drafter {drafter}: acceptance is measured for {', '.join(names)}")
    target = cost_model.sizes_of(config, options.dtype, options.target)
    cost_model.check_heads(target, machine)
    study = Study(target, options.dtype, machine, tuple(measured), drafter, source)
    if not study.contexts():
        planner.check_fits(target, machine, 1, CONTEXTS[0])
    return study


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the plots and returns 0; invalid arguments exit with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.plan_plots", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument(
        "--target", default=cost_tables.TARGET, help="preset, model directory or GGUF file"
    )
    parser.add_argument("--device", default="a100", help=", ".join(cost_model.DEVICES))
    parser.add_argument("--gpus", type=int, default=8, help="devices that share the heads")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--acceptance", help="a table as for `magicjax plan`")
    parser.add_argument("--drafter", help="in plots of one drafter (default: the table's first)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory")
    options = parser.parse_args(arguments)
    try:
        study = study_of(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for path in write(study, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
