"""Measured acceptance, the input of the planner: a rate, rates by rank, or a table.

Acceptance has no default: it depends on models, text, policy and budget, and must be measured.
"""

import csv
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from magicjax.drafters.spec import parse_one
from magicjax.trees.sequoia import validated_acceptance

HOW = (
    "pass a rate (0.8, the share of drafted tokens accepted if all before them were), rates by the "
    "rank of the draft's choices (0.6,0.2,0.1), or a .csv or .json table with the columns policy, "
    "budget, context, acceptance. To measure acceptance, run the drafter on your text: `magicjax "
    "generate` prints it ('if reached'), and `magicjax.generate(...)` returns it as "
    "stats.acceptance_by_rank"
)

Table = Float[np.ndarray, "depths ranks"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Acceptance of one drafter at one context.

    Attributes:
      drafter: its spec, such as self:streaming:512.
      context: tokens; None for any context.
      acceptance: [depths, ranks], as `magicjax.optimal` takes it.
    """

    drafter: str
    context: int | None
    acceptance: tuple[tuple[float, ...], ...]


def from_text(text: str, drafter: str) -> Measured:
    """Returns the acceptance of a drafter from "0.8", or from "0.6,0.2,0.1" by rank.

    Raises:
      ValueError: values that are not probabilities.
    """
    return Measured(drafter, None, _table_of(text.replace(",", " "), f"acceptance {text!r}"))


def read_table(path: str | pathlib.Path, target: str) -> list[Measured]:
    """Returns the rows of a table for this target.

    A .csv file has a header, a .json file a list of objects. Columns: `acceptance`, a rate or rates
    by rank (in CSV separated by spaces; in JSON also a list per depth); `context`; and either
    `drafter` (self:streaming:512) or `policy` and `budget`, with `draft` if the draft model is not
    the target (small:PATH). A column `model` or `target` names the target of a row. Other columns
    are ignored.

    Args:
      path: the file.
      target: as named by the user.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no row for this target, a missing column, duplicate rows, or an invalid drafter
        or acceptance.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"the table of acceptance {path} does not exist: {HOW}")
    numbered = [
        (i, row, str(row.get("model", row.get("target", target))).lower())
        for i, row in enumerate(_rows(path), 1)
    ]
    measured = [
        _measured(row, f"{path}, row {i}") for i, row, name in numbered if name == target.lower()
    ]
    if not measured:
        targets = ", ".join(sorted({name for *_, name in numbered})) or "nothing"
        raise ValueError(
            f"{path} has no row for {target} (it has {targets}): measure acceptance with this "
            "target"
        )
    points = [(row.drafter, row.context) for row in measured]
    for drafter, context in points:
        if points.count((drafter, context)) > 1:
            raise ValueError(f"{path} has two rows for {drafter} at context {context}: keep one")
    return measured


def at_context(measured: Iterable[Measured], context: int) -> dict[str, tuple[Table, str]]:
    """Returns (acceptance at a context, its source) by drafter.

    Acceptance is interpolated linearly in the logarithm of the context; outside the measured
    contexts it is that of the nearest one.
    """
    drafters: dict[str, list[Measured]] = {}
    for row in measured:
        drafters.setdefault(row.drafter, []).append(row)
    return {name: _at(rows, context) for name, rows in drafters.items()}


def _at(rows: Sequence[Measured], context: int) -> tuple[Table, str]:
    if rows[0].context is None:
        return np.array(
            rows[0].acceptance
        ), "assumed with --acceptance, never measured on this device"
    rows = sorted(rows, key=lambda row: row.context or 0)
    contexts = [row.context or 0 for row in rows]
    tables = _same_shape([row.acceptance for row in rows])
    if context in contexts:
        return tables[contexts.index(context)], f"measured at {context}"
    index = int(np.searchsorted(contexts, context))
    if index in (0, len(contexts)):
        nearest = min(index, len(contexts) - 1)
        return tables[nearest], f"measured at {contexts[nearest]}, the nearest context"
    low, high = contexts[index - 1], contexts[index]
    fraction = math.log(context / low) / math.log(high / low)
    table = (1 - fraction) * tables[index - 1] + fraction * tables[index]
    return table, f"interpolated between {low} and {high}"


def _same_shape(tables: Sequence[Sequence[Sequence[float]]]) -> list[Table]:
    """Returns the tables padded to the same shape: ranks with 0, depths with the last row."""
    depths, ranks = max(map(len, tables)), max(len(table[0]) for table in tables)
    padded = []
    for table in map(np.array, tables):
        table = np.pad(table, ((0, 0), (0, ranks - table.shape[1])))
        padded.append(np.pad(table, ((0, depths - len(table)), (0, 0)), mode="edge"))
    return padded


def _rows(path: pathlib.Path) -> list[Mapping[str, Any]]:
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text("utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path} must contain a list of objects, one per measurement")
        return rows
    if path.suffix != ".csv":
        raise ValueError(f"{path} must be a .csv or .json file")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _measured(row: Mapping[str, Any], where: str) -> Measured:
    required = ["context", "acceptance", *([] if "drafter" in row else ["budget"])]
    missing = [name for name in required if row.get(name) in (None, "")]
    if missing:
        raise ValueError(f"{where}: {' and '.join(missing)} missing; found {', '.join(row)}")
    drafter = str(row["drafter"]) if "drafter" in row else _drafter(row)
    try:
        parse_one(drafter)
        context = int(row["context"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if context < 1:
        raise ValueError(f"{where}: context={context} must be at least 1")
    return Measured(drafter, context, _table_of(row["acceptance"], where))


def _drafter(row: Mapping[str, Any]) -> str:
    draft = str(row.get("draft") or "self").replace("+", ":")
    policy = [str(row["policy"])] if row.get("policy") else []
    return ":".join([draft, *policy, str(row["budget"])])


def _table_of(rates: Any, where: str) -> tuple[tuple[float, ...], ...]:
    try:
        if isinstance(rates, str):
            rates = [float(word) for word in rates.split()]
        table = validated_acceptance(np.atleast_1d(np.asarray(rates, np.float64)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {HOW}") from error
    return tuple(tuple(map(float, row)) for row in table)
