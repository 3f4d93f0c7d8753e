"""Acceptance of the policies of sparse caches, by budget and context, without timing.

    python -m experiments.studies.policy_acceptance FILE [--key value]

The methods of a grid's group start from one prefill of the same prompts in one process, so that a
method takes seconds. Finished groups are kept in the CSV, and a second run continues after them.
"""

import hashlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from experiments.prompts.metrics import repeated_ngrams
from experiments.runner import exactness
from experiments.runner.workload import Bench, merge
from experiments.schema import config, grid
from experiments.schema.fields import ConfigError
from magicjax.benchmarks.tables import record_table
from magicjax.files import write_atomically

PROG = "python -m experiments.studies.policy_acceptance"


def identity(cell: grid.Cell) -> str:
    """Returns a name of all settings of a cell, by which finished rows are found."""
    return hashlib.sha256(repr(cell).encode()).hexdigest()[:12]


def measure(bench: Bench, group: list[grid.Cell]) -> list[dict[str, Any]]:
    """Returns a row for each method of a group, whose first cell is plain decoding."""
    outputs: dict[grid.Cell, list] = {cell: [] for cell in group}
    for rows in bench.batches(group[0]):
        shared = bench.runs(group, rows)
        for cell in tqdm(group, desc=group[0].label, unit="method", leave=False):
            outputs[cell].append(shared.run(cell))
    plain = merge(outputs[group[0]]).tokens
    made = []
    for cell in group[1:]:
        output = merge(outputs[cell])
        match = exactness.compare(bench.target_of(cell), bench.prompts(cell), plain, output.tokens)
        made.append(
            {
                "cell": identity(cell),
                "context": cell.context,
                "policy": cell.policy,
                "budget": cell.budget,
                "acceptance": output.stats.acceptance_rate,
                "tau": output.stats.tau,
                "repeated_8grams": repeated_ngrams(np.asarray(output.tokens)),
                "exact": match.exact,
                "ties": match.ties,
            }
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the settings are invalid."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        experiment, _ = config.from_command_line(arguments, PROG)
        groups = grid.groups(experiment)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    path = pathlib.Path(experiment.results) / f"{experiment.name}.csv"
    finished = pd.read_csv(path).to_dict("records") if path.exists() else []
    by_cell = {row["cell"]: row for row in finished}
    bench, rows = Bench(), list[dict[str, Any]]()
    for group in groups:
        names = [identity(cell) for cell in group[1:]]
        if all(name in by_cell for name in names):
            rows += [by_cell[name] for name in names]
            continue
        rows += measure(bench, group)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, pd.DataFrame(rows).to_csv(index=False))
    print(record_table(rows))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
