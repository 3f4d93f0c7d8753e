"""Results as bars and lines: speedups, acceptance, τ, phases, throughput against latency.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; lines also differ in
their markers.
"""

import collections
import io
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.terminal import shape
from magicjax.files import write_atomically

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
PARTS = {
    "draft_s": ("draft", "#E69F00"),
    "score_s": ("target pass", "#0072B2"),
    "verify_s": ("verification", "#CC79A7"),
    "commit_s": ("commit", "#009E73"),
    "rest_s": ("other", "#999999"),
    "host_s": ("host", "#DDDDDD"),
}
Rows = Sequence[dict[str, Any]]


def write_png(path: pathlib.Path, figure: Figure) -> bytes:
    """Writes a figure as a PNG file, and returns the content of the file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    write_atomically(path, buffer.getvalue())
    return buffer.getvalue()


def clean(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Draws a light grid, and removes the upper and right spines."""
    axes.grid(axis=grid, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(axes: Axes, size: int = 8) -> None:
    """Adds a legend to the right of the axes."""
    axes.legend(frameon=False, fontsize=size, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _line_style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)]}


def speedups(rows: Rows, drafted: Rows, title: str) -> Figure:
    """Returns speedups by (batch, context), a bar per method with τ above it.

    Whiskers span the single repeats, each over the plain run next to it. `rows` are timed,
    `drafted` those of methods that draft.
    """
    shapes = list(dict.fromkeys(shape(row) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in drafted))
    width = max(6.4, 1.2 + 0.75 * len(shapes) * (len(methods) + 0.6))
    figure = Figure(figsize=(width, 4.4), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(methods):
        mine = [row for row in drafted if row["method"] == name]
        offset = (i - (len(methods) - 1) / 2) * 0.8 / len(methods)
        x = [shapes.index(shape(row)) + offset for row in mine]
        _bars(axes, mine, x, 0.8 / len(methods) * 0.92, name, COLOURS[i % len(COLOURS)])
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1, zorder=4, label="plain decoding")
    axes.set_xticks(range(len(shapes)), [f"batch {b}\ncontext {c:,}" for b, c, *_ in shapes])
    axes.set_xlim(-0.5, max(1, len(shapes)) - 0.5)
    axes.set_ylim(0, 1.2 * max([1.0, *(max(r["speedup"], r["speedup_high"]) for r in drafted)]))
    axes.set_ylabel("speedup over plain decoding")
    axes.set_title(f"{title}: {rows[0]['dtype']}, {rows[0]['device']}" if rows else title)
    clean(axes, "y")
    add_legend(axes, 9)
    return figure


def _bars(axes: Axes, rows: Rows, x: list[float], width: float, label: str, colour: str) -> None:
    """Draws the bars of one method, with whiskers and τ."""
    height = np.array([row["speedup"] for row in rows])
    low = np.array([row["speedup_low"] for row in rows])
    high = np.array([row["speedup_high"] for row in rows])
    whiskers = np.maximum(0.0, [height - low, high - height])
    axes.bar(x, height, width, label=label, color=colour, zorder=2)
    axes.errorbar(x, height, whiskers, fmt="none", ecolor="#444444", capsize=3, zorder=3)
    for at, row, top in zip(x, rows, np.maximum(height, high), strict=True):
        axes.annotate(
            f"{row['speedup']:.2f}×\nτ {row['tau']:.1f}",
            (at, top),
            (0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5},
        )


