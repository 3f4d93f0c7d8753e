"""The best method of each group of cells, with intervals of its speedup.

A cell's runs alternate with runs of plain decoding of the same prompts. The interval is a
percentile bootstrap that draws runs and batches of prompts with replacement, the same for the
method and for plain decoding (Efron and Tibshirani, 1993). Batches are drawn, not the rows of one
batch, because rows that decode together have one time. Without times, methods are compared by τ,
with requests drawn.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from experiments.report import labels
from experiments.report.labels import Row, Rows
from experiments.report.results_folder import CellResult
from experiments.schema.columns import INTERVALS, interval_columns

RESAMPLES = 2000
LEVEL = 95  # percent
FEW = 10  # with fewer measurements an interval is too narrow
STEADY = 1.5  # largest ratio between speeds of plain decoding on a machine without other work


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a group of cells.

    Attributes:
      group: columns that tell groups apart, with their values.
      best: the exact row with the highest speedup, or τ without times; None if there is none.
      timed: whether speedups are compared, not τ.
      plain_rates: the lowest and the highest tokens/s of plain decoding beside the methods.
    """

    group: Row
    best: Row | None
    timed: bool
    plain_rates: tuple[float, float] | None

    @property
    def plain_wins(self) -> bool:
        """Whether plain decoding is faster than every exact method."""
        if not self.timed or self.unclear:
            return False
        return self.best is None or self.best["speedup"] <= 1

    @property
    def unclear(self) -> bool:
        """Whether the interval of the best speedup contains 1."""
        if not self.timed or self.best is None:
            return False
        low, high = (self.best[name] for name in interval_columns("speedup"))
        return low is not None and low <= 1 <= high

    @property
    def disturbed(self) -> bool:
        """Whether the same plain decoding had very different speeds beside the methods."""
        return self.plain_rates is not None and self.plain_rates[1] > STEADY * self.plain_rates[0]


def with_intervals(cells: Sequence[CellResult]) -> list[Row]:
    """Returns the cells' rows with intervals, and the column `evidence`, what they are of.

    The interval is of `speedup`, in rows without times of `tau`. The other columns of `INTERVALS`
    are None, and without a repetition all of them.
    """
    return [cell.row | _interval(cell) for cell in cells]


def _interval(cell: CellResult) -> Row:
    """Returns the columns that `with_intervals` adds to a cell's row."""
    columns: Row = {**dict.fromkeys(INTERVALS), "evidence": ""}
    if not cell.metrics:
        return columns
    timed = cell.row["speedup"] is not None
    if timed:
        seconds, plain_seconds = cell.seconds()
        runs, batches = seconds.shape
        interval = speedup_interval(seconds, plain_seconds)
    else:
        requests = cell.requests()
        rounds = np.array([request["rounds"] for request in requests], float)
        runs, batches = 1, len(rounds)
        interval = tau_interval(rounds, np.array([request["tau"] for request in requests]))
    size = cell.row.get("requests") or cell.row["batch"]
    evidence = f"{runs} run{'s' * (runs > 1)} of {size} request{'s' * (size > 1)}"
    if timed and cell.row["batch"] > 1 and not cell.row.get("slots"):
        evidence += f" in {batches} batch{'es' * (batches > 1)}"
    if interval is None:
        evidence += ": no interval"
    elif runs * batches < FEW:
        evidence += ": few"
    names = interval_columns("speedup" if timed else "tau")
    bounds = zip(names, interval or (None, None), strict=True)
    return columns | dict(bounds) | {"evidence": evidence}


def speedup_interval(
    seconds: Float[np.ndarray, "R B"], plain_seconds: Float[np.ndarray, "R B"]
) -> tuple[float, float] | None:
    """Returns the interval of median rate over median plain rate; None for a single measurement.

    The arrays hold the seconds of each run and batch; both decode the same number of tokens.
    """
    num_runs, num_batches = seconds.shape
    if seconds.size < 2:
        return None
    draw = np.random.default_rng(0)
    runs = draw.integers(num_runs, size=(RESAMPLES, num_runs, 1))
    batches = draw.integers(num_batches, size=(RESAMPLES, 1, num_batches))
    rate, plain_rate = (
        np.median(1 / table[runs, batches].sum(-1), -1) for table in (seconds, plain_seconds)
    )
    return _percentiles(rate / plain_rate)


