"""Two folders of results side by side: the same cells on two machines, or of two versions."""

from collections.abc import Sequence

import pandas as pd

from experiments.report import figures, labels
from experiments.report.export import Figure
from experiments.report.labels import Row
from experiments.report.results_folder import CellResult, Results

COLUMNS = {"speedup": "speedup", "τ": "tau", "tok/s": "decode_tok_s"}


def compare(first: Results, second: Results) -> tuple[pd.DataFrame, Figure | None]:
    """Returns (a line per cell of either folder, a figure with the speedups of both if any are).

    Cells are the same if all their settings are equal. `same_tokens` is whether the tokens of all
    requests are equal. A cell that is missing or failed in a folder has no numbers there.
    """
    cells = [{cell.key: cell for cell in results.cells} for results in (first, second)]
    names = first.directory.name, second.directory.name
    if names[0] == names[1]:
        names = str(first.directory), str(second.directory)
    keys = dict.fromkeys([*cells[0], *cells[1]])
    settings = labels.group_columns([*first.rows, *second.rows])
    lines = [_line(cells[0].get(key), cells[1].get(key), names, settings) for key in keys]
    return pd.DataFrame(lines), _figure(lines, names)


def _line(
    first: CellResult | None,
    second: CellResult | None,
    names: tuple[str, str],
    settings: Sequence[str],
) -> Row:
    """Returns the comparison of a cell, whose settings tell its group."""
    either = first or second
    assert either is not None
    line = {name: either.row[name] for name in (*settings, "draft", "method")}
    for name, cell in zip(names, (first, second), strict=True):
        line |= {f"{h} {name}": cell.row[c] if cell else None for h, c in COLUMNS.items()}
    rates = [line[f"tok/s {name}"] for name in names]
    line["tok/s ratio"] = rates[0] / rates[1] if all(rates) else None
    line["same_tokens"] = None
    if first is not None and second is not None and first.metrics and second.metrics:
        line["same_tokens"] = first.tokens() == second.tokens()
    return line


def _figure(lines: Sequence[Row], names: tuple[str, str]) -> Figure | None:
    """Returns a line per drafted cell with a point for each of its two speedups."""
    both = [
        line | {name: line[f"speedup {name}"] for name in names}
        for line in lines
        if line["draft"] != "none" and all(line[f"speedup {name}"] for name in names)
    ]
    return figures.side_by_side(both, names) if both else None
