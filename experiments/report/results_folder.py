"""Reads a folder of results, which may hold cells of several machines."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from experiments.report import labels
from experiments.schema import grid, store
from experiments.schema.columns import COLUMNS
from experiments.schema.fields import ConfigError


@dataclasses.dataclass(frozen=True)
class CellResult:
    """The content of a cell's folder, or a row of plain decoding beside the cells of a group.

    Attributes:
      folder: the folder, whose name is the cell's key; None: of plain decoding.
      row: its line of the summary; for a failed cell with status and error.
      env: device, versions and code; empty if the process died, and of plain decoding.
      metrics: acceptance by depth, single runs, phases; empty for a failed cell, and of plain
        decoding.
    """

    folder: pathlib.Path | None
    row: dict[str, Any]
    env: dict[str, Any]
    metrics: dict[str, Any]

    def requests(self) -> list[dict[str, Any]]:
        """Returns the line of each request."""
        assert self.folder is not None
        lines = (self.folder / "requests.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def seconds(self) -> tuple[Float[np.ndarray, "R B"], Float[np.ndarray, "R B"]]:
        """Returns the seconds of decoding of each timed run and batch of prompts.

        Of the method, and of plain decoding interleaved with it.
        """
        mine, plain = (
            np.array(
                [run.get("decode_s_by_batch", [run["decode_s"]]) for run in self.metrics[name]]
            )
            for name in ("runs", "plain_runs")
        )
        return mine, plain


@dataclasses.dataclass(frozen=True)
class Results:
    """A folder of results.

    Attributes:
      directory: the folder.
      experiment: the content of `experiment.yaml`.
      cells: cells with a result or a failure, first those of the summary in its order; the first of
        a group is a row of plain decoding, with the medians of its runs beside the methods.
    """

    directory: pathlib.Path
    experiment: dict[str, Any]
    cells: list[CellResult]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of the summary."""
        return [cell.row for cell in self.cells]


def row_of(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns a cell's line of the summary, None without a result or a failure.

    Raises:
      ConfigError: a file is not valid JSON.
    """
    if metrics := store.read_json(folder / store.METRICS):
        return dict.fromkeys(COLUMNS) | metrics["row"] | {"key": folder.name}
    if failure := store.read_json(folder / store.FAILURE):
        status = "failed" if failure["kind"] == "error" else failure["kind"]
        row = {"status": status, "error": failure["error"], "key": folder.name}
        settings = grid.columns(grid.restored(store.read_cell(folder)))
        return dict.fromkeys(COLUMNS) | settings | failure["row"] | row
    return None


def read(directory: pathlib.Path, keys: list[str] | None = None) -> Results:
    """Returns the cells of a folder with these keys, by default all, first those of the summary.

    Raises:
      ConfigError: the folder does not exist, has another format, has no finished cell, or has a
        broken file.
    """
    if not (directory / "experiment.yaml").exists():
        raise ConfigError(f"{directory} is not a folder of results: it has no experiment.yaml")
    experiment = store.read_experiment(directory, "read it with that version, or measure again")
    folders = {path.name: path for path in sorted((directory / "cells").glob("*/"))}
    if keys is None:
        summary = directory / "summary.csv"
        first = pd.read_csv(summary, dtype=str)["key"] if summary.exists() else []
        keys = [key for key in dict.fromkeys([*first, *folders]) if key in folders]
    cells = []
    for folder in (folders[key] for key in keys):
        if row := row_of(folder):
            parts = (store.read_json(folder / name) or {} for name in ("env.json", store.METRICS))
            cells.append(CellResult(folder, row, *parts))
    if not cells:
        raise ConfigError(f"{directory} has no finished cell: run the launcher first")
    return Results(directory, experiment, _with_plain(cells))


def _with_plain(cells: Sequence[CellResult]) -> list[CellResult]:
    """Returns the cells by group, plain decoding first."""
    groups: dict[tuple, list[CellResult]] = {}
    for cell in cells:
        groups.setdefault(labels.shape(cell.row), []).append(cell)
    results: list[CellResult] = []
    for group in groups.values():
        measured = [cell.metrics for cell in group if cell.metrics and cell.row["draft"] != "none"]
        if measured:
            row = _medians([metrics["plain_row"] for metrics in measured])
            results.append(CellResult(None, row, {}, {}))
        results += group
    return results


def _medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the first row with the medians of all rows in its floats."""
    return {
        name: statistics.median(row[name] for row in rows) if isinstance(value, float) else value
        for name, value in rows[0].items()
    }
