"""Tables of acceptance by category and by request, from the cells' `requests.jsonl`."""

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from experiments.report import labels
from experiments.report.results_folder import CellResult

MAX_ROWS = 1000  # of the table of requests
MEANING = (
    "τ gives every target pass the same weight; accepted: accepted tokens / (depth × rounds); the "
    "last column: shares of the rounds that accepted 0, 1, … tokens."
)

Lines = Sequence[dict[str, Any]]


def by_category(cells: Sequence[CellResult]) -> pd.DataFrame:
    """Returns a row for each cell that drafts and each category; empty if there is only one."""
    rows = []
    for cell, lines in _drafted(cells):
        groups = collections.defaultdict(list)
        for line in lines:
            groups[line["category"]].append(line)
        if len(groups) > 1:
            rows += [
                _settings(cell, cells) | {"category": name, "rows": len(some)} | _summary(some)
                for name, some in groups.items()
            ]
    return pd.DataFrame(rows)


def by_request(cells: Sequence[CellResult]) -> pd.DataFrame:
    """Returns a row for each request of the cells that draft; empty if there are too many."""
    names = ("request", "category", "source", "tpot_ms")
    rows = [
        _settings(cell, cells) | {name: line[name] for name in names} | _summary([line])
        for cell, lines in _drafted(cells)
        for line in lines
    ]
    return pd.DataFrame(rows if len(rows) <= MAX_ROWS else [])


def _drafted(cells: Sequence[CellResult]) -> Iterable[tuple[CellResult, Lines]]:
    for cell in cells:
        # Rounds of an adaptive run have different trees.
        if cell.metrics and cell.row["draft"] != "none" and not cell.row.get("adaptive"):
            yield cell, cell.requests()


def _settings(cell: CellResult, cells: Sequence[CellResult]) -> dict[str, Any]:
    names = ("method", "batch", "context", *labels.varying([other.row for other in cells]))
    return {name: cell.row[name] for name in names}


def _summary(lines: Lines) -> dict[str, Any]:
    """Returns τ, acceptance rate, mean score and histogram of some requests of a cell."""
    histogram = [sum(counts) for counts in zip(*(line["histogram"] for line in lines))]
    rounds, depth = sum(histogram), len(histogram) - 1
    accepted = sum(n * count for n, count in enumerate(histogram))
    scores = [line["score"] for line in lines if line["score"] is not None]
    return {
        "tau": sum(line["tau"] * line["rounds"] for line in lines) / rounds,
        "accepted": accepted / (depth * rounds) if depth else math.nan,
        "score": sum(scores) / len(scores) if scores else math.nan,
        "accepted 0, 1, …": " ".join(f"{count / rounds:.0%}" for count in histogram),
    }
