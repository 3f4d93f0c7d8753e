"""Names and values in tables, charts and messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.schema.columns import columns_of, interval_columns
from experiments.schema.config import Experiment

# The columns of axes, apart from batch or slots, and context.
SIZES = ("batch", "slots", "context")
OTHERS = [name for name in columns_of(Experiment).values() if name not in SIZES]
SAMPLED = ("top_k", "top_p", "seed")  # beside the temperature
# How much is measured, not what: named only if nothing else tells two groups apart.
EFFORT = ("requests", "repeat", "candidates", "agreement_tokens", "phases", "new_tokens")

Row = dict[str, Any]
Rows = Sequence[Row]


def size_name(row: Row) -> str:
    """Returns what the column `batch` of a row counts: "batch", or "slots" of an engine."""
    return "slots" if row.get("slots") else "batch"


def varying(rows: Rows) -> list[str]:
    """Returns the columns in which a grid's combinations differ, apart from batch and context."""
    values = {name: {row.get(name) for row in rows} for name in OTHERS}
    for name in SAMPLED:
        values[name] -= {None}  # in greedy cells
    names = [name for name, distinct in values.items() if len(distinct) > 1]
    # By default, the kind of prompts determines the number of candidates.
    pairs = {(row.get("prompts"), row.get("candidates")) for row in rows}
    determined = len(pairs) == len({prompts for prompts, _ in pairs})
    return [name for name in names if name != "candidates" or not determined]


def shape(row: Row) -> tuple:
    """Returns (batch, context, ...), equal for the cells of a group."""
    return row["batch"], row["context"], *(row.get(name) for name in OTHERS)


def grouped(rows: Rows) -> list[list[Row]]:
    """Returns the rows of each group, by batch and context."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(shape(row), []).append(row)
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]


def value_text(name: str, value: Any) -> str:
    """Returns a setting's value as text, "–" if it is not set; greedy for no temperature."""
    if name == "temperature" and not value:
        return "greedy"
    if value in (None, "", ()):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "rate":  # text in a summary, where infinity is no number
        return f"{float(value):g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


FAILED = {"memory": "out of memory", "timeout": "too slow", "crash": "crashed"}


def failure(row: Row) -> str:
    """Returns why a row has no result, in short."""
    return FAILED.get(row["status"], "failed")


def is_exact(row: Row) -> bool:
    """Returns whether a finished row has plain decoding's tokens, or cannot be compared."""
    return row["exact_match"] in (None, 1.0)


def with_interval(row: Row, column: str) -> str:
    """Returns a row's value with its interval: "1.84 [1.79, 1.90]"."""
    value = f"{row[column]:.2f}"
    low, high = (row[name] for name in interval_columns(column))
    if low is None or row["draft"] == "none":
        return value
    return f"{value} [{low:.2f}, {high:.2f}]"


def heading(name: str) -> str:
    """Returns the heading of a column of settings."""
    return "sampling" if name == "temperature" else name.replace("_", " ")


def describe(settings: Mapping[str, Any]) -> str:
    """Returns settings as text, without those that are not set.

    {"dtype": "float32", "temperature": 0, "top_p": None, "prompts": "chat"} gives
    "float32, greedy, chat".
    """
    texts = {name: value_text(name, value) for name, value in settings.items()}
    unnamed = ("dtype", "prompts", "target", "arrivals")
    return ", ".join(
        text if name in unnamed or text == "greedy" else f"{name.replace('_', ' ')} {text}"
        for name, text in texts.items()
        if text != "–"
    )


def group_columns(rows: Rows) -> list[str]:
    """Returns the columns that tell the groups apart: batch or slots, context, what else varies."""
    names = [*dict.fromkeys(map(size_name, rows)), "context", *varying(rows)]
    groups = len({shape(row) for row in rows})
    for name in (*EFFORT, "prompt_path", "dtype"):  # if they vary with others, these suffice
        short = [other for other in names if other != name]
        if len({tuple(row.get(other) for other in short) for row in rows}) == groups:
            names = short
    return names
