"""What speculation is worth by batch and context, in pictures: `python -m
experiments.studies.plan_plots`.

All of it is foretold (`magicjax.planner`), from acceptance that was measured: a table of one's own,
or for Llama-3.1-8B what MagicDec's authors published. Where none was measured at a context, that of
the nearest one is taken, as `magicjax plan` does.
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

from experiments.report.figures import COLOURS
from experiments.studies import cost_tables
from magicjax import cost_model, planner
from magicjax.cli import plan
from magicjax.generation import config_of
from magicjax.model import DTYPES
from magicjax.planner import acceptance

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
SPLIT_CONTEXT = 32000
LINES = (1, 8, 32, 128, 256)
ABSENT = "#DDDDDD"
# Parts of a pass as the time split shows them.
SPLIT = {
    "matrices": ("projections", "MLP", "logits", "selection"),
    "attention": ("attention",),
    "collectives": ("collectives",),
    "starting kernels": ("overhead",),
}


@dataclasses.dataclass(frozen=True)
class Study:
    """What the pictures are of.

    Attributes:
      target: its sizes.
      dtype: of models and caches.
      machine: what it runs on.
      measured: acceptance.
      drafter: the one that pictures of a single draft show.
      source: where the acceptance comes from, in words.
    """

    target: cost_model.Sizes
    dtype: str
    machine: cost_model.Machine
    measured: tuple[acceptance.Measured, ...]
    drafter: str
    source: str

    def candidates(self, context: int) -> list[planner.Candidate]:
        """Returns the ways to draft at a context."""
        found = acceptance.at_context(self.measured, context)
        return [
            plan.candidate(name, table, self.target, self.dtype, context)
            for name, (table, _) in found.items()
        ]

    def one(self, context: int) -> planner.Candidate:
        """Returns the drafter of pictures of a single one."""
        return next(c for c in self.candidates(context) if c.name == self.drafter)

    def fits(self, batch: int, context: int) -> bool:
        """Returns whether the target and some draft fit into memory."""
        where = self.machine, batch, context
        left = planner.left_of_device(self.target, *where)
        return left >= 0 and any(
            c.draft.memory(*where, c.shared) <= left for c in self.candidates(context)
        )

    def contexts(self) -> list[int]:
        """Returns the contexts at which at least one row fits."""
        return [context for context in CONTEXTS if self.fits(1, context)]

    @property
    def title(self) -> str:
        name, devices = self.machine.device.name, self.machine.devices
        return f"{self.target.name}, {self.dtype}, {devices} × {name}"


def plans(study: Study) -> dict[tuple[int, int], planner.Plan]:
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
    """Returns the pictures, having written them, each whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    found = plans(study)
    figures = {
        "speed_up": speed_ups(study, found),
        "best": best(study, found),
        "break_even": break_evens(study, found),
        "time_split": time_split(study),
        "inflection": inflections(study),
    }
    paths = []
    for name, figure in figures.items():
        path = directory / f"{name}.png"
        partial = directory / f".{name}.png.partial"
        figure.savefig(partial, dpi=150, format="png")
        partial.replace(path)
        paths.append(path)
    return paths


