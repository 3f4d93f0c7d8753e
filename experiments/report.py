"""The results as people read them: a table in the terminal and a plot of the speed-ups."""

import collections
import pathlib
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from experiments.measure import PLAIN_FAILED

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
LEGEND = (
    "speed-up: against plain decoding; τ: tokens emitted a target pass and row; accepted: of those "
    "that a perfect draft would have had accepted;",
    "exact: rows equal to plain decoding; agree: how often draft and target choose the same token "
    "on the prompts' text; repeats: 8-grams that stood in the text before",
)


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Returns the table that the launcher prints, a section for each (batch, context); `LEGEND`."""
    out = Table(title=title)
    for name in ("batch", "context", "method"):
        out.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    headings = ("tok/s", "speed-up", "τ", "accepted", "exact", "agree", "repeats")
    for name in headings:
        out.add_column(name, justify="right")
    for i, row in enumerate(rows):
        start = [str(row["batch"]), str(row["context"]), row["method"]]
        end = i + 1 == len(rows) or _shape(rows[i + 1]) != _shape(row)
        if row["status"] != "ok":
            out.add_row(*start, "[red]failed[/]", end_section=end)
            continue
        formats = {"decode_tok_s": "{:.0f}", "speedup": "{:.2f}×", "tau": "{:.2f}"}
        formats |= {"acceptance_rate": "{:.3f}", "exact_match": "{:.3f}", "agreement": "{:.3f}"}
        formats |= {"repeated_8grams": "{:.3f}"}
        cells = ("–" if row[k] is None else f.format(row[k]) for k, f in formats.items())
        out.add_row(*start, *cells, end_section=end)
    return out


def is_exact(row: dict[str, Any]) -> bool:
    """Returns whether a finished row's tokens are plain decoding's, as far as that can be asked."""
    return row["exact_match"] is None or row["exact_match"] == 1.0


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines below the table: bandwidth of plain decoding, ties, failures."""
    lines = []
    told: dict[Any, set[str]] = collections.defaultdict(set)
    for row in rows:
        at = f"batch {row['batch']}, context {row['context']}"
        if row["status"] != "ok":
            if not is_told(row, told[_shape(row)]):
                lines.append(f"{at}, {row['method']} failed: {row['error']}")
        elif row["draft"] == "none":
            lines.append(
                f"{at}: plain decoding reads {row['ar_gbs']:.1f} GB/s, "
                f"{row['bandwidth_share']:.0%} of the {row['read_gbs']:.1f} GB/s measured here"
            )
    good = [row for row in rows if row["status"] == "ok"]
    ties = sum(row["ties"] for row in good)
    wrong = sum(not is_exact(row) for row in good)
    lines.append(f"{ties} rows part from plain decoding at a tie decided by rounding")
    if wrong:
        lines.append(f"{wrong} cells are NOT equal to plain decoding")
    return lines


def is_told(row: dict[str, Any], told: set[str]) -> bool:
    """Returns whether a failure is plain decoding's, which `told` holds; adds it otherwise."""
    cause = row["error"].removeprefix(PLAIN_FAILED)
    if row["error"] != cause and cause in told:
        return True
    told.add(cause)
    return False


def plot(rows: list[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Writes the plot: speed-up by (batch, context), a bar for each method, τ above it.

    Whiskers span the single repeats, each against the plain run beside it.
    """
    drawn = [row for row in rows if row["status"] == "ok" and row["draft"] != "none"]
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in drawn))
    figure = Figure(
        figsize=(max(6.4, 1.2 + 0.75 * len(shapes) * (len(methods) + 0.6)), 4.4),
        layout="constrained",
    )
    axes = figure.subplots()
    width = 0.8 / max(1, len(methods))
    for i, name in enumerate(methods):
        mine = [row for row in drawn if row["method"] == name]
        x = [shapes.index(_shape(row)) + (i - (len(methods) - 1) / 2) * width for row in mine]
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
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=150, format="png")
    partial.replace(path)


def _shape(row: dict[str, Any]) -> tuple[int, int]:
    return row["batch"], row["context"]
