"""Multi-process runs of a grid: all processes run every cell, and rank 0 alone writes results.

Every process starts the same launcher with `--distributed`. Rank 0 selects the cells and broadcasts
each one. Cells have no process of their own here, so a process that fails or is lost ends the run.
Finished cells are kept; rerunning the command resumes after the cell that failed.
"""

import itertools
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from experiments.runner import launchers, measure, provenance
from experiments.runner.cell_process import Limits
from experiments.runner.workload import Bench
from experiments.schema import axes, grid, store
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError
from experiments.schema.method import AUTO
from sharding import global_arrays, processes

SETTINGS = ("distributed", "coordinator", "processes", "rank")
# These need a separate process per cell, or trace one process without the others.
# With slots, arrivals would be timed by each process's own clock.
_UNSUPPORTED = ("memory_limit_gb", "timeout_minutes", "jobs", "profile", "slots", "worker")


def join(experiment: Experiment) -> None:
    """Joins the other processes.

    Raises:
      ConfigError: a setting is not supported by such runs, processes are missing, or their
        settings, code or files differ.
    """
    varied = axes.names(experiment.grid, experiment.zip)
    unsupported = [n for n in _UNSUPPORTED if getattr(experiment, n) or n in varied]
    if experiment.launcher != "local":
        unsupported.append("launcher")
    if unsupported:
        raise ConfigError(
            f"{', '.join(unsupported)}: not supported with distributed, where the processes run "
            "the cells themselves: omit it"
        )
    if any(AUTO in method.drafter for method in experiment.methods):
        raise ConfigError(
            "methods: auto depends on timings, which differ between processes: name the drafter"
        )
    cells = [*itertools.chain.from_iterable(grid.groups(experiment))]
    by_input = {" ".join((c.target, *c.models, c.prompts, c.prompt_path)): c for c in cells}
    made_by = {name: provenance.of(cell) for name, cell in by_input.items()}
    settings = experiment.model_dump(mode="json", exclude=set(SETTINGS))
    try:
        processes.join(
            experiment.coordinator or None,
            experiment.processes,
            experiment.rank,
            meshes={cell.mesh for cell in cells},
            run=(settings, made_by),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


class Leader(launchers.InProcess):
    """The launcher of rank 0: broadcasts each cell to the others, up to the first that fails."""

    ends_at_failure = True
    failed = False  # whether a cell failed in this process

    def measure(self, folder: pathlib.Path, bench: Bench, limits: Limits) -> bool:
        """Measures a cell on all processes; returns whether it succeeded."""
        prompts = folder.parent.parent / "prompts"
        message = {"cell": store.read_cell(folder), "prompts": str(prompts)}
        global_arrays.broadcast_from_rank0(message)
        self.failed = not super().measure(folder, bench, limits)
        return not self.failed


def lead(launcher: Leader, launch: Callable[[], int]) -> int:
    """Returns the exit status of rank 0's launcher, with which the other processes end too."""
    try:
        status = launch()
    except ConfigError as error:
        print(error, file=sys.stderr)
        status = 2
    except Exception:  # whatever it is, the others must not wait for this process
        _abandon(traceback.format_exc(), 1)
    if launcher.failed:
        _abandon("a cell failed: the run ends", status)
    if launcher.left_running:
        _abandon("the cell is stopped: the run ends", status)
    global_arrays.broadcast_from_rank0({"cell": None, "status": status})
    return status


def follow() -> int:
    """Runs the cells that rank 0 broadcasts, without writing results; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    bench: Bench | None = None
    try:
        while True:
            message = global_arrays.broadcast_from_rank0(None)
            if message["cell"] is None:
                return message["status"]
            bench = bench or Bench(pathlib.Path(message["prompts"]))
            measure.measure(bench, grid.restored(message["cell"]))
    except Exception:  # whatever it is, the others must not wait for this process
        _abandon(traceback.format_exc(), 1)


def _abandon(message: str, status: int) -> NoReturn:
    """Exits without JAX's shutdown barrier: the others may wait for this process in a cell."""
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
