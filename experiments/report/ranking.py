"""The methods of each group in order of their speedup, as a table in HTML."""

import collections
import html
from collections.abc import Callable
from typing import NamedTuple

from experiments.report import labels
from experiments.report.labels import Row, Rows
from experiments.report.results_folder import CellResult
from experiments.schema.columns import MEASURED, interval_columns

CATEGORIES = "tau_by_category"


def exactness(row: Row) -> str:
    """Returns whether a row has plain decoding's tokens; "–" where only distributions agree."""
    if row["exact_match"] is None:
        return "–"
    if not labels.is_exact(row):
        return f"NO: {row['exact_match']:.1%}"
    return f"yes, {row['ties']} tie{'s' * (row['ties'] > 1)}" if row["ties"] else "yes"


class Heading(NamedTuple):
    """A column of the ranking: its heading, its column of the summary, and its text."""

    heading: str
    column: str
    text: Callable[[Row], str]


def _number(heading: str, column: str, pattern: str) -> Heading:
    return Heading(heading, column, lambda row: pattern.format(row[column]))


HEADINGS = (
    Heading("method", "method", lambda row: row["method"]),
    Heading("τ", "tau", lambda row: labels.with_interval(row, "tau")),
    Heading("exact", "exact_match", exactness),
    Heading("speedup", "speedup", lambda row: labels.with_interval(row, "speedup")),
    _number("tokens/s", "decode_tok_s", "{:,.1f}"),
    _number("plain tokens/s", "ar_decode_tok_s", "{:,.1f}"),
)
MORE = (
    _number("goodput", "goodput", "{:.2f}"),
    _number("plain goodput", "ar_goodput", "{:.2f}"),
    _number("acceptance rate", "acceptance_rate", "{:.3f}"),
    _number("ms/token", "tpot_ms_p50", "{:.1f}"),
    _number("ms/token p95", "tpot_ms_p95", "{:.1f}"),
    *(_number(f"TTFT p{p} (s)", f"ttft_s_p{p}", "{:.2f}") for p in (50, 95)),
    *(_number(f"E2E p{p} (s)", f"e2e_s_p{p}", "{:.2f}") for p in (50, 95)),
    Heading("rounds", "rounds_by_arm", lambda row: row["rounds_by_arm"]),
    _number("score", "score", "{:.2f}"),
    Heading("τ by category", CATEGORIES, lambda row: row[CATEGORIES]),
)


def tau_by_category(cell: CellResult) -> str | None:
    """Returns τ of each category of a cell's prompts as text; None if there is only one."""
    if not cell.metrics or cell.row["draft"] == "none":
        return None
    emitted: dict[str, float] = collections.defaultdict(float)
    rounds: dict[str, int] = collections.defaultdict(int)
    for request in cell.requests():
        emitted[request["category"]] += request["tau"] * request["rounds"]
        rounds[request["category"]] += request["rounds"]
    if len(rounds) < 2:
        return None
    return ", ".join(f"{name} {emitted[name] / rounds[name]:.2f}" for name in rounds)


def ranked(rows: Rows) -> list[list[Row]]:
    """Returns the rows of each group, the highest speedup first (without times, the highest τ).

    Rows without a result are last.
    """

    def order(row: Row) -> tuple:
        value = row["tau"] if row["speedup"] is None else row["speedup"]
        return row["status"] != "ok", -(value or 0.0)

    return [sorted(group, key=order) for group in labels.grouped(rows)]


def to_html(rows: Rows) -> str:
    """Returns the table of all cells, which a click on a heading sorts.

    The first exact method of a group is bold, unless the interval of its speedup contains 1.
    """
    settings = [_setting(name) for name in labels.group_columns(rows)]
    every = (*HEADINGS, *settings, *MORE)
    shown = [h for h in every if any(row.get(h.column) is not None for row in rows)]
    head = "".join(_head(heading) for heading in shown)
    body = "".join(
        _line(row, shown, row is _best(group)) for group in ranked(rows) for row in group
    )
    return f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _best(group: Rows) -> Row | None:
    """Returns the first exact row of a group, None if it is not clearly faster than plain."""
    best = next((row for row in group if row["status"] == "ok" and labels.is_exact(row)), None)
    if best is None:
        return None
    column = "tau" if best["speedup"] is None else "speedup"
    low, _ = interval_columns(column)
    return best if (best[low] or best[column]) > 1 else None


def _head(heading: Heading) -> str:
    meaning = html.escape(MEASURED.get(heading.column, ""))
    return f'<th title="{meaning}">{html.escape(heading.heading)}</th>'


def _line(row: Row, shown: list[Heading], best: bool) -> str:
    cells = "".join(_cell(row, heading) for heading in shown)
    return f'<tr class="best">{cells}</tr>' if best else f"<tr>{cells}</tr>"


def _setting(name: str) -> Heading:
    return Heading(labels.heading(name), name, lambda row: labels.value_text(name, row[name]))


def _cell(row: Row, heading: Heading) -> str:
    """Returns the HTML of a cell, with the value to sort by."""
    value = row.get(heading.column)
    text, title = "–" if value is None else heading.text(row), ""
    if row["status"] != "ok" and heading.column == "tau":
        text = labels.failure(row)
    if heading.column == ("tau" if row["speedup"] is None else "speedup"):
        title = f' title="{html.escape(row["evidence"] or row["error"])}"'
    sort = html.escape("" if value is None else str(value))
    return f'<td data-sort="{sort}"{title}>{html.escape(text)}</td>'
