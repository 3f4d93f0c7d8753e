"""Speedups over batch and context as heat maps, with the cells that did not run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.report.terminal import failure

MAX_PANELS = 9
COLOUR_MAP = "PuOr"  # violet: faster, orange: slower; colour-blind readers can distinguish them


def speedups(rows: Sequence[dict[str, Any]], value: str = "speedup", unit: str = "×") -> Figure:
    """Returns a column by batch and context, a panel per method, on a log scale centred at 1.

    Cells that did not run are hatched, with the reason. At most `MAX_PANELS` methods are shown, the
    fastest.
    """
    batches, contexts = sorted({r["batch"] for r in rows}), sorted({r["context"] for r in rows})
    methods = _fastest(rows, value)
    columns = min(3, len(methods))
    lines = -(-len(methods) // columns)
    size = (1.6 + columns * (1.0 + 0.95 * len(contexts)), lines * (1.1 + 0.5 * len(batches)) + 0.3)
    figure = Figure(figsize=(max(5.0, size[0]), max(2.4, size[1])), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    logs = [abs(np.log2(row[value])) for row in rows if row[value]]
    span = max(0.3, *logs) if logs else 1.0
    norm = TwoSlopeNorm(0.0, -span, span)
    image = None
    for axes, name in zip(panels, methods, strict=False):
        mine = {(r["batch"], r["context"]): r for r in rows if r["method"] == name}
        image = _panel(axes, mine, batches, contexts, value, unit, norm)
        axes.set_title(name, fontsize=9)
    for axes in panels[len(methods) :]:
        axes.set_visible(False)
    if image is not None:
        ticks = [t for t in range(-3, 4) if abs(t) <= span]
        bar = figure.colorbar(image, ax=list(panels), ticks=ticks, shrink=0.8)
        bar.ax.set_yticklabels([f"{2.0**t:g}{unit}" for t in ticks])
    return figure


def _fastest(rows: Sequence[dict[str, Any]], value: str) -> list[str]:
    """Returns the methods to show, in the order of the rows."""
    best: dict[str, float] = {}
    for row in rows:
        best[row["method"]] = max(best.get(row["method"], 0.0), row[value] or 0.0)
    shown = sorted(best, key=lambda name: -best[name])[:MAX_PANELS]
    return [name for name in best if name in shown]


def _panel(
    axes: Axes,
    cells: dict[tuple[int, int], dict[str, Any]],
    batches: Sequence[int],
    contexts: Sequence[int],
    value: str,
    unit: str,
    norm: TwoSlopeNorm,
) -> Any:
    """Returns the image of one method's panel; `cells` are its rows by (batch, context)."""
    table = np.full((len(batches), len(contexts)), np.nan)
    for (batch, context), row in cells.items():
        i, j = batches.index(batch), contexts.index(context)
        style: dict[str, Any] = {"ha": "center", "va": "center"}
        if row[value]:
            table[i, j] = np.log2(row[value])
            dark = abs(norm(table[i, j]) - 0.5) > 0.33
            colour = "white" if dark else "black"
            axes.text(j, i, f"{row[value]:.2f}{unit}", fontsize=9, color=colour, **style)
        else:
            hatched = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="////", ec="#BBBBBB")
            axes.add_patch(hatched)
            axes.text(j, i, failure(row).replace(" of ", " of\n"), fontsize=7, **style)
    image = axes.imshow(table, cmap=COLOUR_MAP, norm=norm, aspect="auto")
    axes.set_xticks(range(len(contexts)), [f"{c:,}" for c in contexts], fontsize=8)
    axes.set_yticks(range(len(batches)), [str(b) for b in batches], fontsize=8)
    axes.set_xlabel("context", fontsize=8)
    axes.set_ylabel("batch", fontsize=8)
    return image
