"""Acceptance of the policies of sparse caches, by budget and context, without timing.

    python -m experiments.studies.policy_acceptance FILE [--key value]

The methods of a grid's group start from one prefill of the same prompts in one process, so that a
method takes seconds. The CSV keeps all finished groups, and a second run continues after them; a
folder beside it has a figure of the acceptance rate by budget.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from experiments.prompts.metrics import repeated_ngrams
from experiments.report import export, figures, labels
from experiments.runner import exactness, provenance
from experiments.runner.workload import Bench, merge
from experiments.schema import config, grid
from experiments.schema.fields import ConfigError
from magicjax.benchmarks.tables import record_table
from magicjax.files import write_atomically

PROG = "python -m experiments.studies.policy_acceptance"
SHOWN = ("context", "prompts", "method", "acceptance_rate", "tau", "exact_match", "ties")


def cells_of(experiment: config.Experiment) -> list[list[grid.Cell]]:
    """Returns the groups of a grid, each run once.

    Raises:
      ConfigError: wrong settings, or sampling, which has no texts to compare.
    """
    groups = grid.groups(experiment)
    if any(cell.temperature or cell.draft == "auto" for group in groups for cell in group):
        raise ConfigError(
            "temperature and drafter=auto are not supported here: use experiments.launch"
        )
    return [[dataclasses.replace(cell, repeats=1) for cell in group] for group in groups]


def identity(cell: grid.Cell) -> str:
    """Returns a name of a cell's result: of its settings, code, and files."""
    return grid.key(cell, provenance.of(cell))


def measure(bench: Bench, group: list[grid.Cell]) -> list[dict[str, Any]]:
    """Returns a row for each method of a group, whose first cell is plain decoding."""
    outputs: dict[grid.Cell, list] = {cell: [] for cell in group}
    shared = None
    for rows in bench.batches(group[0]):
        shared = None  # frees the caches of the last batch
        shared = bench.runs(group, rows)
        for cell in tqdm(group, desc=group[0].label, unit="method", leave=False):
            outputs[cell].append(shared.run(cell))
    shared = None  # the comparison below reads whole texts, which needs memory
    first = group[0]
    reference = exactness.Reference(
        bench.target_of(first), bench.prompts(first), merge(outputs[first]).tokens
    )
    made = []
    for cell in group[1:]:
        output = merge(outputs[cell])
        match = reference.compare(output.tokens)
        made.append(
            {
                "cell": identity(cell),
                **grid.columns(cell),
                "acceptance_rate": output.stats.acceptance_rate,
                "tau": output.stats.tau,
                "repeated_8grams": repeated_ngrams(np.asarray(output.tokens)),
                "exact_match": match.exact,
                "ties": match.ties,
            }
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the settings are invalid."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        experiment = config.from_command_line(arguments, PROG)
        groups = cells_of(experiment)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    path = pathlib.Path(experiment.results) / f"{experiment.name}.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    bench, current = Bench(), list[str]()
    for group in groups:
        names = [identity(cell) for cell in group[1:]]
        current += names
        if {*names} <= {row["cell"] for row in rows}:
            continue
        rows = [row for row in rows if row["cell"] not in names] + measure(bench, group)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, pd.DataFrame(rows).to_csv(index=False))
    # As the file has them: without the values that are not set.
    table = pd.read_csv(path).convert_dtypes().astype(object)  # budgets are integers
    shown = table[table["cell"].isin(current)].where(table.notna(), None).to_dict("records")
    print(record_table([{name: row[name] for name in SHOWN} for row in shown]))
    figure = figures.by_budget(shown, labels.styles(shown), "acceptance_rate", "acceptance rate")
    export.write(path.parent / experiment.name, "acceptance", figure)
    print(f"wrote {path} and {path.parent / experiment.name}/acceptance-*.pdf, .svg, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
