"""Reads a folder of results, which may have been merged from several machines'."""

import csv
import dataclasses
import json
import pathlib
from typing import Any

import yaml

from experiments.schema import grid, store
from experiments.schema.fields import ConfigError


@dataclasses.dataclass(frozen=True)
class CellResult:
    """What a cell's folder holds.

    Attributes:
      key: the folder's name.
      config: the cell's settings, all resolved.
      env: device, versions and code; empty where the process died.
      row: its line of the summary; of a failed cell with its status and error.
      metrics: acceptance by depth, single runs, phases; empty of a failed cell.
      folder: where the rest lies.
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
      experiment: what was asked for.
      cells: that have ended, in the order of the summary, those that it lacks behind it.
    """

    directory: pathlib.Path
    experiment: dict[str, Any]
    cells: list[CellResult]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of the summary."""
        return [cell.row for cell in self.cells]


def row_of(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns a cell's line of the summary, None if it has not ended.

    Raises:
      ConfigError: a file of it is no JSON.
    """
    if metrics := _json(folder / store.METRICS):
        return dict.fromkeys(store.COLUMNS) | metrics["row"] | {"key": folder.name}
    if failure := _json(folder / store.FAILURE):
        status = "failed" if failure["kind"] == "error" else failure["kind"]
        row = {"status": status, "error": failure["error"], "key": folder.name}
        return dict.fromkeys(store.COLUMNS) | _settings(folder) | failure["row"] | row
    return None


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the columns that a cell's settings say."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return grid.columns(grid.restored(config))


def read(directory: pathlib.Path, keys: list[str] | None = None) -> Results:
    """Returns a folder of results.

    Args:
      directory: with `experiment.yaml` and `cells`.
      keys: of the cells, in their order; None: all that are there, the summary's first.

    Raises:
      ConfigError: there is no such folder, it is of another format or has no cell that has ended,
        or a file is broken.
    """
    path = directory / "experiment.yaml"
    if not path.exists():
        raise ConfigError(f"{directory} is no folder of results: it has no experiment.yaml")
    known = yaml.safe_load(path.read_text())
    found = known.get("format") if isinstance(known, dict) else None
    if found != store.FORMAT:
        raise ConfigError(
            f"{directory} holds results of another version of magicjax (format {found}, and this "
            f"one reads format {store.FORMAT}): read it with that version, or measure again"
        )
    if keys is None:
        there = sorted(path.name for path in (directory / "cells").glob("*") if path.is_dir())
        keys = list(dict.fromkeys([*_listed(directory), *there]))
    cells = [cell for key in keys if (cell := _cell(store.cell_folder(directory, key)))]
    if not cells:
        raise ConfigError(f"{directory} has no cell that has ended: let the launcher run first")
    return Results(directory, known, cells)


def _listed(directory: pathlib.Path) -> list[str]:
    """Returns the keys in the summary, as far as their cells are there."""
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
    config = yaml.safe_load((folder / "config.yaml").read_text())
    metrics = _json(folder / store.METRICS) or {}
    env = _json(folder / "env.json") or {}
    return CellResult(folder.name, config, env, row, metrics, folder)


def _json(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return store.read_json(path)
    except ValueError as error:
        raise ConfigError(
            f"{path} is no JSON ({error}): remove its folder, and run again"
        ) from error
