"""Runs an experiment: python -m experiments.launch experiments/configs/demo.yaml [--key value]

Expands the grid, measures each cell, prints a table, and writes `summary.csv`, plots and one JSON
for each cell. Finished cells are not measured again, unless settings, weights, versions
or the machine changed.
"""

import functools
import hashlib
import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import config, grid, measure, plots, preflight, store, terminal

PROG = "python -m experiments.launch"


def surroundings(cell: grid.Cell) -> dict[str, str]:
    """Returns what a result depends on beside its settings."""
    return {
        "device": measure.device_name(),
        "jax": jax.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "target": grid.fingerprint(cell.target),
        "model": " ".join(grid.fingerprint(model) for model in cell.models),
        "policy": cell.cache.source,
        "code": _code(),
    }


@functools.cache
def _code() -> str:
    """Returns a hash of the source: what other code took is no result of this one."""
    root = pathlib.Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in ("magicjax", "models", "pallas_kernels", "sharding", "experiments"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run(
    experiment: config.Experiment, console: Console, bench: measure.Bench | None = None
) -> list[dict[str, Any]]:
    """Returns the records of all cells, in the grid's order, having measured what was missing."""
    bench = bench or measure.Bench()
    directory = pathlib.Path(experiment.results) / experiment.name
    groups = grid.groups(experiment)
    keys = {cell: grid.key(cell, surroundings(cell)) for group in groups for cell in group}
    records = {}
    if not experiment.fresh:
        found = {cell: store.read_record(directory, key) for cell, key in keys.items()}
        records = {cell: record for cell, record in found.items() if record}
    wanted = [[cell for cell in group if cell not in records] for group in groups]
    if records:
        console.print(f"{len(records)} of {len(keys)} cells are finished already in {directory}")

    with _progress(console) as progress:
        turns = experiment.repeats + 1
        todo = [len({group[0], *cells}) * turns for group, cells in zip(groups, wanted) if cells]
        task = progress.add_task("start", total=sum(todo))
        started = itertools.count()

        def tick(cell: grid.Cell, turn: int) -> None:
            what = f"run {turn} of {turns - 1}" if turn else "compile, warm up"
            progress.update(task, description=f"{cell.label} ({what})", completed=next(started))

        for group, cells in zip(groups, wanted, strict=True):
            if not cells:
                continue
            told: set[str] = set()
            for cell, record in measure.measure(bench, group, cells, tick):
                store.write_record(directory, keys[cell], record)
                records[cell] = record
                _announce(console, cell, record, told)
        progress.update(task, completed=sum(todo), description="done")
    return [records[cell] for group in groups for cell in group]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _announce(console: Console, cell: grid.Cell, record: dict[str, Any], told: set[str]) -> None:
    """Prints a finished cell, with what must not be overlooked: its error, or differing tokens.

    `told` are the errors of its group so far: one of plain decoding fails all, and is told once.
    """
    row = record["row"]
    if row["status"] == "ok":
        result = f"τ {row['tau']:.2f}"
        if row["speedup"] is not None:
            result = f"{row['decode_tok_s']:.0f} tokens/s, {row['speedup']:.2f}×, {result}"
    elif terminal.is_told(row, told):
        return
    else:
        result = f"failed: {row['error']}"
    console.print(f"{cell.label}: {result}", markup=False, highlight=False)
    for divergence in record.get("divergences", ()):
        console.print(f"{cell.label}: {divergence}", markup=False)


def publish(
    experiment: config.Experiment, records: list[dict[str, Any]], console: Console
) -> pathlib.Path:
    """Returns the folder of the results, having printed the table and written CSV and plot."""
    directory = pathlib.Path(experiment.results) / experiment.name
    rows = [record["row"] for record in records]
    store.write_summary(directory, rows)
    written = ["summary.csv", *plots.write(rows, directory, experiment.name), "cells/*.json"]
    console.print(terminal.table(rows, title=experiment.name))
    for line in (*terminal.LEGEND, *terminal.notes(rows)):
        console.print(line, markup=False)
    console.print(f"written to {directory}: {', '.join(written)}", markup=False)
    return directory


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if a cell failed or is not exact; 2 for wrong settings."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log file has no width of its own
    try:
        experiment = config.from_command_line(
            sys.argv[1:] if arguments is None else arguments, PROG
        )
        preflight.check(experiment)
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    records = run(experiment, console)
    publish(experiment, records, console)
    good = all(r["row"]["status"] == "ok" and terminal.is_exact(r["row"]) for r in records)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
