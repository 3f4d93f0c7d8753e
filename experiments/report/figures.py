"""Results as bars and lines: speed-ups, acceptance, τ, phases, throughput against latency.

Colours are told apart by colour-blind readers too (Okabe and Ito's), and lines by their marks.
"""

import collections
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.terminal import shape

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")


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
    axes.set_xticks(range(len(shapes)), [f"batch {b}\ncontext {c:,}" for b, c, *_ in shapes])
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


def by_budget(drawn: list[dict[str, Any]], title: str, column: str, label: str) -> Figure:
    """Returns a column by budget: a panel for each (batch, context), lines for methods.

    Refreshed pins are dashed, quantized entries dotted; a method without a budget is a level.
    """
    shapes = list(dict.fromkeys(shape(row) for row in drawn))
    figure = Figure(figsize=(3.0 + 4.2 * len(shapes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    varying = [name for name in _TOLD if len({row[name] for row in drawn}) > 1]
    policies = list(dict.fromkeys(row["policy"] for row in drawn))
    for axes, at in zip(panels, shapes, strict=True):
        lines = collections.defaultdict(list)
        for row in drawn:
            if shape(row) == at:
                lines[_label(row, varying)].append(row)
        for name, mine in lines.items():
            colour = COLOURS[policies.index(mine[0]["policy"]) % len(COLOURS)]
            _draw_line(axes, mine, name, colour, column)
        ticks = sorted({row["kv_budget"] for row in drawn} - {None})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("budget (slots for each layer and KV head)")
        axes.set_title(f"batch {at[0]}, context {at[1]:,}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(label)
    panels[-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"{title}: {drawn[0]['dtype']}, {drawn[0]['new_tokens']} new tokens a row")
    return figure


def _draw_line(
    axes: Axes, mine: list[dict[str, Any]], label: str, colour: str, column: str
) -> None:
    """Draws one method's column; `mine` are its rows at one (batch, context)."""
    first = mine[0]
    if first["kv_budget"] is None:
        axes.axhline(first[column], color=colour, linewidth=1, label=label)
        return
    style = ":" if first["kv_dtype"] else "--" if first["refresh_every"] else "-"
    pairs = sorted((row["kv_budget"], row[column]) for row in mine)
    budgets, height = zip(*pairs, strict=True)
    axes.plot(budgets, height, style, marker="o", ms=4, color=colour, label=label)


def _label(row: dict[str, Any], varying: list[str]) -> str:
    told = [_TOLD[name].format(row[name]) for name in varying if row[name]]
    return " ".join([row["policy"], *told]).strip()


def acceptance_by_depth(found: dict[str, tuple[list[float], list[float]]]) -> Figure:
    """Returns the share of rounds by depth, of those that came so far and of all; lines: methods.

    Args:
      found: for each method (acceptance if reached, acceptance by depth), means over its cells.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    titles = ("went on, of those that reached the depth before", "reached the depth, of all rounds")
    for axes, which, title in ((left, 0, titles[0]), (right, 1, titles[1])):
        for i, (name, curves) in enumerate(found.items()):
            style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)]}
            depths = range(1, len(curves[which]) + 1)
            axes.plot(depths, curves[which], label=name, **style)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("depth")
        axes.set_ylim(0, 1.03)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _plain_axes(axes)
    left.set_ylabel("share of rounds")
    _legend_beside(right)
    return figure


PARTS = {
    "draft_s": ("draft", "#E69F00"),
    "score_s": ("target's pass", "#0072B2"),
    "verify_s": ("verification", "#CC79A7"),
    "commit_s": ("commit", "#009E73"),
    "rest_s": ("rest", "#999999"),
    "host_s": ("waiting for the host", "#DDDDDD"),
}


def time_split(rows: list[dict[str, Any]]) -> Figure:
    """Returns where the time of a round goes: a bar for each cell, shares of the traced rounds."""
    figure = Figure(figsize=(9, 1.4 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for column, (name, colour) in PARTS.items():
        shares = [100 * (row[column] or 0.0) / _traced(row) for row in rows]
        axes.barh(range(len(rows)), shares, 0.75, left, color=colour, label=name)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    names = [f"{row['method']}  ({row['batch']} × {row['context']:,})" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("% of the time of a round (in brackets: batch × context)")
    axes.spines[["top", "right"]].set_visible(False)
    _legend_beside(axes)
    return figure


def _traced(row: dict[str, Any]) -> float:
    return sum(row[column] or 0.0 for column in PARTS)


def throughput(rows: list[dict[str, Any]]) -> Figure:
    """Returns tokens a second of a batch against a user's ms a token, a panel for each context."""
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
            style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)]}
            x = [row["tpot_ms_p50"] for row in mine]
            axes.plot(x, [row["decode_tok_s"] for row in mine], label=name, **style)
            for row in mine:
                at = (row["tpot_ms_p50"], row["decode_tok_s"])
                axes.annotate(str(row["batch"]), at, (4, 4), textcoords="offset points", fontsize=7)
        axes.set_title(f"context {context:,}", fontsize=10)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _plain_axes(axes)
    for axes in panels[len(contexts) :]:
        axes.set_visible(False)
    figure.supxlabel("ms a token of one user, median (numbers: batch)", fontsize=10)
    figure.supylabel("tokens a second of the batch", fontsize=10)
    _legend_beside(panels[min(columns, len(contexts)) - 1])
    return figure


MARKS = ("o", "s", "^", "D", "v", "P", "X")


def _plain_axes(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _legend_beside(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
