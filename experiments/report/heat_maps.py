"""Speed-ups over batch and context: who is faster where, and what did not run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.report.terminal import FAILED

MOST_PANELS = 9
MAP = "PuOr"  # violet: faster, orange: slower; told apart by colour-blind readers


def speedups(rows: Sequence[dict[str, Any]], value: str = "speedup", unit: str = "×") -> Figure:
    """Returns a column by batch and context, a panel for each method; 1 is the middle of colours.

    Cells that did not run are hatched and say why. Of many methods the fastest are shown.
    """
    batches, contexts = sorted({r["batch"] for r in rows}), sorted({r["context"] for r in rows})
    shown = _fastest(rows, value)
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    size = (1.6 + columns * (1.0 + 0.95 * len(contexts)), lines * (1.1 + 0.5 * len(batches)) + 0.3)
    figure = Figure(figsize=(max(5.0, size[0]), max(2.4, size[1])), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    found = [row[value] for row in rows if row[value]]
    span = max(0.3, *(abs(np.log2(x)) for x in found)) if found else 1.0
    norm = TwoSlopeNorm(0.0, -span, span)
    image = None
    for axes, name in zip(panels, shown, strict=False):
        mine = {(r["batch"], r["context"]): r for r in rows if r["method"] == name}
        image = _panel(axes, mine, batches, contexts, value, unit, norm)
        axes.set_title(name, fontsize=9)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    if image is not None:
        ticks = [t for t in (-3, -2, -1, 0, 1, 2, 3) if abs(t) <= span] or [0]
        bar = figure.colorbar(image, ax=list(panels), ticks=ticks, shrink=0.8)
        bar.ax.set_yticklabels([f"{2.0**t:g}{unit}" for t in ticks])
    return figure


def _fastest(rows: Sequence[dict[str, Any]], value: str) -> list[str]:
    """Returns the methods to show, in their order."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    best = {
        name: max((r[value] or 0.0 for r in rows if r["method"] == name), default=0.0)
        for name in methods
    }
    kept = sorted(methods, key=lambda name: -best[name])[:MOST_PANELS]
    return [name for name in methods if name in kept]


def _panel(
    axes: Axes,
    mine: dict[tuple[int, int], dict[str, Any]],
    batches: Sequence[int],
    contexts: Sequence[int],
    value: str,
    unit: str,
    norm: TwoSlopeNorm,
) -> Any:
    """Returns the image of one method's panel, drawn."""
    table = np.full((len(batches), len(contexts)), np.nan)
    for i, batch in enumerate(batches):
        for j, context in enumerate(contexts):
            row = mine.get((batch, context))
            if row is None:
                continue  # nothing was asked there
            if row[value]:
                table[i, j] = np.log2(row[value])
                dark = abs(norm(table[i, j]) - 0.5) > 0.33
                said, colour = f"{row[value]:.2f}{unit}", "white" if dark else "black"
            else:
                said, colour = FAILED.get(row["status"], "failed").replace(" of ", " of\n"), "black"
                axes.add_patch(
                    Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="////", ec="#BBBBBB")
                )
            size = 9 if row[value] else 7
            axes.text(j, i, said, ha="center", va="center", fontsize=size, color=colour)
    image = axes.imshow(table, cmap=MAP, norm=norm, aspect="auto")
    axes.set_xticks(range(len(contexts)), [f"{c:,}" for c in contexts], fontsize=8)
    axes.set_yticks(range(len(batches)), [str(b) for b in batches], fontsize=8)
    axes.set_xlabel("context", fontsize=8)
    axes.set_ylabel("batch", fontsize=8)
    return image
