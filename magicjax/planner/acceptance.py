"""Measured acceptance, as users give it to the planner: a number, one for each rank, or a table.

Nothing here is ever assumed: how often a draft's tokens are accepted depends on models, text,
policy and budget, and only a run can tell.
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

from magicjax.drafters.spec import parts
from magicjax.trees.sequoia import checked_acceptance

HOW = (
    "give a number (0.8, how often a drafted token is accepted if all before it were), one for "
    "each rank of the draft's choices (0.6,0.2,0.1), or a .csv or .json table with the columns "
    "policy, budget, context, acceptance. To measure it, run the drafter on your text: `magicjax "
    "generate` prints it ('where reached'), and `magicjax.generate(...)` returns it as "
    "stats.acceptance_by_rank"
)

Table = Float[np.ndarray, "depths ranks"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Acceptance of one drafter at one context.

    Attributes:
      drafter: as commands write it, self:streaming:512.
      context: tokens; None: it is taken for any.
      acceptance: [depths, ranks], as `magicjax.optimal` takes it.
    """

    drafter: str
    context: int | None
    acceptance: tuple[tuple[float, ...], ...]


def from_text(text: str, drafter: str) -> Measured:
    """Returns the acceptance written as 0.8, or as 0.6,0.2,0.1 by rank, of a drafter.

    Raises:
      ValueError: no numbers, or no probabilities.
    """
    return Measured(drafter, None, _table_of(text.replace(",", " "), f"acceptance {text!r}"))


def read_table(path: str | pathlib.Path, target: str) -> list[Measured]:
    """Returns the rows of a table that are of this target.

    A .csv file has a header, a .json file a list of objects. Columns: `acceptance`, a number or one
    for each rank (in CSV separated by spaces; in JSON also a list for each depth); `context`; and
    either `drafter` (self:streaming:512) or `policy` and `budget`, with `draft` in front where it
    is not the target itself (small:PATH). `model` or `target`, if there is such a column, says of
    which target a row is. Other columns are not read.

    Args:
      path: the file.
      target: as the user names it.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no row for this target, a missing column, two rows for the same place, a drafter
        that does not exist, or an acceptance that is none.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"the table of acceptance {path} does not exist: {HOW}")
    rows = _rows(path)
    of_row = [str(row.get("model", row.get("target", target))).lower() for row in rows]
    each = enumerate(zip(rows, of_row, strict=True), 1)
    numbered = [(i, row) for i, (row, name) in each if name == target.lower()]
    if not numbered:
        raise ValueError(
            f"{path} has no row of {target}, only of {', '.join(sorted({*of_row})) or 'nothing'}: "
            "acceptance of one target says nothing about another, so measure this one"
        )
    found = [_measured(row, f"{path}, row {i}") for i, row in numbered]
    places = [(m.drafter, m.context) for m in found]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"{path} has two rows for {place[0]} at context {place[1]}: keep one")
    return found


def at_context(measured: Iterable[Measured], context: int) -> dict[str, tuple[Table, str]]:
    """Returns for each drafter (its acceptance at a context, where that comes from).

    Between two contexts that were measured it is linear in their logarithm; beyond them the
    nearest one's is taken.
    """
    drafters: dict[str, list[Measured]] = {}
    for row in measured:
        drafters.setdefault(row.drafter, []).append(row)
    return {name: _at(rows, context) for name, rows in drafters.items()}


def _at(rows: Sequence[Measured], context: int) -> tuple[Table, str]:
    if rows[0].context is None:
        return np.array(rows[0].acceptance), "as given"
    rows = sorted(rows, key=lambda row: row.context or 0)
    contexts = [row.context or 0 for row in rows]
    tables = _same_shape([row.acceptance for row in rows])
    if context in contexts:
        return tables[contexts.index(context)], f"measured at {context}"
    right = int(np.searchsorted(contexts, context))
    if right in (0, len(contexts)):
        nearest = min(right, len(contexts) - 1)
        return tables[nearest], f"not measured at {context}: that of {contexts[nearest]}"
    low, high = contexts[right - 1], contexts[right]
    share = math.log(context / low) / math.log(high / low)
    table = (1 - share) * tables[right - 1] + share * tables[right]
    return table, f"between those measured at {low} and {high}"


def _same_shape(tables: Sequence[Sequence[Sequence[float]]]) -> list[Table]:
    """Returns the tables with as many ranks (0 where one has fewer) and depths (the last again)."""
    depths, ranks = max(map(len, tables)), max(len(table[0]) for table in tables)
    filled = []
    for table in map(np.array, tables):
        table = np.pad(table, ((0, 0), (0, ranks - table.shape[1])))
        filled.append(np.pad(table, ((0, depths - len(table)), (0, 0)), mode="edge"))
    return filled


def _rows(path: pathlib.Path) -> list[Mapping[str, Any]]:
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text("utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path} must hold a list of objects, one for each measurement")
        return rows
    if path.suffix != ".csv":
        raise ValueError(f"{path} must be a .csv or .json file, to say how it is to be read")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _measured(row: Mapping[str, Any], where: str) -> Measured:
    wanted = ["context", "acceptance", *([] if "drafter" in row else ["budget"])]
    missing = [name for name in wanted if row.get(name) in (None, "")]
    if missing:
        raise ValueError(f"{where}: {' and '.join(missing)} missing; columns are {', '.join(row)}")
    drafter = str(row["drafter"]) if "drafter" in row else _drafter(row)
    try:
        parts(drafter)
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


def _table_of(given: Any, where: str) -> tuple[tuple[float, ...], ...]:
    try:
        if isinstance(given, str):
            given = [float(word) for word in given.split()]
        table = checked_acceptance(np.atleast_1d(np.asarray(given, np.float64)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {HOW}") from error
    return tuple(tuple(map(float, row)) for row in table)
