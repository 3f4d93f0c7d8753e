"""The results as plots: speed-ups of all methods, acceptance by budget of a draft's cache."""

import collections
import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.terminal import shape

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")


def write(rows: list[dict[str, Any]], directory: pathlib.Path, title: str) -> list[str]:
    """Returns the names of the plots that a grid's finished rows were worth, having written them.

    `speedup.png` of cells that were timed, `acceptance.png` of a grid with several budgets.
    """
    drawn = [row for row in rows if row["status"] == "ok" and row["draft"] != "none"]
    figures = {}
    if drawn and drawn[0]["speedup"] is not None:
        figures["speedup.png"] = speedups(rows, drawn, title)
    if len({row["kv_budget"] for row in drawn} - {None}) > 1:
        figures["acceptance.png"] = acceptance(drawn, title)
    for name in ("speedup.png", "acceptance.png"):
        if name not in figures:
            (directory / name).unlink(missing_ok=True)  # of an earlier grid of that name
    for name, figure in figures.items():
        partial = directory / f".{name}.partial"
        figure.savefig(partial, dpi=150, format="png")
        partial.replace(directory / name)
    return list(figures)


def speedups(rows: list[dict[str, Any]], drawn: list[dict[str, Any]], title: str) -> Figure:
    """Returns speed-ups by (batch, context), a bar for each method, τ above it.

    Whiskers span the single repeats, each against the plain run beside it.
    """
    shapes = list(dict.fromkeys(shape(row) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in drawn))
    figure = Figure(
        figsize=(max(6.4, 1.2 + 0.75 * len(shapes) * (len(methods) + 0.6)), 4.4),
        layout="constrained",
    )
    axes = figure.subplots()
    width = 0.8 / max(1, len(methods))
    for i, name in enumerate(methods):
        mine = [row for row in drawn if row["method"] == name]
        x = [shapes.index(shape(row)) + (i - (len(methods) - 1) / 2) * width for row in mine]
        height = [row["speedup"] for row in mine]
        whiskers = (
            [max(0.0, row["speedup"] - row["speedup_low"]) for row in mine],
            [max(0.0, row["speedup_high"] - row["speedup"]) for row in mine],
        )
        axes.bar(x, height, width * 0.92, label=name, color=COLOURS[i % len(COLOURS)], zorder=2)
        axes.errorbar(x, height, whiskers, fmt="none", ecolor="#444444", capsize=3, zorder=3)
        for at, row in zip(x, mine, strict=True):
            top = max(row["speedup"], row["speedup_high"])
            label = f"{row['speedup']:.2f}×\nτ {row['tau']:.1f}"
            axes.annotate(
                label,
                (at, top),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5},
            )
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1, zorder=4, label="plain decoding")
    axes.set_xticks(range(len(shapes)), [f"batch {b}\ncontext {c:,}" for b, c in shapes])
    axes.set_xlim(-0.5, max(1, len(shapes)) - 0.5)
    axes.set_ylim(0, 1.2 * max([1.0, *(max(r["speedup"], r["speedup_high"]) for r in drawn)]))
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title(f"{title}: {rows[0]['dtype']}, {rows[0]['device']}" if rows else title)
    axes.grid(axis="y", alpha=0.3, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


# What tells lines apart beside the policy, and how a legend says it; only what varies is said.
_TOLD = {
    "draft": "{}",
    "draft_model": "{}",
    "sinks": "{} sinks",
    "refresh_every": "refreshed/{}",
    "kv_dtype": "{}",
    "recent": "recent {}",
    "sink_positions": "{}",
    "tree": "{}",
    "draw": "{}",
    "verifier": "{}",
}


def acceptance(drawn: list[dict[str, Any]], title: str) -> Figure:
    """Returns the accepted share by budget: a panel for each (batch, context), lines for methods.

    Refreshed pins are dashed, quantized entries dotted; a method without a budget is a level.
    """
    shapes = list(dict.fromkeys(shape(row) for row in drawn))
    figure = Figure(figsize=(3.0 + 4.2 * len(shapes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    varying = [name for name in _TOLD if len({row[name] for row in drawn}) > 1]
    policies = list(dict.fromkeys(row["policy"] for row in drawn))
    for axes, (batch, context) in zip(panels, shapes, strict=True):
        lines = collections.defaultdict(list)
        for row in drawn:
            if shape(row) == (batch, context):
                lines[_label(row, varying)].append(row)
        for label, mine in lines.items():
            _draw_line(axes, mine, label, f"C{policies.index(mine[0]['policy'])}")
        ticks = sorted({row["kv_budget"] for row in drawn} - {None})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("budget (slots for each layer and KV head)")
        axes.set_title(f"batch {batch}, context {context:,}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("drafted tokens accepted")
    panels[-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"{title}: {drawn[0]['dtype']}, {drawn[0]['new_tokens']} new tokens a row")
    return figure


def _draw_line(axes: Axes, mine: list[dict[str, Any]], label: str, colour: str) -> None:
    """Draws one method's acceptance; `mine` are its rows at one (batch, context)."""
    first = mine[0]
    if first["kv_budget"] is None:
        axes.axhline(first["acceptance_rate"], color=colour, linewidth=1, label=label)
        return
    style = ":" if first["kv_dtype"] else "--" if first["refresh_every"] else "-"
    pairs = sorted((row["kv_budget"], row["acceptance_rate"]) for row in mine)
    budgets, height = zip(*pairs, strict=True)
    axes.plot(budgets, height, style, marker="o", ms=4, color=colour, label=label)


def _label(row: dict[str, Any], varying: list[str]) -> str:
    told = [_TOLD[name].format(row[name]) for name in varying if row[name]]
    return " ".join([row["policy"], *told]).strip()
