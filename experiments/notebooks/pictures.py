"""A token tree with its verification, drawn for the notebooks.

The colours are safe for colour-blind readers and never the only sign: an accepted path is thick,
and a bonus token has a dashed box.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

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
