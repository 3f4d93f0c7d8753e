"""Results on disk; every file is complete or absent.

    results/NAME/experiment.yaml        the experiment, and the format of the folder
                 summary.csv            one line per cell, and of plain decoding for each group
                 cells/KEY/config.yaml  the resolved settings of the cell; KEY is their hash
                           env.json     device, versions, code: what else the result depends on
                           requests.jsonl   one line per row: tokens, acceptance, answer
                           metrics.json     the line of the summary, that of plain decoding,
                                            single runs; written last
                           failure.json     instead of these two: why there is no result
                           worker.log       output of the cell's process

A cell is finished if its `metrics.json` exists. To merge folders of several machines, copy their
`cells` into one folder: a cell has the same key everywhere.
"""

import csv
import hashlib
import io
import json
import math
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import yaml

from experiments.schema.fields import ConfigError
from magicjax.files import write_atomically

FORMAT = 9  # of a folder of results
METRICS, FAILURE = "metrics.json", "failure.json"


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file; NaN and infinity become null."""
    write_atomically(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def cell_folder(directory: pathlib.Path, key: str) -> pathlib.Path:
    """Returns a cell's folder."""
    return directory / "cells" / key


def write_cell(folder: pathlib.Path, settings: dict[str, Any]) -> None:
    """Creates a cell's folder with its settings."""
    write_atomically(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def read_cell(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the settings in a cell's folder."""
    return yaml.safe_load((folder / "config.yaml").read_text())


def clear(folder: pathlib.Path) -> None:
    """Removes the files of an earlier measurement of a cell, its result first."""
    for name in (METRICS, FAILURE):
        (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in ("config.yaml", "lock", "worker.log"):
            path.unlink()


def write_result(
    folder: pathlib.Path, env: dict[str, Any], metrics: dict[str, Any], requests: Sequence[dict]
) -> None:
    """Writes the result of a cell; the metrics last, because they mark it as finished."""
    write_json(folder / "env.json", env)
    lines = [json.dumps(finite(request), allow_nan=False) + "\n" for request in requests]
    write_atomically(folder / "requests.jsonl", "".join(lines))
    write_json(folder / METRICS, metrics)


def write_failure(
    folder: pathlib.Path, kind: str, error: str, trace: str = "", row: dict | None = None
) -> None:
    """Writes why a cell has no result.

    `kind` is "memory", "timeout", "crash", "error", or "config" for a cell that did not start;
    `trace` the traceback or log, and `row` has the columns that are known.
    """
    failure = {"kind": kind, "error": " ".join(error.split()), "trace": trace, "row": row or {}}
    write_json(folder / FAILURE, failure)


def state(folder: pathlib.Path) -> str:
    """Returns "finished", "failed" or "to do".

    A cell that could not start is to do: its model may be there now.
    """
    if (folder / METRICS).exists():
        return "finished"
    failure = read_json(folder / FAILURE)
    return "failed" if failure and failure["kind"] != "config" else "to do"


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the content of a JSON file, None if it does not exist.

    Raises:
      ConfigError: the file is not valid JSON.
    """
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:  # JSON, or its encoding
        raise ConfigError(
            f"{path} is not valid JSON ({error}): remove its folder, and run again"
        ) from error


def write_experiment(directory: pathlib.Path, settings: dict[str, Any]) -> None:
    """Writes the experiment and the format of the folder."""
    content = {"format": FORMAT, "config": settings}
    write_atomically(directory / "experiment.yaml", yaml.safe_dump(content, sort_keys=False))


def check_folder(directory: pathlib.Path, keys: Collection[str]) -> None:
    """Checks that an experiment can resume in a folder of results.

    Args:
      directory: may be missing.
      keys: of the experiment's cells.

    Raises:
      ConfigError: the folder has another format, or cells and none of this experiment's.
    """
    remedy = "use another --name, or move the folder away"
    if not (directory / "experiment.yaml").exists():
        if (directory / "cells").exists() or any(directory.glob("*.csv")):
            raise ConfigError(f"{directory} holds results, but no experiment.yaml: {remedy}")
        return
    read_experiment(directory, remedy)
    others = {path.parent.name for path in directory.glob("cells/*/config.yaml")}
    if others and others.isdisjoint(keys):
        raise ConfigError(
            f"{directory} has the cells of another experiment, {len(others)} of which none is in "
            f"this one: {remedy}"
        )


def read_experiment(directory: pathlib.Path, remedy: str) -> dict[str, Any]:
    """Returns the content of `experiment.yaml`.

    Raises:
      ConfigError: the folder has another format; the message ends with `remedy`.
    """
    content = yaml.safe_load((directory / "experiment.yaml").read_text())
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise ConfigError(
            f"{directory} holds results of another version of magicjax (format {version}; this "
            f"version uses format {FORMAT}): {remedy}"
        )
    return content


def digest(text: str) -> str:
    """Returns a hash of a text, 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def remove_partials(directory: pathlib.Path) -> None:
    """Removes incomplete files of killed processes."""
    for partial in directory.rglob(".*.partial"):
        partial.unlink(missing_ok=True)


def write_summary(
    directory: pathlib.Path, rows: list[dict[str, Any]], columns: Sequence[str]
) -> pathlib.Path:
    """Writes these columns of `summary.csv`, one line per row, and returns its path."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, "", "ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(finite(rows))
    path = directory / "summary.csv"
    write_atomically(path, buffer.getvalue())
    return path


def finite(value: Any) -> Any:
    """Returns the value with None for NaN and infinity, which JSON and CSV do not have."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
