"""Two folders of results side by side: the same cells on two machines, or of two versions."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.report.figures import COLOURS
from experiments.report.results_folder import CellResult, Results


def compare(mine: Results, other: Results) -> tuple[pd.DataFrame, Figure]:
    """Returns (a line for each cell of either folder, a picture of the speed-ups of both).

    Cells are the same if all their settings are. `same_tokens` says whether every request's text is
    the same; a cell that one folder lacks, or where it failed, has no numbers there.
    """
    ours, theirs = ({c.key: c for c in results.cells} for results in (mine, other))
    names = mine.directory.name, other.directory.name
    if names[0] == names[1]:
        names = str(mine.directory), str(other.directory)
    table = pd.DataFrame(
        [_line(ours.get(key), theirs.get(key), names) for key in dict.fromkeys([*ours, *theirs])]
    )
    return table, _picture(table, names)


def _line(
    mine: CellResult | None, other: CellResult | None, names: tuple[str, str]
) -> dict[str, Any]:
    """Returns the comparison of a cell."""
    either = mine or other
    assert either is not None
    line: dict[str, Any] = {name: either.row[name] for name in ("batch", "context", "method")}
    for name, cell in zip(names, (mine, other), strict=True):
        row = cell.row if cell else {}
        line[f"speedup {name}"] = row.get("speedup")
        line[f"τ {name}"] = row.get("tau")
        line[f"tok/s {name}"] = row.get("decode_tok_s")
    rates = [line[f"tok/s {name}"] for name in names]
    line["tok/s ratio"] = rates[0] / rates[1] if all(rates) else None
    whole = mine is not None and other is not None and mine.metrics and other.metrics
    line["same_tokens"] = mine.tokens() == other.tokens() if whole else None  # type: ignore[union-attr]
    return line


def _picture(table: pd.DataFrame, names: tuple[str, str]) -> Figure:
    """Returns each cell's two speed-ups as points of one line."""
    both = table.dropna(subset=[f"speedup {name}" for name in names])
    both = both[both["method"] != "plain"]
    figure = Figure(figsize=(9, 1.4 + 0.28 * max(1, len(both))), layout="constrained")
    axes = figure.subplots()
    places = range(len(both))
    low, high = (both[f"speedup {name}"] for name in names)
    axes.hlines(places, low, high, color="#BBBBBB", linewidth=2, zorder=1)
    for name, colour, mark in zip(names, COLOURS, ("o", "D"), strict=False):
        axes.scatter(both[f"speedup {name}"], places, 36, colour, marker=mark, label=name, zorder=2)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    labels = [
        f"{m}  ({b} × {c:,})"
        for m, b, c in zip(both["method"], both["batch"], both["context"], strict=True)
    ]
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_ylim(len(both) - 0.4, -0.6)
    axes.set_xlabel("speed-up over plain decoding (in brackets: batch × context)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
