"""Writes tables of stored results into Markdown documents.

`python -m experiments.report.markdown README.md docs/*.md` replaces the lines between

    <!-- table: experiments/results/demo.csv | columns: batch, tau as τ | where: batch == 4 -->
    <!-- end of table -->

by a table of the file, a CSV or a JSON object with `rows`. `columns`, `where` and `across` are
optional; `where` is an expression of `pandas.DataFrame.query`. With `columns: method, kind, tok_s`
and `across: kind`, the last column becomes one for each value of `kind`. Paths are relative to the
working directory.
"""

import argparse
import io
import json
import pathlib
import re

import pandas as pd

BLOCK = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def updated(text: str, folder: pathlib.Path = pathlib.Path()) -> str:
    """Returns the document with the current contents of its tables.

    Raises:
      ValueError: a table names an unknown column, has no rows, or several for a cell of `across`.
      OSError: its file cannot be read.
    """
    return BLOCK.sub(lambda match: match[1] + _table(match[2], folder) + match[3], text)


def _table(request: str, folder: pathlib.Path) -> str:
    path, *parts = re.split(r"\s*\|\s*(columns|where|across):\s*", request)
    options = dict(zip(parts[::2], parts[1::2], strict=True))
    text = (folder / path).read_text()
    rows = (
        pd.DataFrame(json.loads(text)["rows"])
        if path.endswith(".json")
        else pd.read_csv(io.StringIO(text))
    )
    if "where" in options:
        rows = rows.query(options["where"])
        if rows.empty:
            raise ValueError(f"table {path}: no row has {options['where']}: correct `where`")
    columns = [column.partition(" as ") for column in options.get("columns", "").split(", ")]
    if "columns" in options:
        if missing := [name for name, _, _ in columns if name not in rows]:
            raise ValueError(f"table {path}: unknown columns {missing}; it has {list(rows)}")
        rows = rows[[name for name, _, _ in columns]]
        rows = rows.set_axis([heading or name for name, _, heading in columns], axis=1)
    if "across" in options:
        rows = _across(rows, options["across"])
    cells = zip(*(_texts(rows.iloc[:, i]) for i in range(rows.shape[1])), strict=True)
    lines = [list(rows), ["---"] * rows.shape[1], *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _across(rows: pd.DataFrame, across: str) -> pd.DataFrame:
    """Returns the rows with one column for each value of `across` instead of the last column.

    A missing value is left out of headings.
    """
    *index, heading = [name for name in rows if name != across]
    wide = rows.set_index([*index, across])[heading].unstack(across)
    values = rows[across].drop_duplicates()
    wide = wide.reindex(rows.set_index(index).index.unique(), columns=values)
    headings = [f"{heading}, {value}" if value else heading for value in _texts(values)]
    return wide.set_axis(headings, axis=1).reset_index()


def _texts(column: pd.Series) -> list[str]:
    """Returns the cells of a column; its numbers have the same number of decimals.

    Integers have none, others none if the largest is at least 100, one from 10 on, else two.
    """
    if not pd.api.types.is_numeric_dtype(column):
        return column.fillna("").astype(str).tolist()
    largest = column.abs().max()
    decimals = 0 if (column.dropna() % 1 == 0).all() else int(largest < 100) + int(largest < 10)
    return ["" if pd.isna(x) else f"{x:,.{decimals}f}" for x in column]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("documents", nargs="+", type=pathlib.Path)
    for document in parser.parse_args().documents:
        document.write_text(updated(document.read_text(), pathlib.Path()))


if __name__ == "__main__":
    main()
