"""What the notebooks draw: a token tree with the target's verdict, and heat maps over a grid.

Colours are told apart by colour-blind readers too, and nothing is said by colour alone: an accepted
path is drawn thick, a bonus token in a dashed box, and every cell of a heat map has its number.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from magicjax.trees.token_tree import NO_NODE, depths

ACCEPTED, BONUS, REFUSED = "#0072B2", "#D55E00", "#999999"
ABSENT = "#DDDDDD"


def shown(token: str) -> str:
    """Returns a token's text with its blanks made visible: `·` a space, `↵` a new line."""
    return token.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥") or "∅"


def tree_layout(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the nodes of a tree are drawn, (x, y), each [N]: the root on the left.

    Leaves stand below each other, one apart, and every other node in the middle of its children.
    Parents [-1, 0, 0, 1] give x = 0 1 1 2 and y = -0.5 0 -1 0.
    """
    x = np.asarray(depths(np.asarray(parents)), float)
    y = np.zeros(len(x))
    leaves = 0

    def place(node: int) -> None:
        nonlocal leaves
        below = [child for child, parent in enumerate(parents) if parent == node]
        for child in below:
            place(child)
        if below:
            y[node] = np.mean([y[child] for child in below])
        else:
            y[node] = -leaves
            leaves += 1

    place(0)
    return x, y


def token_tree(
    axes: Axes,
    tokens: Sequence[str],
    parents: Sequence[int],
    path: Sequence[int] = (),
    bonus: str | None = None,
) -> None:
    """Draws a token tree from left to right, and, where it is known, what the target made of it.

    Args:
      axes: to draw on.
      tokens: each node's text, [N].
      parents: each node's parent, [N], -1 for the root.
      path: the accepted nodes, the root first; none: nothing is known yet.
      bonus: the target's own token behind the path.
    """
    x, y = tree_layout(parents)
    for node, parent in enumerate(parents):
        if parent == NO_NODE:
            continue
        on_path = node in path
        axes.plot(
            x[[parent, node]],
            y[[parent, node]],
            color=ACCEPTED if on_path or not path else REFUSED,
            linewidth=3 if on_path else 1,
            zorder=1,
        )
    for node, token in enumerate(tokens):
        colour = ACCEPTED if node in path or not path else REFUSED
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
    """Returns a column over batch and context as colours and numbers, a panel for each method.

    Args:
      cells: rows of a `summary.csv`, with batch, context, method, status and the column.
      column: what is shown.
      label: what the colour bar calls it.
      centre: of diverging colours on a scale of ratios, such as 1 of a speed-up; None: colours
        from the least to the most.

    Raises:
      ValueError: no cell has a value in that column.
    """
    shown_cells = cells[cells[column].notna()]
    if shown_cells.empty:
        raise ValueError(f"no cell has a value in {column!r}: choose another column or summary")
    methods = list(dict.fromkeys(cells["method"]))
    batches, contexts = sorted(cells["batch"].unique()), sorted(cells["context"].unique())
    values = shown_cells[column].to_numpy(float)
    norm: Normalize
    if centre is None:
        norm, colours = Normalize(values.min(), values.max()), colormaps["cividis"]
    else:  # twice as fast is as far from the centre as half as fast
        most = max(0.1, float(np.abs(np.log2(values / centre)).max()))
        norm, colours = CenteredNorm(0, most), colormaps["PuOr"]
    wide, high = max(2.8, 1.2 + 0.8 * len(batches)), max(2.8, 1.2 + 0.5 * len(contexts))
    columns = min(len(methods), 3)
    lines = -(-len(methods) // columns)
    figure = Figure(figsize=(1.0 + wide * columns, high * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    image = None
    for axes, method in zip(panels, methods):
        table = pd.DataFrame(index=contexts, columns=batches, dtype=float)
        status = pd.DataFrame("", index=contexts, columns=batches)
        for _, cell in cells[cells["method"] == method].iterrows():
            table.loc[cell["context"], cell["batch"]] = cell[column]
            status.loc[cell["context"], cell["batch"]] = cell["status"]
        image = _heat_map(axes, table, status, centre, norm, colours)
        axes.set_title(method, fontsize=10)
    for axes in panels[len(methods) :]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=panels.tolist(), label=label)
    if centre is not None:
        bar.ax.yaxis.set_major_formatter(_ratio_of(centre))
    return figure


def _ratio_of(centre: float) -> FuncFormatter:
    """Returns what writes a tick of the colour bar, a power of two, as the value itself."""
    return FuncFormatter(lambda power, _: f"{centre * 2**power:.2g}")


def _heat_map(
    axes: Axes,
    table: pd.DataFrame,
    status: pd.DataFrame,
    centre: float | None,
    norm: Normalize,
    colours: Colormap,
):
    """Returns the image of one method, its number in each cell, or what became of the cell."""
    values = table.to_numpy(float)
    scaled = values if centre is None else np.log2(values / centre)
    axes.set_facecolor(ABSENT)
    image = axes.imshow(scaled, cmap=colours, norm=norm, origin="lower", aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        text, colour = f"{value:.2f}", "black"
        if np.isnan(value):
            told = status.iat[i, j] or "not run"
            text = "–" if told == "ok" else told.replace(" ", "\n")
        elif np.dot(colours(norm(scaled[i, j]))[:3], (0.299, 0.587, 0.114)) < 0.5:
            colour = "white"
        axes.text(j, i, text, ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(values.shape[1]), [f"{batch:,}" for batch in table.columns])
    axes.set_yticks(range(values.shape[0]), [f"{context:,}" for context in table.index])
    axes.set_xlabel("batch")
    place = axes.get_subplotspec()
    if place is None or place.is_first_col():
        axes.set_ylabel("context")
    axes.spines[:].set_visible(False)
    return image
