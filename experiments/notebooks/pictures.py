"""Plots of the notebooks: a token tree with its verification, and heat maps over a grid.

The colours are safe for colour-blind readers and never the only sign: an accepted path is thick, a
bonus token has a dashed box, and every cell of a heat map shows its number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.report.annotated_image import annotated_image
from magicjax.trees.token_tree import NO_NODE, depths

ACCEPTED, BONUS, REJECTED = "#0072B2", "#D55E00", "#999999"


def shown(token: str) -> str:
    """Returns a token's text with visible white space: `·` a space, `↵` a new line."""
    return token.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥") or "∅"


def tree_layout(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coordinates (x, y) of a tree's nodes, each [N], with the root on the left.

    Leaves are one below the other at distance 1, other nodes in the middle of their children.
    Parents [-1, 0, 0, 1] give x = 0 1 1 2 and y = -0.5 0 -1 0.
    """
    x = np.asarray(depths(np.asarray(parents)), float)
    y = np.zeros(len(x))
    leaves = 0

    def set_height(node: int) -> None:
        nonlocal leaves
        children = [child for child, parent in enumerate(parents) if parent == node]
        for child in children:
            set_height(child)
        if children:
            y[node] = np.mean([y[child] for child in children])
        else:
            y[node] = -leaves
            leaves += 1

    set_height(0)
    return x, y


def token_tree(
    axes: Axes,
    tokens: Sequence[str],
    parents: Sequence[int],
    path: Sequence[int] = (),
    bonus: str | None = None,
) -> None:
    """Draws a token tree from left to right, with its verification if that is known.

    Args:
      axes: to draw on.
      tokens: each node's text, [N].
      parents: each node's parent, [N], -1 for the root.
      path: the accepted nodes, the root first; empty before verification.
      bonus: the bonus token after the path.
    """
    x, y = tree_layout(parents)
    for node, parent in enumerate(parents):
        if parent == NO_NODE:
            continue
        on_path = node in path
        axes.plot(
            x[[parent, node]],
            y[[parent, node]],
            color=ACCEPTED if on_path or not path else REJECTED,
            linewidth=3 if on_path else 1,
            zorder=1,
        )
    for node, token in enumerate(tokens):
        colour = ACCEPTED if node in path or not path else REJECTED
        _box(axes, x[node], y[node], f"{node}: {shown(token)}", colour, node in path)
    if bonus is not None:
        last = path[-1]
        below = [y[child] for child, parent in enumerate(parents) if parent == last]
        height = min(below) - 0.5 if below else y[last]
        axes.plot([x[last], x[last] + 1], [y[last], height], "--", color=BONUS, zorder=1)
        _box(axes, x[last] + 1, height, f"bonus: {shown(bonus)}", BONUS, True, dashed=True)
    axes.set_xlim(-0.5, x.max() + (1.5 if bonus is not None else 0.5))
    axes.set_ylim(y.min() - 0.8, y.max() + 0.6)
    axes.axis("off")


def _box(
    axes: Axes, x: float, y: float, text: str, colour: str, strong: bool, dashed: bool = False
) -> None:
    axes.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        family="monospace",
        fontsize=9.5,
        weight="bold" if strong else "normal",
        color="black" if strong or colour == ACCEPTED else "#555555",
        parse_math=False,  # a token may be a dollar sign
        zorder=2,
        bbox={
            "boxstyle": "round,pad=0.3",
            "facecolor": "white",
            "edgecolor": colour,
            "linewidth": 2 if strong else 1,
            "linestyle": "--" if dashed else "-",
        },
    )


def heat_maps(cells: pd.DataFrame, column: str, label: str, centre: float | None = None) -> Figure:
    """Returns a column by batch and context as colours and numbers, a panel for each method.

    Args:
      cells: rows of a `summary.csv`, with batch, context, method, status and the column.
      column: the values.
      label: of the colour bar.
      centre: of diverging colours on a scale of ratios, such as 1 for a speedup; None: sequential
        colours.

    Raises:
      ValueError: no cell has a value in that column.
    """
    shown_cells = cells[cells[column].notna()]
    if shown_cells.empty:
        raise ValueError(f"no cell has a value in {column!r}: choose another column or summary")
    methods = list(dict.fromkeys(cells["method"]))
    batches, contexts = (sorted(cells[name].unique()) for name in ("batch", "context"))
    values = shown_cells[column].to_numpy(float)
    norm: Normalize
    if centre is None:
        norm, colours = Normalize(values.min(), values.max()), colormaps["cividis"]
    else:  # 2 and 1 / 2 are at the same distance from the centre
        most = max(0.1, float(np.abs(np.log2(values / centre)).max()))
        norm, colours = CenteredNorm(0, most), colormaps["PuOr"]
    wide, high = max(2.8, 1.2 + 0.8 * len(batches)), max(2.8, 1.2 + 0.5 * len(contexts))
    columns = min(len(methods), 3)
    lines = -(-len(methods) // columns)
    figure = Figure(figsize=(1.0 + wide * columns, high * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    shape = len(contexts), len(batches)
    image: Any = None
    for axes, method in zip(panels, methods):
        table, texts = np.full(shape, np.nan), np.full(shape, "not\nrun", object)
        for _, cell in cells[cells["method"] == method].iterrows():
            i, j = contexts.index(cell["context"]), batches.index(cell["batch"])
            table[i, j] = cell[column]
            status = "–" if cell["status"] == "ok" else cell["status"].replace(" ", "\n")
            texts[i, j] = status if np.isnan(table[i, j]) else f"{table[i, j]:.2f}"
        scaled = table if centre is None else np.log2(table / centre)
        image = annotated_image(axes, scaled, texts, batches, contexts, colours, norm)
        axes.set_title(method, fontsize=10)
        axes.set_xlabel("batch")
    for axes in panels[::columns]:
        axes.set_ylabel("context")
    for axes in panels[len(methods) :]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=panels.tolist(), label=label)
    if centre is not None:  # ticks are powers of two
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{centre * 2**x:.2g}"))
    return figure
