"""The results as people read them in the terminal."""

import collections
from typing import Any

from rich.table import Table

from experiments.measure import PLAIN_FAILED

LEGEND = (
    "speed-up: against plain decoding; τ: tokens emitted a target pass and row; accepted: of those "
    "that a perfect draft would have had accepted;",
    "exact: rows equal to plain decoding; agree: how often draft and target choose the same token "
    "on the prompts' text; repeats: 8-grams that stood in the text before",
)


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Returns the table that the launcher prints, a section for each (batch, context); `LEGEND`."""
    out = Table(title=title)
    for name in ("batch", "context", "method"):
        out.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    headings = ("tok/s", "speed-up", "τ", "accepted", "exact", "agree", "repeats")
    for name in headings:
        out.add_column(name, justify="right")
    for i, row in enumerate(rows):
        start = [str(row["batch"]), str(row["context"]), row["method"]]
        end = i + 1 == len(rows) or shape(rows[i + 1]) != shape(row)
        if row["status"] != "ok":
            out.add_row(*start, "[red]failed[/]", end_section=end)
            continue
        formats = {"decode_tok_s": "{:.0f}", "speedup": "{:.2f}×", "tau": "{:.2f}"}
        formats |= {"acceptance_rate": "{:.3f}", "exact_match": "{:.3f}", "agreement": "{:.3f}"}
        formats |= {"repeated_8grams": "{:.3f}"}
        cells = ("–" if row[k] is None else f.format(row[k]) for k, f in formats.items())
        out.add_row(*start, *cells, end_section=end)
    return out


def is_exact(row: dict[str, Any]) -> bool:
    """Returns whether a finished row's tokens are plain decoding's, as far as that can be asked."""
    return row["exact_match"] is None or row["exact_match"] == 1.0


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines below the table: bandwidth of plain decoding, ties, failures."""
    lines = []
    told: dict[Any, set[str]] = collections.defaultdict(set)
    for row in rows:
        at = f"batch {row['batch']}, context {row['context']}"
        if row["status"] != "ok":
            if not is_told(row, told[shape(row)]):
                lines.append(f"{at}, {row['method']} failed: {row['error']}")
        elif row["draft"] == "none" and row["ar_gbs"] is not None:
            lines.append(
                f"{at}: plain decoding reads {row['ar_gbs']:.1f} GB/s, "
                f"{row['bandwidth_share']:.0%} of the {row['read_gbs']:.1f} GB/s measured here"
            )
    good = [row for row in rows if row["status"] == "ok"]
    ties = sum(row["ties"] for row in good)
    wrong = sum(not is_exact(row) for row in good)
    lines.append(f"{ties} rows part from plain decoding at a tie decided by rounding")
    if wrong:
        lines.append(f"{wrong} cells are NOT equal to plain decoding")
    return lines


def is_told(row: dict[str, Any], told: set[str]) -> bool:
    """Returns whether a failure is plain decoding's, which `told` holds; adds it otherwise."""
    cause = row["error"].removeprefix(PLAIN_FAILED)
    if row["error"] != cause and cause in told:
        return True
    told.add(cause)
    return False


def shape(row: dict[str, Any]) -> tuple[int, int]:
    """Returns (batch, context)."""
    return row["batch"], row["context"]
