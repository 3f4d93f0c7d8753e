"""Parts of the studies' plots: colours, legends, and an image of values with texts."""

import io
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure

from experiments.report.labels import COLOURS as COLOURS
from magicjax.files import write_atomically

ABSENT = "#DDDDDD"


def write_png(path: pathlib.Path, figure: Figure) -> None:
    """Writes a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    write_atomically(path, buffer.getvalue())


def clean(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Draws a light grid, and removes the upper and right spines."""
    axes.grid(axis=grid, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(axes: Axes, size: int = 8) -> None:
    """Adds a legend to the right of the axes."""
    axes.legend(frameon=False, fontsize=size, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def annotated_image(
    axes: Axes,
    table: np.ndarray,
    texts: np.ndarray,
    columns: Sequence[int],
    rows: Sequence[int],
    colours: Colormap,
    norm: Normalize,
) -> Any:
    """Returns the image of a table [rows, columns] with texts of that shape; NaN is grey."""
    axes.set_facecolor(ABSENT)
    image = axes.imshow(table, cmap=colours, norm=norm, origin="lower", aspect="auto")
    for (y, x), value in np.ndenumerate(table):
        luminance = np.dot(colours(norm(value))[:3], (0.299, 0.587, 0.114))
        colour = "black" if np.isnan(value) or luminance > 0.5 else "white"
        axes.text(x, y, texts[y, x], ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(columns)), [f"{column:,}" for column in columns])
    axes.set_yticks(range(len(rows)), [f"{row:,}" for row in rows])
    axes.spines[:].set_visible(False)
    return image
