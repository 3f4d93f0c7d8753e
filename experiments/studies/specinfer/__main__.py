"""Makes the tables: python -m experiments.studies.specinfer
experiments/configs/specinfer_tables.yaml

Writes a CSV for each table, and `report.md`, which sets them beside the papers' figures. Finished
cells are not run again, unless settings, weights, versions, code or the machine changed.
"""

import argparse
import csv
import io
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from experiments.runner.workload import Bench
from experiments.schema import store
from experiments.schema.fields import ConfigError
from experiments.schema.grid import Cell
from experiments.studies.specinfer import report, runs, settings, success, tables

PROG = "python -m experiments.studies.specinfer"
# Number -> its file and, but for the first, what makes it.
NAMES = {
    1: "table1_success_rate",
    2: "table2_tokens_per_step_by_width",
    3: "table3_naive_against_mss",
    4: "table4_ensembles",
    5: "table5_tree_shapes",
}
MAKERS = {2: tables.widths, 3: tables.verifiers, 4: tables.ensembles, 5: tables.shapes}


def rehearse(wanted: settings.Tables) -> dict[Cell, int]:
    """Returns how many runs each cell takes; raises ConfigError if one cannot run."""
    rehearsal = runs.Rehearsal(wanted)
    for number in sorted(set(wanted.tables) & MAKERS.keys()):
        MAKERS[number](wanted, rehearsal)
    return rehearsal.work


def make(wanted: settings.Tables, bench: Bench) -> dict[int, list[dict[str, Any]]]:
    """Returns the rows of every table that is wanted, by its number; each is written at once."""
    work, numbers = rehearse(wanted), sorted(set(wanted.tables))
    directory = pathlib.Path(wanted.results) / wanted.name
    made: dict[int, list[dict[str, Any]]] = {}
    with tqdm(total=sum(work.values()), unit="run", smoothing=0.05) as bar:

        def tick(what: str, runs_done: int) -> None:
            bar.set_description(what if len(what) < 48 else f"{what[:45]}...", refresh=False)
            bar.update(runs_done)

        runner = None
        for number in numbers:
            if number in MAKERS:
                runner = runner or runs.Runner(wanted, bench, tick)
                made[number] = MAKERS[number](wanted, runner)
            else:
                made[number] = success.rates(wanted, bench)
            write_table(directory / f"{NAMES[number]}.csv", made[number])
    return made


def write_table(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows of the same keys as CSV."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    store.write_text(path, buffer.getvalue())


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if a greedy cell is not exact; 2 for wrong settings."""
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("file", type=pathlib.Path, help="settings, a YAML file")
    parser.add_argument("--fresh", action="store_true", help="measure also what is finished")
    parser.add_argument("--dry-run", action="store_true", help="list the runs, and make none")
    given = parser.parse_args(arguments)
    try:
        wanted = settings.read(given.file)
        wanted = wanted.model_copy(update={"fresh": wanted.fresh or given.fresh})
        if given.dry_run:
            work = rehearse(wanted)
            for cell, count in work.items():
                print(f"{cell.method}{' sampled' if cell.do_sample else ''}: {count} runs")
            print(f"{len(work)} cells, {sum(work.values())} requests to run")
            return 0
        made = make(wanted, Bench())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    directory = pathlib.Path(wanted.results) / wanted.name
    store.write_text(directory / "report.md", report.write(wanted, made))
    print(f"written to {directory}: report.md and a CSV for each table")
    rows = [row for rows in made.values() for row in rows]
    return 0 if all(row.get("exact") in (None, 1.0) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
