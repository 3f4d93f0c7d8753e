"""The results as tables and notes in the terminal."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.report.labels import (
    describe,
    failure,
    group_columns,
    shape,
    size_name,
    with_interval,
)

LEGEND = (
    "speedup: over plain tok/s, that of plain decoding in the cell's own process, with interleaved "
    "runs (a plain row has the medians of these runs over the methods), with a 95 % interval;",
    "τ: tokens emitted per target pass and row; accepted: accepted tokens / (depth × rounds); "
    "exact: rows equal to plain decoding, ties included; ties: rows that differ at a tie;",
    "agree: how often draft and target predict the same token on the second half of the prompts "
    "(agreement_tokens tokens at most; –: unknown for this draft); repeated: 8-grams that occurred "
    "before in the text",
)
FORMATS = {
    "tok/s": ("decode_tok_s", "{:.0f}"),
    "plain tok/s": ("ar_decode_tok_s", "{:.0f}"),
    "speedup": ("speedup", "{}×"),
    "τ": ("tau", "{:.2f}"),
    "accepted": ("acceptance_rate", "{:.3f}"),
    "exact": ("exact_match", "{:.3f}"),
    "ties": ("ties", "{}"),
    "agree": ("agreement", "{:.3f}"),
    "repeated": ("repeated_8grams", "{:.3f}"),
    "score": ("score", "{:.3f}"),
    "TTFT p95": ("ttft_s_p95", "{:.2f} s"),
    "TPOT p95": ("tpot_ms_p95", "{:.1f} ms"),
    "goodput": ("goodput", "{:.2f}/s"),
}
WIDE = 110  # characters of a terminal with all columns
DETAILS = ("accepted", "agree", "repeated")
ABOVE_MEASURED = "more than the measured bandwidth: the cache of the CPU holds part of the data"


def table(rows: list[dict[str, Any]], title: str, width: int = WIDE) -> Table:
    """Returns the launcher's table of rows with intervals, one section per group.

    `LEGEND` explains it. A terminal of less than `WIDE` characters has no room for `DETAILS`.
    """
    out = Table(title=title)
    out.add_column("method", overflow="fold")
    groups = group_columns(rows)
    known = {name for row in rows for name, value in row.items() if value is not None}
    formats = {name: pair for name, pair in FORMATS.items() if pair[0] in {*known, "decode_tok_s"}}
    if not any(row["ties"] for row in rows):
        formats.pop("ties", None)
    if width < WIDE:
        formats = {name: pair for name, pair in formats.items() if name not in DETAILS}
    for heading in formats:
        out.add_column(heading, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        cells = [f"[red]{failure(row)}[/]"]
        if row["status"] == "ok":
            shown = row | {"speedup": row["speedup"] and with_interval(row, "speedup")}
            cells = ["–" if row[n] is None else f.format(shown[n]) for n, f in formats.values()]
        if i == 0 or shape(rows[i - 1]) != shape(row):
            out.add_section()
            out.add_row(escape(describe({name: row[name] for name in groups})), style="bold")
        out.add_row(f"  {escape(row['method'])}", *cells)
    return out


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines below the table: bandwidth of plain decoding, failures, ties."""
    lines, errors, reported = [], set(), set()
    for row in rows:
        where = f"{size_name(row)} {row['batch']}, context {row['context']}"
        if row["status"] != "ok":
            if (shape(row), row["error"]) not in errors:  # once for all cells of a group
                lines.append(f"{where}, {row['method']} failed: {row['error']}")
            errors.add((shape(row), row["error"]))
        elif row["bandwidth_share"] is not None and shape(row) not in reported:
            reported.add(shape(row))
            above = row["bandwidth_share"] > 1
            lines.append(
                f"{where}: plain decoding reads {row['ar_gbs']:.1f} GB/s, "
                f"{row['bandwidth_share']:.0%} of the measured {row['read_gbs']:.1f} GB/s"
                + (f" ({ABOVE_MEASURED})" if above else "")
            )
    finished = [row for row in rows if row["status"] == "ok"]
    untraced = [
        f"batch {row['batch']}, context {row['context']}, {row['method']}: no bar in the chart of "
        f"phases: {row['phases_error']}"
        for row in finished
        if row.get("phases_error")
    ]
    ties = sum(row["ties"] for row in finished)
    return [
        *lines,
        *untraced,
        f"{ties} rows diverge from plain decoding at a tie decided by rounding",
    ]
