"""A grid in many processes: all of them run every cell, and rank 0 alone writes results.

Each starts the same launcher (`--coordinator HOST:PORT --processes N --rank I`, or srun, mpirun).
Rank 0 leads: it knows what is finished, tells the others the next cell, and publishes. A cell is no
process of its own here, so a process that fails or is lost ends the run; what is finished is kept,
and the same command goes on, behind a cell that failed.
"""

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import yaml

from experiments.runner import measure, provenance, tracking, worker
from experiments.runner.cell_process import Limits
from experiments.runner.launchers import Stop
from experiments.runner.workload import Bench
from experiments.schema import grid
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError
from sharding import parse_mesh, processes

SETTINGS = ("coordinator", "processes", "rank", "join_seconds")
# What a process of its own would be needed for, or one that is traced beside others.
_ALONE = ("memory_limit_gb", "timeout_minutes", "jobs", "profile")
INTERRUPTED = 130


def find(experiment: Experiment) -> processes.Processes | None:
    """Returns this process among others; None: it is the only one.

    Raises:
      ConfigError: they cannot find each other by what is given, or something is asked for that
        many processes do not do.
    """
    try:
        given = experiment.coordinator or None, experiment.processes, experiment.rank
        who = processes.find(*given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if who is None:
        return None
    stray = [name for name in _ALONE if getattr(experiment, name)]
    if experiment.launcher != "local":
        stray.append("launcher")
    if stray:
        raise ConfigError(
            f"{', '.join(stray)}: {who.count} processes run every cell together, in themselves: "
            "leave it out"
        )
    drafts = {method.draft for method in experiment.methods}
    if "auto" in drafts:
        raise ConfigError(
            f"methods: auto decides by measured times, which differ between {who.count} processes: "
            "name the drafter"
        )
    return who


@contextlib.contextmanager
def joined(who: processes.Processes, experiment: Experiment) -> Iterator[None]:
    """Joins the other processes, and leaves them in the end.

    Raises:
      ConfigError: some are missing or twice, or they are to run something else.
    """
    settings = experiment.model_dump(mode="json", exclude=set(SETTINGS))
    reads = _models_and_prompts(experiment)
    made_by = {name: provenance.of(cell) for name, cell in reads.items()}
    try:
        run = {"settings": settings, "made_by": made_by}
        processes.join(who, run, experiment.join_seconds)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with processes.leaving((ConfigError,)):
        _check_devices(experiment)
        yield


def _models_and_prompts(experiment: Experiment) -> dict[str, grid.Cell]:
    """Returns a cell of each that reads other files, by what it reads."""
    cells = [cell for group in grid.groups(experiment) for cell in group]
    return {" ".join((c.target, *c.models, c.prompts, c.prompt_path)): c for c in cells}


def _check_devices(experiment: Experiment) -> None:
    """Raises ConfigError unless every cell's mesh has all devices of all processes."""
    for cell in (cell for group in grid.groups(experiment) for cell in group):
        size = parse_mesh(cell.mesh).devices if cell.mesh else 1
        if size != jax.device_count():
            raise ConfigError(
                f"mesh={cell.mesh!r} has {size} devices, and the {jax.process_count()} processes "
                f"have {jax.device_count()}: a mesh must have all of them"
            )


class Here:
    """Rank 0's launcher: runs cells in this process, and tells the others to run them too.

    Attributes:
      failed: whether a cell failed, in this process alone or in all: nobody knows.
    """

    def __init__(self) -> None:
        self.failed = False

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end; none behind one that failed."""
        chosen = folders[0].parent.parent / "prompts" if folders else None
        bench = Bench(chosen)
        threading.Thread(target=_end_when_asked, args=(stop,), daemon=True).start()
        for folder in folders:
            if stop.no_more or self.failed:
                return
            cell = yaml.safe_load((folder / "config.yaml").read_text())
            processes.of_first({"cell": cell, "prompts": str(chosen)})
            self.failed = not worker.measure_cell(folder, bench, limits.profile)
            yield folder


def _end_when_asked(stop: Stop) -> None:
    """Ends this process, and with it the others, when the user asks for it in mid-cell."""
    while not stop.now():
        time.sleep(0.2)
    os._exit(INTERRUPTED)


def lead(here: Here, launch: Callable[[], int]) -> int:
    """Returns the exit status of rank 0's launcher, which the others end with too."""
    try:
        status = launch()
    except (ConfigError, tracking.TrackingError) as error:
        print(error, file=sys.stderr)
        status = 2
    if here.failed:
        processes.abandon(status)
    else:
        processes.of_first({"cell": None, "status": status})
    return status


def follow() -> int:
    """Runs the cells that rank 0 leads to, and returns the exit status; nothing is written."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the run
    bench: Any = None
    while True:
        told = processes.of_first(None)
        if told["cell"] is None:
            return told["status"]
        bench = bench or Bench(pathlib.Path(told["prompts"]))
        cell = grid.restored(told["cell"])
        try:
            measure.measure(bench, cell)
        except Exception as error:  # whatever it was, rank 0 cannot go on without this process
            processes.await_loss(error)  # of which it may be a part
            print(f"{cell.label}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            processes.abandon(1)
            return 1
