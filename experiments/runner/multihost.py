"""Multi-process runs of a grid: all processes run every cell, and rank 0 alone writes results.

Every process starts the same launcher (`--coordinator HOST:PORT --processes N --rank I`, or srun,
mpirun). Rank 0 selects the cells and broadcasts each one. Cells have no process of their own here,
so a process that fails or is lost ends the run. Finished cells are kept; rerunning the command
resumes after the cell that failed.
"""

import contextlib
import itertools
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from experiments import processes
from experiments.runner import measure, provenance, worker
from experiments.runner.cell_process import Limits
from experiments.runner.launchers import Stop
from experiments.runner.workload import Bench
from experiments.schema import axes, grid, store
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError
from experiments.schema.method import AUTO
from sharding import global_arrays, parse_mesh

SETTINGS = ("coordinator", "processes", "rank", "join_seconds")
# These need a separate process per cell, or trace one process without the others.
# With slots, arrivals would be timed by each process's own clock.
_UNSUPPORTED = ("memory_limit_gb", "timeout_minutes", "jobs", "profile", "slots")
INTERRUPTED = 130


def detect(experiment: Experiment) -> processes.Processes | None:
    """Returns the position of this process in a multi-process run, or None if it runs alone.

    Raises:
      ConfigError: the position is incomplete, or a setting is not supported by such runs.
    """
    position = experiment.coordinator or None, experiment.processes, experiment.rank
    try:
        who = processes.detect(*position)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if who is None:
        return None
    varied = axes.names(experiment.grid, experiment.zip)
    unsupported = [n for n in _UNSUPPORTED if getattr(experiment, n) or n in varied]
    if experiment.launcher != "local":
        unsupported.append("launcher")
    if unsupported:
        raise ConfigError(
            f"{', '.join(unsupported)}: not supported with {who.count} processes, which run the "
            "cells themselves: omit it"
        )
    if any(AUTO in method.drafter for method in experiment.methods):
        raise ConfigError(
            f"methods: auto depends on timings, which differ between {who.count} processes: name "
            "the drafter"
        )
    return who


@contextlib.contextmanager
def joined(who: processes.Processes, experiment: Experiment) -> Iterator[None]:
    """Joins the other processes, and leaves them at the end.

    Raises:
      ConfigError: processes are missing or duplicate, or their settings, code or files differ.
    """
    settings = experiment.model_dump(mode="json", exclude=set(SETTINGS))
    made_by = {name: provenance.of(cell) for name, cell in _cells_by_input(experiment).items()}
    run = {"settings": settings, "made_by": made_by}
    try:
        processes.join(who, run, experiment.join_seconds)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with processes.leaving((ConfigError,)):
        _check_devices(experiment)
        yield


def _cells_by_input(experiment: Experiment) -> dict[str, grid.Cell]:
    """Returns one cell for each combination of models and prompts that is read."""
    cells = itertools.chain.from_iterable(grid.groups(experiment))
    return {" ".join((c.target, *c.models, c.prompts, c.prompt_path)): c for c in cells}


def _check_devices(experiment: Experiment) -> None:
    """Raises ConfigError unless every cell's mesh has all devices of all processes."""
    for cell in itertools.chain.from_iterable(grid.groups(experiment)):
        size = parse_mesh(cell.mesh).devices if cell.mesh else 1
        if size != jax.device_count():
            raise ConfigError(
                f"mesh={cell.mesh!r} has {size} devices, but the {jax.process_count()} processes "
                f"have {jax.device_count()}: give a mesh of all devices"
            )


class InProcess:
    """The launcher of rank 0: runs cells in this process, and broadcasts them to the others."""

    failed = False  # whether a cell failed in this process

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end, up to the first that fails."""
        prompts = folders[0].parent.parent / "prompts" if folders else None
        bench = Bench(prompts)
        threading.Thread(target=_exit_on_request, args=(stop,), daemon=True).start()
        for folder in folders:
            if stop.no_more or self.failed:
                return
            message = {"cell": store.read_cell(folder), "prompts": str(prompts)}
            global_arrays.broadcast_from_rank0(message)
            self.failed = not worker.measure_cell(folder, bench, limits.profile)
            yield folder


def _exit_on_request(stop: Stop) -> None:
    """Exits when the user stops the running cell; the other processes then exit too."""
    while not stop.now():
        time.sleep(0.2)
    os._exit(INTERRUPTED)


def lead(launcher: InProcess, launch: Callable[[], int]) -> int:
    """Returns the exit status of rank 0's launcher, with which the other processes end too."""
    try:
        status = launch()
    except ConfigError as error:
        print(error, file=sys.stderr)
        status = 2
    if launcher.failed:
        processes.abandon(status)
    else:
        global_arrays.broadcast_from_rank0({"cell": None, "status": status})
    return status


def follow() -> int:
    """Runs the cells that rank 0 broadcasts, without writing results; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    bench: Bench | None = None
    while True:
        message = global_arrays.broadcast_from_rank0(None)
        if message["cell"] is None:
            return message["status"]
        bench = bench or Bench(pathlib.Path(message["prompts"]))
        cell = grid.restored(message["cell"])
        try:
            measure.measure(bench, cell)
        except Exception as error:  # rank 0 cannot continue without this process
            processes.await_loss(error)
            print(f"{cell.label}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            processes.abandon(1)
            return 1
