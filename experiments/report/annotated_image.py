"""An image of values with a text in every cell."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize

ABSENT = "#DDDDDD"


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
