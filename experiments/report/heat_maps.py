"""Speedups over batch and context as heat maps, with the cells that did not run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.report.annotated_image import annotated_image
from experiments.report.terminal import failure

MAX_PANELS = 9
# Violet is faster, orange is slower; colour-blind readers can distinguish them.
COLOUR_MAP = colormaps["PuOr"]


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
    texts = np.full(table.shape, "", object)
    for (batch, context), row in cells.items():
        i, j = batches.index(batch), contexts.index(context)
        if row[value]:
            table[i, j] = np.log2(row[value])
            texts[i, j] = f"{row[value]:.2f}{unit}"
        else:
            hatched = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="////", ec="#BBBBBB")
            axes.add_patch(hatched)
            texts[i, j] = failure(row).replace(" of ", " of\n")
    image = annotated_image(axes, table, texts, contexts, batches, COLOUR_MAP, norm)
    axes.invert_yaxis()
    axes.set_xlabel("context", fontsize=8)
    axes.set_ylabel("batch", fontsize=8)
    axes.tick_params(labelsize=8)
    return image
