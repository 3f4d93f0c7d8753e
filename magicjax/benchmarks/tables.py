"""Markdown tables, aligned so that they also read well in a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table; floats have 4 significant digits, None is a dash."""
    lines = [[*header], *([_text(cell) for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def record_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table with a column for each key, in the order of their appearance."""
    header = list(dict.fromkeys(key for record in records for key in record))
    return markdown_table(header, ([record.get(key) for key in header] for record in records))


def _text(cell: Any) -> str:
    if cell is None:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
