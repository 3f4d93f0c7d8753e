"""Reads a folder of results, which may hold cells of several machines."""

import csv
import dataclasses
import json
import pathlib
from typing import Any

import yaml

from experiments.schema import grid, store
from experiments.schema.columns import COLUMNS
from experiments.schema.fields import ConfigError


@dataclasses.dataclass(frozen=True)
class CellResult:
    """The content of a cell's folder.

    Attributes:
      key: the folder's name.
      config: the cell's resolved settings.
      env: device, versions and code; empty if the process died.
      row: its line of the summary; for a failed cell with status and error.
      metrics: acceptance by depth, single runs, phases; empty for a failed cell.
      folder: the folder.
    """

    key: str
    config: dict[str, Any]
    env: dict[str, Any]
    row: dict[str, Any]
    metrics: dict[str, Any]
    folder: pathlib.Path

    def tokens(self) -> list[list[int]]:
        """Returns the new tokens of each request."""
        lines = (self.folder / "requests.jsonl").read_text().splitlines()
        return [json.loads(line)["tokens"] for line in lines]


@dataclasses.dataclass(frozen=True)
class Results:
    """A folder of results.

    Attributes:
      directory: the folder.
      experiment: the content of `experiment.yaml`.
      cells: cells with a result or a failure, first those of the summary in its order.
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
    if metrics := _json(folder / store.METRICS):
        return dict.fromkeys(COLUMNS) | metrics["row"] | {"key": folder.name}
    if failure := _json(folder / store.FAILURE):
        status = "failed" if failure["kind"] == "error" else failure["kind"]
        row = {"status": status, "error": failure["error"], "key": folder.name}
        settings = grid.columns(grid.restored(_config(folder)))
        return dict.fromkeys(COLUMNS) | settings | failure["row"] | row
    return None


def read(directory: pathlib.Path, keys: list[str] | None = None) -> Results:
    """Returns a folder of results.

    Args:
      directory: a folder with `experiment.yaml` and `cells`.
      keys: keys of the cells, in order; None: all cells, first those of the summary.

    Raises:
      ConfigError: the folder does not exist, has another format, has no finished cell, or has a
        broken file.
    """
    path = directory / "experiment.yaml"
    if not path.exists():
        raise ConfigError(f"{directory} is not a folder of results: it has no experiment.yaml")
    experiment = store.read_experiment(path, "read it with that version, or measure again")
    if keys is None:
        existing = sorted(path.name for path in (directory / "cells").glob("*") if path.is_dir())
        keys = list(dict.fromkeys([*_summary_keys(directory), *existing]))
    cells = [cell for key in keys if (cell := _cell(store.cell_folder(directory, key)))]
    if not cells:
        raise ConfigError(f"{directory} has no finished cell: run the launcher first")
    return Results(directory, experiment, cells)


def _summary_keys(directory: pathlib.Path) -> list[str]:
    """Returns the keys of the summary's cells, if their folders exist."""
    path = directory / "summary.csv"
    if not path.exists():
        return []
    with path.open() as file:
        keys = [row["key"] for row in csv.DictReader(file)]
    return [key for key in keys if store.cell_folder(directory, key).is_dir()]


def _cell(folder: pathlib.Path) -> CellResult | None:
    row = row_of(folder)
    if row is None:
        return None
    metrics = _json(folder / store.METRICS) or {}
    env = _json(folder / "env.json") or {}
    return CellResult(folder.name, _config(folder), env, row, metrics, folder)


def _config(folder: pathlib.Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())


def _json(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return store.read_json(path)
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid JSON ({error}): remove its folder, and run again"
        ) from error
