"""Makes the tables: python -m experiments.studies.specinfer FILE

FILE is a config such as experiments/configs/specinfer_tables.yaml. Writes a CSV for each table and
`report.md`, which compares them with the papers' figures. Finished cells are not run again, unless
settings, weights, versions, code or the machine changed.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd
from tqdm import tqdm

from experiments.runner.workload import Bench
from experiments.schema.fields import ConfigError
from experiments.schema.grid import Cell
from experiments.studies.specinfer import report, runs, settings, success
from experiments.studies.specinfer import tables as compared
from magicjax.files import write_atomically

PROG = "python -m experiments.studies.specinfer"
NAMES = {
    1: "table1_success_rate",
    2: "table2_tokens_per_step_by_width",
    3: "table3_naive_against_mss",
    4: "table4_ensembles",
    5: "table5_tree_shapes",
}
MAKERS = {2: compared.widths, 3: compared.verifiers, 4: compared.ensembles, 5: compared.shapes}


def count_runs(tables: settings.Tables) -> dict[Cell, int]:
    """Returns the number of runs of each cell; raises ConfigError if one cannot run."""
    dry_run = runs.DryRun(tables)
    for number in sorted(set(tables.tables) & MAKERS.keys()):
        MAKERS[number](tables, dry_run)
    return dry_run.work


def make(tables: settings.Tables, bench: Bench) -> dict[int, list[dict[str, Any]]]:
    """Returns the rows of the tables by number; writes each table as soon as it is made."""
    work = count_runs(tables)
    directory = pathlib.Path(tables.results) / tables.name
    made: dict[int, list[dict[str, Any]]] = {}
    with tqdm(total=sum(work.values()), unit="run", smoothing=0.05) as bar:
        runner = None
        for number in sorted(set(tables.tables)):
            if number in MAKERS:
                runner = runner or runs.Runner(tables, bench, bar)
                made[number] = MAKERS[number](tables, runner)
            else:
                made[number] = success.rates(tables, bench)
            text = pd.DataFrame(made[number]).to_csv(index=False, lineterminator="\n")
            write_atomically(directory / f"{NAMES[number]}.csv", text)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if a greedy cell is not exact; 2 for wrong settings."""
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("file", type=pathlib.Path, help="settings, a YAML file")
    parser.add_argument("--fresh", action="store_true", help="measure finished cells again")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and exit")
    options = parser.parse_args(arguments)
    try:
        tables = settings.read(options.file)
        tables = tables.model_copy(update={"fresh": tables.fresh or options.fresh})
        if options.dry_run:
            work = count_runs(tables)
            for cell, count in work.items():
                print(f"{cell.method}{' sampled' if cell.temperature else ''}: {count} runs")
            print(f"{len(work)} cells, {sum(work.values())} requests to run")
            return 0
        made = make(tables, Bench())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    directory = pathlib.Path(tables.results) / tables.name
    write_atomically(directory / "report.md", report.write(tables, made))
    print(f"wrote report.md and a CSV for each table to {directory}")
    rows = [row for rows in made.values() for row in rows]
    return 0 if all(row.get("exact") in (None, 1.0) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