def by_budget(rows: Rows, title: str, column: str, label: str) -> Figure:
    """Returns a column by budget: a panel per (batch, context), a line per method.

    Lines with refreshed pins are dashed, those with quantized entries dotted; a method without a
    budget is a horizontal line.
    """
    shapes = list(dict.fromkeys(shape(row) for row in rows))
    figure = Figure(figsize=(3.0 + 4.2 * len(shapes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    varying = [name for name in _NAMED if len({row[name] for row in rows}) > 1]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for axes, at in zip(panels, shapes, strict=True):
        lines = collections.defaultdict(list)
        for row in rows:
            if shape(row) == at:
                lines[_line_label(row, varying)].append(row)
        for name, mine in lines.items():
            colour = COLOURS[policies.index(mine[0]["policy"]) % len(COLOURS)]
            _draw_line(axes, mine, name, colour, column)
        ticks = sorted({row["budget"] for row in rows} - {None})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("budget (slots for each layer and KV head)")
        axes.set_title(f"batch {at[0]}, context {at[1]:,}", fontsize=10)
        clean(axes)
    panels[0].set_ylabel(label)
    add_legend(panels[-1], 7)
    figure.suptitle(f"{title}: {rows[0]['dtype']}, {rows[0]['new_tokens']} new tokens per row")
    return figure


# What a line's label may name beside the policy; only what varies is named.
_NAMED = ("draft", "draft_model", "refresh_every", "kv_dtype", "tree", "draw", "verifier")


def _line_label(row: dict[str, Any], varying: list[str]) -> str:
    words = [f"{name} {row[name]}" for name in varying if row[name] not in (None, "")]
    return " ".join(filter(None, [row["policy"], *words]))


def _draw_line(axes: Axes, rows: Rows, label: str, colour: str, column: str) -> None:
    """Draws one method's column at one (batch, context)."""
    first = rows[0]
    if first["budget"] is None:
        axes.axhline(first[column], color=colour, linewidth=1, label=label)
        return
    style = ":" if first["kv_dtype"] else "--" if first["refresh_every"] else "-"
    pairs = sorted((row["budget"], row[column]) for row in rows)
    axes.plot(*zip(*pairs, strict=True), style, marker="o", ms=4, color=colour, label=label)


def acceptance_by_depth(curves: dict[str, tuple[list[float], list[float]]]) -> Figure:
    """Returns the share of rounds by depth, a line per method.

    `curves` are (acceptance if the depth before was reached, acceptance by depth).
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("accepted, of the rounds that reached the previous depth", "accepted, of all rounds")
    for which, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        for i, (name, pair) in enumerate(curves.items()):
            depths = range(1, len(pair[which]) + 1)
            axes.plot(depths, pair[which], label=name, **_line_style(i))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("depth")
        axes.set_ylim(0, 1.03)
        axes.xaxis.get_major_locator().set_params(integer=True)
        clean(axes)
    panels[0].set_ylabel("share of rounds")
    add_legend(panels[1])
    return figure


def cells_axes(rows: Rows, label: str) -> tuple[Figure, Axes]:
    """Returns a figure whose y axis has a line for each cell, from top to bottom."""
    figure = Figure(figsize=(9, 1.4 + 0.28 * max(1, len(rows))), layout="constrained")
    axes = figure.subplots()
    names = [f"{row['method']}  ({row['batch']} × {row['context']:,})" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"{label} (in parentheses: batch × context)")
    clean(axes, "x")
    return figure, axes


def time_split(rows: Rows) -> Figure:
    """Returns the phases of a round, a bar per cell, as shares of the traced rounds."""
    figure, axes = cells_axes(rows, "% of the time of a round")
    seconds = np.array([[row[column] or 0.0 for column in PARTS] for row in rows])
    shares = 100 * seconds / seconds.sum(1, keepdims=True)
    starts = shares.cumsum(1) - shares
    for i, (name, colour) in enumerate(PARTS.values()):
        bars = shares[:, i], 0.75, starts[:, i]
        axes.barh(range(len(rows)), *bars, color=colour, label=name, zorder=2)
    axes.set_xlim(0, 100)
    add_legend(axes)
    return figure


def throughput(rows: Rows) -> Figure:
    """Returns tokens/s of a batch against ms/token of one user, a panel per context."""
    contexts = sorted({row["context"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    columns = min(4, len(contexts))
    lines = -(-len(contexts) // columns)
    figure = Figure(figsize=(2.6 + 3.3 * columns, 3.4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, context in zip(panels, contexts, strict=False):
        for i, name in enumerate(methods):
            mine = [row for row in rows if (row["method"], row["context"]) == (name, context)]
            mine.sort(key=lambda row: row["batch"])
            points = np.array([(r["tpot_ms_p50"], r["decode_tok_s"]) for r in mine]).reshape(-1, 2)
            axes.plot(*points.T, label=name, **_line_style(i))
            for row, at in zip(mine, points, strict=True):
                axes.annotate(str(row["batch"]), at, (4, 4), textcoords="offset points", fontsize=7)
        axes.set_title(f"context {context:,}", fontsize=10)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        clean(axes)
    for axes in panels[len(contexts) :]:
        axes.set_visible(False)
    figure.supxlabel("ms/token of one user, median (numbers: batch)", fontsize=10)
    figure.supylabel("tokens/s of the batch", fontsize=10)
    add_legend(panels[min(columns, len(contexts)) - 1])
    return figure
