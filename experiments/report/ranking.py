"""The methods of each group in order of their speedup, in HTML and in LaTeX."""

import html
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.report import labels
from experiments.report.labels import Row, Rows


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
    _number("acceptance rate", "acceptance_rate", "{:.3f}"),
    _number("ms/token", "tpot_ms_p50", "{:.1f}"),
    _number("ms/token p95", "tpot_ms_p95", "{:.1f}"),
    *(_number(f"TTFT p{p} (s)", f"ttft_s_p{p}", "{:.2f}") for p in (50, 95)),
    *(_number(f"E2E p{p} (s)", f"e2e_s_p{p}", "{:.2f}") for p in (50, 95)),
    Heading("rounds", "rounds_by_arm", lambda row: row["rounds_by_arm"]),
    _number("score", "score", "{:.2f}"),
)


def ranked(rows: Rows) -> list[list[Row]]:
    """Returns the rows of each group, the highest speedup first (without times, the highest τ).

    Rows without a result are last.
    """

    def order(row: Row) -> tuple:
        value = row["tau"] if row["speedup"] is None else row["speedup"]
        return row["status"] != "ok", -(value or 0.0)

    return [sorted(group, key=order) for group in labels.grouped(rows)]


def to_html(rows: Rows) -> str:
    """Returns the table of all cells, which a click on a heading sorts."""
    settings = [_setting(name) for name in labels.group_columns(rows)]
    every = (*HEADINGS, *settings, *MORE)
    shown = [h for h in every if any(row.get(h.column) is not None for row in rows)]
    head = "".join(f"<th>{html.escape(h.heading)}</th>" for h in shown)
    body = "".join(
        f"<tr>{''.join(_cell(row, heading) for heading in shown)}</tr>"
        for group in ranked(rows)
        for row in group
    )
    return f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


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


LATEX_NOTES = (
    "% Needs booktabs; in a paper of two columns, use table*.",
    "% Speedups are over plain decoding of the same prompts in the process of each method, whose",
    "% tokens/s are the last column. Brackets: 95 % bootstrap intervals over runs and prompts.",
)


def to_latex(rows: Rows) -> str:
    """Returns the ranking as a LaTeX table with the rules of the package booktabs.

    A line per finished cell, a part per group. The first exact method of a group is bold, unless
    the interval of its speedup contains 1. It needs no other package, and the width of a page.
    """
    finished = [row for row in rows if row["status"] == "ok"]
    columns = labels.group_columns(rows)
    lines = [*LATEX_NOTES, "\\begin{tabular}{lrrrrr}", "\\toprule"]
    lines.append(_line([heading.heading for heading in HEADINGS]))
    for group in ranked(finished):
        best = next((row for row in group if labels.is_exact(row)), None)
        if best is not None and best["low"] is not None and best["low"] <= 1:
            best = None
        title = escaped(labels.describe({name: group[0].get(name) for name in columns}))
        lines += ["\\midrule", f"\\multicolumn{{6}}{{l}}{{\\emph{{{title}}}}} \\\\"]
        for row in group:
            texts = ["–" if row[h.column] is None else h.text(row) for h in HEADINGS]
            lines.append(_line(texts, bold=row is best))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _line(texts: Sequence[str], bold: bool = False) -> str:
    cells = [escaped(text) for text in texts]
    if bold:
        cells[0] = f"\\textbf{{{cells[0]}}}"
    return " & ".join(cells) + " \\\\"


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "τ": "$\\tau$",
    "–": "--",
}


def escaped(text: str) -> str:
    """Returns a text with LaTeX's special characters escaped."""
    return text.translate(str.maketrans(_LATEX))
