"""The results as people read them in the terminal."""

import collections
from typing import Any

from rich.table import Table

from experiments.schema.axes import VARIED

LEGEND = (
    "speed-up: against runs of plain decoding in the cell's own process, taken in turns (the plain "
    "row is another process, so rows' tok/s may differ otherwise);",
    "τ: tokens emitted a target pass and row; accepted: of those that a perfect draft would have "
    "had accepted; exact: rows equal to plain decoding;",
    "agree: how often draft and target choose one token on the prompts' text (–: what such a draft "
    "sees is not known beforehand); repeats: 8-grams that stood in the text before",
)


# Columns of the settings that a grid can vary.
OTHERS = [{"repeats": "repeat"}.get(name, name) for name in VARIED[:]]
OTHERS = [name for name in OTHERS if name not in ("batch", "context")]
FAILED = {"memory": "out of memory", "timeout": "too slow", "crash": "died"}


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Returns the table that the launcher prints, a section for each (batch, context); `LEGEND`."""
    out = Table(title=title)
    others = varying(rows)
    for name in ("batch", "context", *others, "method"):
        out.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    headings = ["tok/s", "speed-up", "τ", "accepted", "exact", "agree", "repeats"]
    if tasks := any(row.get("score") is not None for row in rows):
        headings.append("score")
    for name in headings:
        out.add_column(name, justify="right")
    for i, row in enumerate(rows):
        start = [str(row[name]) for name in ("batch", "context", *others, "method")]
        end = i + 1 == len(rows) or shape(rows[i + 1]) != shape(row)
        if row["status"] != "ok":
            out.add_row(*start, f"[red]{FAILED.get(row['status'], 'failed')}[/]", end_section=end)
            continue
        formats = {"decode_tok_s": "{:.0f}", "speedup": "{:.2f}×", "tau": "{:.2f}"}
        formats |= {"acceptance_rate": "{:.3f}", "exact_match": "{:.3f}", "agreement": "{:.3f}"}
        formats |= {"repeated_8grams": "{:.3f}"} | ({"score": "{:.3f}"} if tasks else {})
        cells = ("–" if row[k] is None else f.format(row[k]) for k, f in formats.items())
        out.add_row(*start, *cells, end_section=end)
    return out


def varying(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the columns beside batch and context in which a grid's combinations differ."""
    names = [name for name in OTHERS if len({row.get(name) for row in rows}) > 1]
    # Of plain text and of tasks there are as many candidates as there must be.
    return [name for name in names if name != "candidates" or "prompts" not in names]


def is_exact(row: dict[str, Any]) -> bool:
    """Returns whether a finished row's tokens are plain decoding's, as far as that can be asked."""
    return row["exact_match"] is None or row["exact_match"] == 1.0


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines below the table: bandwidth of plain decoding, ties, failures."""
    lines = []
    told: dict[tuple, set[str]] = collections.defaultdict(set)
    for row in rows:
        at = f"batch {row['batch']}, context {row['context']}"
        if row["status"] != "ok":
            if row["error"] not in told[shape(row)]:  # what all of a group share is told once
                lines.append(f"{at}, {row['method']} failed: {row['error']}")
            told[shape(row)].add(row["error"])
        elif row["draft"] == "none" and row["bandwidth_share"] is not None:
            lines.append(
                f"{at}: plain decoding reads {row['ar_gbs']:.1f} GB/s, "
                f"{row['bandwidth_share']:.0%} of the {row['read_gbs']:.1f} GB/s measured here"
            )
    good = [row for row in rows if row["status"] == "ok"]
    for row in good:
        if row.get("phases") and row["repeat"] and row.get("score_s") is None:
            lines.append(
                f"batch {row['batch']}, context {row['context']}, {row['method']}: its run could "
                "not be traced, so it is not in phases.png (phases_error in its metrics.json)"
            )
    ties = sum(row["ties"] for row in good)
    wrong = sum(not is_exact(row) for row in good)
    lines.append(f"{ties} rows part from plain decoding at a tie decided by rounding")
    if wrong:
        lines.append(f"{wrong} cells are NOT equal to plain decoding")
    return lines


def shape(row: dict[str, Any]) -> tuple:
    """Returns (batch, context, ...): what the cells of a group share."""
    return row["batch"], row["context"], *(row.get(name) for name in OTHERS)
