"""Runs an experiment: python -m experiments.launch experiments/configs/demo.yaml [--key value]

Expands the grid, measures each cell in a process of its own, prints a table, and writes
`summary.csv`, a report with pictures, and a folder for each cell. Finished cells are not measured
again: a run that was stopped, by whatever, goes on.
"""

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments.report import page, results_folder, terminal
from experiments.runner import estimates, launchers, multihost, preflight, provenance, tracking
from experiments.runner.cell_process import Limits
from experiments.schema import axes, config, grid, store
from experiments.schema.fields import ConfigError
from sharding import parse_mesh

PROG = "python -m experiments.launch"
INTERRUPTED = multihost.INTERRUPTED


class Grid:
    """An experiment's cells and their folders.

    Attributes:
      bad: the cells that are known not to run, and why; filled in after they were checked.
      experiment, directory: what is run, and the folder of its results.
      groups, cells: in the grid's order.
      folders: of the cells.
      labels: their names in messages, with every setting that varies.
    """

    def __init__(self, experiment: config.Experiment):
        self.experiment = experiment
        self.directory = pathlib.Path(experiment.results) / experiment.name
        self.groups = grid.groups(experiment)
        self.cells = [cell for group in self.groups for cell in group]
        self.bad: dict[grid.Cell, str] = {}
        self.folders = {
            cell: store.cell_folder(self.directory, grid.key(cell)) for cell in self.cells
        }

        varied = [axis for axis in axes.VARIED if axis not in ("batch", "context")]
        named = [axis for axis in varied if len({getattr(c, axis) for c in self.cells}) > 1]
        self.labels = {
            cell: ", ".join([cell.label, *(f"{axis}={getattr(cell, axis)}" for axis in named)])
            for cell in self.cells
        }

    def state(self, cell: grid.Cell) -> str:
        """Returns "finished", "failed" or "to do"."""
        folder = self.folders[cell]
        if (folder / store.METRICS).exists():
            return "finished"
        return "failed" if (folder / store.FAILURE).exists() else "to do"

    def wanted(self) -> list[grid.Cell]:
        """Returns the cells to run now.

        Raises:
          ConfigError: finished cells are stale, and it was not said what becomes of them.
        """
        given = self.experiment
        cells = [cell for cell in self.cells if cell not in self.bad]
        if given.fraction is not None:
            count = max(1, round(given.fraction * len(cells)))
            cells = [cells[i * len(cells) // count] for i in range(count)]
        states = {cell: self.state(cell) for cell in cells}
        again = set(cells) if given.fresh else self._stale(cells)
        if given.retry_failed:
            again |= {cell for cell in cells if states[cell] == "failed"}
        return [c for c in cells if c in again or states[c] == "to do"][: given.limit]

    def _stale(self, cells: Sequence[grid.Cell]) -> set[grid.Cell]:
        """Returns the finished cells that are to be measured again because of what made them."""
        if self.experiment.stale == "keep":
            return set()
        stale: dict[grid.Cell, str] = {}
        for cell in cells:
            env = store.read_json(self.folders[cell] / "env.json")
            if env is None or self.state(cell) != "finished":
                continue
            now = provenance.of(cell)
            if changed := [n for n in now if env["made_by"].get(n) != now[n]]:
                stale[cell] = ", ".join(f"{n} {env['made_by'].get(n)} -> {now[n]}" for n in changed)
        if stale and self.experiment.stale == "refuse":
            first, changed_first = next(iter(stale.items()))
            raise ConfigError(
                f"{len(stale)} of {len(cells)} cells in {self.directory} were measured with other "
                f"code, versions or models ({self.labels[first]}: {changed_first}): --stale redo "
                "measures them again, --stale keep counts them as finished, another --name leaves "
                "them"
            )
        return set(stale)


def run(
    whole: Grid,
    wanted: Sequence[grid.Cell],
    console: Console,
    launcher: launchers.Launcher,
    tracker: tracking.Tracker,
    seconds: dict[grid.Cell, float],
    stop: launchers.Stop,
) -> None:
    """Runs the cells that are wanted.

    Args:
      whole: the grid.
      wanted: some of its cells, of which earlier results go.
      console: for lines and progress.
      launcher: where cells run.
      tracker: is told of each that ended.
      seconds: estimated, of each cell: progress counts them.
      stop: the user's wish to end.
    """
    given = whole.experiment
    told: dict[grid.Cell, set[str]] = {}
    if len(wanted) < len(whole.cells):
        console.print(f"{len(wanted)} of {len(whole.cells)} cells are to do in {whole.directory}")
    cell_of = {}
    for cell in wanted:
        folder = whole.folders[cell].resolve()
        store.write_cell(folder, grid.resolved(cell))
        if whole.state(cell) != "to do":
            store.clear(folder)
        cell_of[folder] = cell
    limits = Limits(given.memory_limit_gb, given.timeout_minutes, given.profile)
    with _progress(console) as progress:
        task = progress.add_task(
            "", total=sum(seconds[c] for c in wanted), count=len(wanted), done=0
        )
        for i, folder in enumerate(launcher.run(list(cell_of), limits, stop), 1):
            cell = cell_of[folder]
            progress.update(task, advance=seconds[cell], done=i)
            row = results_folder.row_of(folder)
            if row is None:
                continue  # the user ended it
            of_group = told.setdefault(grid.plain_of(cell), set())
            _announce(progress.console, whole.labels[cell], row, of_group)
            tracker.cell(row, i)


def _progress(console: Console) -> Progress:
    count = TextColumn("{task.fields[done]} of {task.fields[count]} cells")
    return Progress(count, BarColumn(), TimeRemainingColumn(), TextColumn("left"), console=console)


def _announce(console: Console, label: str, row: dict[str, Any], told: set[str]) -> None:
    """Prints a finished cell, with what must not be overlooked.

    `told` are the errors of its group so far: the same one is told once.
    """
    if row["status"] == "ok":
        result = f"τ {row['tau']:.2f}"
        if row["speedup"] is not None:
            result = f"{row['decode_tok_s']:.0f} tokens/s, {row['speedup']:.2f}×, {result}"
        if not terminal.is_exact(row):
            result += f", NOT equal to plain decoding ({row['exact_match']:.3f} of the rows)"
    elif row["error"] in told:
        return
    else:
        told.add(row["error"])
        result = f"{row['status']}: {row['error']}"
    console.print(f"{label}: {result}", markup=False, highlight=False)


def publish(whole: Grid, console: Console) -> list[dict[str, Any]]:
    """Returns the rows of the cells that have ended, having written the summary and the report."""
    rows = [row for folder in whole.folders.values() if (row := results_folder.row_of(folder))]
    if not rows:
        console.print("no cell has ended: nothing to report")
        return []
    store.write_summary(whole.directory, rows)
    written = ["summary.csv", *page.write(whole.directory, [row["key"] for row in rows])]
    console.print(terminal.table(rows, title=whole.experiment.name))
    for line in (*terminal.LEGEND, *terminal.notes(rows)):
        console.print(line, markup=False)
    console.print(f"written to {whole.directory}: {', '.join(written)}, cells/", markup=False)
    if left := len(whole.cells) - len(rows):
        console.print(
            f"{left} of {len(whole.cells)} cells are still to do: the same command goes on"
        )
    return rows


def dry_run(
    whole: Grid, console: Console, known: dict[grid.Cell, estimates.Estimate], on_gpu: bool
) -> None:
    """Prints the cells, what they will take, and which are done."""
    table = Table(title=f"{whole.experiment.name}: {len(whole.cells)} cells")
    for name in ("key", "cell", "state", "memory, GB", "time, about"):
        table.add_column(name, justify="right" if "," in name else "left", no_wrap=name == "key")
    for cell in whole.cells:
        about = known[cell]
        table.add_row(
            whole.folders[cell].name[:8],
            whole.labels[cell],
            whole.state(cell),
            f"{about.memory_gb:.2f}",
            _duration(about.seconds),
        )
    console.print(table)
    wanted = whole.wanted()
    total = sum(known[cell].seconds for cell in wanted)
    where = "on GPUs" if on_gpu else "on this CPU"
    console.print(f"{len(wanted)} to run, one after the other {where} about {_duration(total)}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status.

    0; 1 if a cell failed or is not exact; 2 for wrong settings; 130 if the user ended it. Among
    many processes 4 if another one was lost (`sharding.processes`).
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a log file has no width of its own
    try:
        experiment, source = config.from_command_line(
            sys.argv[1:] if arguments is None else arguments, PROG
        )
        who = multihost.find(experiment)
        if who is None:
            return _launch(experiment, source, console)
        with multihost.joined(who, experiment):
            if who.rank > 0:
                return multihost.follow()
            here = multihost.Here()
            return multihost.lead(here, lambda: _launch(experiment, source, console, here))
    except (ConfigError, tracking.TrackingError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept", file=sys.stderr)
        return INTERRUPTED


def _launch(
    experiment: config.Experiment,
    source: str,
    console: Console,
    here: launchers.Launcher | None = None,
) -> int:
    """Returns the exit status of an experiment; `here`: cells run in this process, among others."""
    whole = Grid(experiment)
    source = _place(source)
    store.check_folder(whole.directory, source)
    jobs_on_gpu = experiment.launcher == "slurm" and experiment.slurm.gpus > 0
    on_gpu = jobs_on_gpu or bool(launchers.gpus())
    devices = 0 if here else _leave_the_devices_alone(whole.cells)
    whole.bad = preflight.check(whole.groups, experiment.impossible == "record")
    known = {c: estimates.of(c, on_gpu) for c in whole.cells if c not in whole.bad}
    known |= dict.fromkeys(whole.bad, estimates.Estimate(0.0, 0.0))
    if experiment.dry_run:
        dry_run(whole, console, known, on_gpu)
        return 0
    tracking.check(experiment.track)
    with store.locked(whole.directory / ".lock", wait=False) as alone:
        if not alone:
            raise ConfigError(
                f"{whole.directory} is being filled by another launcher: wait for it, or give "
                "another --name"
            )
        launcher = here or launchers.make(experiment, devices)
        return _whole_run(whole, source, console, launcher, known)


def _place(source: str) -> str:
    """Returns one name of a file, however it was given: below the working folder a relative one."""
    path, here = pathlib.Path(source).resolve(), pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _whole_run(
    whole: Grid,
    source: str,
    console: Console,
    launcher: launchers.Launcher,
    known: dict[grid.Cell, estimates.Estimate],
) -> int:
    """Returns the exit status of a run that has the folder to itself."""
    wanted = whole.wanted()  # refuses stale cells before anything is written
    store.remove_partials(whole.directory)
    settings = whole.experiment.model_dump(
        mode="json", exclude_unset=True, exclude=set(multihost.SETTINGS)
    )
    store.write_experiment(whole.directory, settings, source)
    for cell, problem in whole.bad.items():
        store.write_cell(whole.folders[cell], grid.resolved(cell))
        store.write_failure(whole.folders[cell], "config", problem)
        console.print(f"{whole.labels[cell]} cannot run: {problem}", markup=False)
    tracker = tracking.open(
        list(whole.experiment.track), whole.experiment.name, whole.directory, settings
    )
    seconds = {cell: about.seconds for cell, about in known.items()}
    stop = launchers.Stop()
    with stop.on_signals(console.print):
        run(whole, wanted, console, launcher, tracker, seconds, stop)
        rows = publish(whole, console)
    good = all(row["status"] == "ok" and terminal.is_exact(row) for row in rows)
    good &= all(whole.state(cell) == "finished" for cell in wanted)
    status = INTERRUPTED if stop.no_more else 0 if good else 1
    tracker.artifacts(sorted(whole.directory.glob("*.*")))
    tracker.close("interrupted" if stop.no_more else "ok" if good else "failed")
    return status


def _leave_the_devices_alone(cells: Sequence[grid.Cell]) -> int:
    """Returns how many devices a cell needs, having turned this process to the CPU.

    Cells run in other processes, which need all of the devices' memory; what is checked here needs
    as many devices, of any kind.
    """
    needed = max(parse_mesh(c.mesh).devices if c.mesh else 1 for c in cells)
    jax.config.update("jax_platforms", "cpu")
    if needed > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", needed)
    return needed


if __name__ == "__main__":
    sys.exit(main())