def tau_interval(
    rounds: Float[np.ndarray, " N"], taus: Float[np.ndarray, " N"]
) -> tuple[float, float] | None:
    """Returns the interval of tokens per round over requests; None for a single request."""
    if len(rounds) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    return _percentiles((taus * rounds)[drawn].sum(1) / rounds[drawn].sum(1))


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


def answers(rows: Rows) -> list[Answer]:
    """Returns the answer of each group, of rows with intervals."""
    columns = labels.group_columns(rows)
    return [_answer(group, columns) for group in labels.grouped(rows)]


def _answer(rows: Rows, columns: Sequence[str]) -> Answer:
    drafted = [row for row in rows if row["status"] == "ok" and row["draft"] != "none"]
    timed = any(row["speedup"] is not None for row in drafted)
    ranked = ranking(drafted, "speedup" if timed else "tau")
    rates = [row["ar_decode_tok_s"] for row in drafted if row["speedup"] is not None]
    return Answer(
        {name: rows[0].get(name) for name in columns},
        next((row for row in ranked if labels.is_exact(row)), None),
        timed,
        (min(rates), max(rates)) if rates else None,
    )


def sentences(rows: Rows) -> list[str]:
    """Returns the answers in words: warnings, the highest speedup, where plain decoding wins.

    Args:
      rows: with intervals.
    """
    results = answers(rows)
    timed = [one for one in results if one.timed]
    faster = [
        (one, one.best) for one in timed if one.best and not one.unclear and not one.plain_wins
    ]
    lines = _disturbances(timed)
    if faster:
        first, best = max(faster, key=lambda pair: pair[1]["speedup"])
        lines.append(
            f"Fastest: {best['method']}, {labels.with_interval(best, 'speedup')}× plain decoding "
            f"({labels.describe(first.group)}; {best['evidence']})."
        )
    elif timed:
        lines.append("No method is shown to be faster than plain decoding.")
    lines += _equal_texts(rows)
    if len(faster) == len(timed) > 1:
        lines.append(
            "In every batch and context that was timed, at least one method is faster than plain "
            "decoding."
        )
    if lost := _groups(one for one in timed if one.plain_wins):
        lines.append(f"Plain decoding wins at {lost}.")
    if unclear := _groups(one for one in timed if one.unclear):
        lines.append(f"Undecided, because the interval contains 1: {unclear}.")
    if untimed := sum(one.best is not None and not one.timed for one in results):
        lines.append(f"Without times, methods are compared by τ ({untimed} of {len(results)}).")
    return lines


def _disturbances(results: Iterable[Answer]) -> list[str]:
    """Returns the warning that other work disturbed the machine, if it did."""
    rates = [
        f"{one.plain_rates[0]:,.0f} to {one.plain_rates[1]:,.0f} tokens/s ({_groups([one])})"
        for one in results
        if one.disturbed and one.plain_rates is not None
    ]
    if not rates:
        return []
    return [
        f"Other work disturbed the machine, so measure again: plain decoding of the same prompts "
        f"ran at {'; '.join(rates)}."
    ]


def _equal_texts(rows: Rows) -> list[str]:
    """Returns the sentence on how many texts equal plain decoding's, if any are compared."""
    compared = [
        (row["exact_match"], row.get("requests") or row["batch"])
        for row in rows
        if row["status"] == "ok" and row["draft"] != "none" and row["exact_match"] is not None
    ]
    if not compared:
        return []
    texts = sum(size for _, size in compared)
    equal = sum(round(share * size) for share, size in compared)
    if texts == 1:
        return [f"The text {'equals' if equal else 'does NOT equal'} plain decoding's."]
    if equal == texts:
        return [f"All {texts} texts equal plain decoding's."]
    are = "is" if texts - equal == 1 else "are"
    return [f"{texts - equal} of {texts} texts {are} NOT equal to plain decoding's."]


def _groups(results: Iterable[Answer]) -> str:
    """Returns the names of groups."""
    return "; ".join(labels.describe(one.group) for one in results)


def ranking(rows: Rows, column: str) -> list[Row]:
    """Returns the rows that have a value in a column, the largest first."""
    known = [row for row in rows if row[column] is not None]
    return sorted(known, key=lambda row: -row[column])