def _figure(study: Study, title: str, wide: float = 8.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(wide, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{title}\n{study.title}", fontsize=11)
    figure.supxlabel(f"Foretold. Acceptance: {study.source}.", fontsize=7.5, color="#444444")
    return figure, axes


def _grid(
    axes: Axes,
    study: Study,
    values: dict[tuple[int, int], float],
    texts: dict[tuple[int, int], str],
    colours: Colormap,
    norm: Normalize,
) -> Any:
    """Returns the image of a value for each (batch, context), its text on it; absent ones grey."""
    contexts = study.contexts()
    table = np.full((len(contexts), len(BATCHES)), np.nan)
    for (batch, context), value in values.items():
        table[contexts.index(context), BATCHES.index(batch)] = value
    axes.set_facecolor(ABSENT)
    image = axes.imshow(table, cmap=colours, norm=norm, origin="lower", aspect="auto")
    for (batch, context), text in texts.items():
        x, y = BATCHES.index(batch), contexts.index(context)
        light = np.isnan(table[y, x]) or _light(colours(norm(table[y, x])))
        axes.text(
            x, y, text, ha="center", va="center", fontsize=9, color="black" if light else "white"
        )
    axes.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
    axes.set_yticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_xlabel("batch")
    axes.set_ylabel("context")
    axes.spines[:].set_visible(False)
    return image


def _light(colour: tuple) -> bool:
    return float(np.dot(colour[:3], (0.299, 0.587, 0.114))) > 0.55


def _absent(study: Study, texts: dict[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    """Returns the texts, and that of the places that do not fit."""
    places = ((batch, context) for context in study.contexts() for batch in BATCHES)
    return {place: "memory" for place in places if place not in texts} | texts


def speed_ups(study: Study, found: dict[tuple[int, int], planner.Plan]) -> Figure:
    """Returns the best speed-up over batch and context; orange is slower than plain decoding."""
    figure, axes = _figure(study, "Speed-up of the best drafter over plain decoding")
    values = {place: plan.best.speed_up for place, plan in found.items()}
    texts = _absent(study, {place: f"{value:.2f}" for place, value in values.items()})
    norm = TwoSlopeNorm(1.0, min(0.5, *values.values()), max(1.5, *values.values()))
    image = _grid(axes, study, values, texts, colormaps["PuOr"], norm)
    figure.colorbar(image, ax=axes, label="speed-up")
    return figure


def best(study: Study, found: dict[tuple[int, int], planner.Plan]) -> Figure:
    """Returns the best drafter and budget over batch and context as colours, its γ as numbers."""
    figure, axes = _figure(study, "Best drafter and budget (colour) and chain length γ", 9.6)
    names = list(dict.fromkeys(measured.drafter for measured in study.measured))
    colours = ListedColormap([COLOURS[i % len(COLOURS)] for i in range(len(names))])
    values = {p: float(names.index(f.best.drafter)) for p, f in found.items() if f.pays}
    texts = {place: _tree(plan) if plan.pays else "off" for place, plan in found.items()}
    norm = Normalize(-0.5, len(names) - 0.5)
    _grid(axes, study, values, _absent(study, texts), colours, norm)
    shown = sorted({int(value) for value in values.values()})
    handles = [Patch(color=colours(i), label=names[i]) for i in shown]
    handles.append(Patch(color=ABSENT, label="off: plain decoding is faster,\nor too large"))
    axes.legend(
        handles=handles, frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )
    return figure


def _tree(plan: planner.Plan) -> str:
    tree = plan.best.tree
    return str(tree.depth) if tree.width == 1 else f"{tree.num_nodes}/{tree.depth}"


def break_evens(study: Study, found: dict[tuple[int, int], planner.Plan]) -> Figure:
    """Returns the acceptance from which one drafter pays, over batch and context."""
    figure, axes = _figure(study, f"Acceptance from which {study.drafter} pays")
    rates = {
        (batch, context): planner.break_even(
            study.target, study.one(context), study.machine, batch, context
        )
        for batch, context in found
    }
    values = {place: rate for place, rate in rates.items() if rate is not None}
    texts = {p: "never" if rate is None else f"{rate:.2f}" for p, rate in rates.items()}
    norm = Normalize(0, 1)
    image = _grid(axes, study, values, _absent(study, texts), colormaps["cividis"], norm)
    figure.colorbar(image, ax=axes, label="break-even acceptance")
    return figure


def time_split(study: Study) -> Figure:
    """Returns the parts of a round by batch, as shares, with the round's milliseconds above."""
    contexts = [context for context in study.contexts() if context <= SPLIT_CONTEXT]
    context = contexts[-1]
    batches = [batch for batch in BATCHES if study.fits(batch, context)]
    figure, axes = _figure(study, f"Time of a round of {study.drafter}, context {context:,}", 9.6)
    tops = np.zeros(len(batches))
    rounds = [_round(study, batch, context) for batch in batches]
    for pass_name, hatch in (("draft", "//"), ("verify", "")):
        for colour, (label, names) in zip(COLOURS, SPLIT.items(), strict=False):
            shares = np.array(
                [
                    sum(cost.parts.get((pass_name, n), 0.0) for n in names) / cost.total
                    for cost in rounds
                ]
            )
            bars = axes.bar(range(len(batches)), shares, 0.8, tops, color=colour, hatch=hatch)
            bars.set_label(f"{pass_name}: {label}")
            for bar in bars:
                bar.set_edgecolor("white")
            tops += shares
    rest = 1 - tops
    axes.bar(range(len(batches)), rest, 0.8, tops, color="#999999", label="the rest of a round")
    for x, cost in enumerate(rounds):
        label = f"γ {cost.depth}\n{1e3 * cost.total:.1f} ms"
        axes.text(x, 1.01, label, ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_ylim(0, 1.1)
    axes.set_yticks(np.linspace(0, 1, 6), [f"{share:.0%}" for share in np.linspace(0, 1, 6)])
    axes.set_xlabel("batch")
    axes.set_ylabel("share of the round's time")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        frameon=False,
        fontsize=8.5,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
    )
    return figure


def _round(study: Study, batch: int, context: int) -> cost_model.RoundCost:
    """Returns the round of the drafter's best chain."""
    candidate = study.one(context)
    where = study.machine, batch, context
    by_depth = planner.chain_speed_ups(study.target, candidate, *where)
    depth = max(by_depth, key=lambda d: by_depth[d])
    return cost_model.round_cost(study.target, candidate.draft, *where, depth + 1, depth)


def inflections(study: Study) -> Figure:
    """Returns the speed-up by context for several batches, and where more rows begin to help."""
    gamma = cost_tables.CLAIM_GAMMA
    figure, axes = _figure(study, f"Speed-up of {study.drafter}, γ {gamma}, by context")
    contexts = np.unique(np.geomspace(500, study.contexts()[-1], 60).astype(int))
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(LINES)))
    styles = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
    for batch, colour, style in zip(LINES, colours, styles, strict=False):
        mine = [int(context) for context in contexts if study.fits(batch, int(context))]
        height = [
            planner.chain_speed_ups(study.target, study.one(c), study.machine, batch, c)[gamma]
            for c in mine
        ]
        axes.plot(mine, height, color=colour, linestyle=style, label=f"batch {batch}", linewidth=2)
    ends = LINES[0], LINES[-1]
    candidate = study.one(study.contexts()[0])
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
    ticks = [context for context in (500, *study.contexts())]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8.5)
    axes.minorticks_off()
    axes.set_xlabel("context")
    axes.set_ylabel("speed-up over plain decoding")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def study_of(options: argparse.Namespace) -> Study:
    """Returns what the options ask for.

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
        source = (
            "published for PG-19 by MagicDec; at other contexts than those measured, between two "
            "of them or that of the nearest"
        )
    else:
        raise ValueError(f"--acceptance is missing for {options.target}: {acceptance.HOW}")
    names = list(dict.fromkeys(row.drafter for row in measured))
    drafter = options.drafter or names[0]
    if drafter not in names:
        raise ValueError(f"--drafter {drafter}: acceptance is known of {', '.join(names)}")
    target = cost_model.sizes_of(config, options.dtype, options.target)
    cost_model.check_heads(target, machine)
    study = Study(target, options.dtype, machine, tuple(measured), drafter, source)
    if not study.contexts():
        planner.check_fits(target, machine, 1, CONTEXTS[0])
    return study


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after writing the pictures; wrong arguments end the process with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.plan_plots", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--target", default=cost_tables.TARGET, help="preset or model directory")
    parser.add_argument("--device", default="a100", help=", ".join(cost_model.DEVICES))
    parser.add_argument("--gpus", type=int, default=8, help="devices that share heads")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--acceptance", help="a table as `magicjax plan` takes it")
    parser.add_argument("--drafter", help="of pictures of a single one; the table's first")
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
