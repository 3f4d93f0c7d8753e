"""Runs an experiment: python -m experiments.launch experiments/configs/demo.yaml [--key value]

Expands the grid, measures each cell in a separate process, prints a table, and writes
`summary.csv`, `report.html` and a folder for each cell. Finished cells are not measured again, so
rerunning the command resumes an interrupted run.
"""

import collections
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

if __name__ == "__main__":  # Ctrl-C during the imports below, which take seconds, exits with 130
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments.report import answer, labels, page, results_folder, terminal
from experiments.runner import estimates, launchers, multihost, preflight, provenance
from experiments.runner.cell_process import Limits
from experiments.schema import columns, config, grid, store
from experiments.schema.fields import ConfigError
from experiments.schema.settings import columns_of
from magicjax.files import locked
from sharding import parse_mesh

PROG = "python -m experiments.launch"
INTERRUPTED = launchers.INTERRUPTED


class Grid:
    """The cells of an experiment, with their folders and their names in messages.

    `share` are the cells of this worker, by default all.
    `too_large` and `invalid` are the cells that cannot run, each with the reason: those that do not
    fit the memory, and those that fail the preflight check.
    """

    def __init__(self, experiment: config.Experiment):
        self.experiment = experiment
        self.directory = pathlib.Path(experiment.results) / experiment.name
        self.groups = grid.groups(experiment)
        self.cells = [cell for group in self.groups for cell in group]
        self.too_large: dict[grid.Cell, str] = {}
        self.invalid: dict[grid.Cell, str] = {}
        self.folders = {
            cell: store.cell_folder(self.directory, grid.key(cell)) for cell in self.cells
        }
        worker, workers = map(int, (experiment.worker or "0/1").split("/"))
        by_key = sorted(self.cells, key=lambda cell: self.folders[cell])  # mixes the methods
        mine = {*by_key[worker::workers]}
        self.share = [cell for cell in self.cells if cell in mine]
        self.labels = _labels(self.cells)

    def state(self, cell: grid.Cell) -> str:
        """Returns "finished", "failed" or "to do"."""
        return store.state(self.folders[cell])

    def failing(self) -> dict[grid.Cell, str]:
        """Returns the cells without a result that cannot run, with the reasons."""
        impossible = self.invalid | self.too_large
        mine = [cell for cell in self.share if cell in impossible]
        return {cell: impossible[cell] for cell in mine if self.state(cell) != "finished"}

    def pending(self) -> list[grid.Cell]:
        """Returns the cells to measure in this run, of those that can run.

        Raises:
          ConfigError: finished cells are stale and `stale` is "refuse".
        """
        settings = self.experiment
        cells = [cell for cell in self.share if cell not in self.invalid]
        if settings.fraction is not None:
            count = max(1, round(settings.fraction * len(cells)))
            cells = [cells[i * len(cells) // count] for i in range(count)]
        repeated = set(cells) if settings.fresh else self._stale(cells)
        if settings.retry_failed:
            repeated |= {cell for cell in cells if self.state(cell) == "failed"}
        selected = [c for c in cells if c in repeated or self.state(c) == "to do"]
        return [cell for cell in selected[: settings.limit] if cell not in self.too_large]

    def _stale(self, cells: Sequence[grid.Cell]) -> set[grid.Cell]:
        """Returns the finished cells to measure again because their provenance has changed."""
        if self.experiment.stale == "keep":
            return set()
        stale: dict[grid.Cell, str] = {}
        for cell in cells:
            env = store.read_json(self.folders[cell] / "env.json")
            if env is None or self.state(cell) != "finished":
                continue
            before, now = env["made_by"], provenance.of(cell)
            if changed := [name for name in now if before.get(name) != now[name]]:
                stale[cell] = ", ".join(f"{n} {before.get(n)} -> {now[n]}" for n in changed)
        if stale and self.experiment.stale == "refuse":
            first, changed_first = next(iter(stale.items()))
            raise ConfigError(
                f"{len(stale)} of {len(cells)} cells in {self.directory} were measured with other "
                f"code, versions or models ({self.labels[first]}: {changed_first}): --stale redo "
                "measures them again, --stale keep counts them as finished, another --name starts "
                "a new folder"
            )
        return set(stale)


def _labels(cells: Sequence[grid.Cell]) -> dict[grid.Cell, str]:
    """Returns the name of each cell: its size, its method, and what else differs."""
    settings = columns_of(config.Experiment).items()
    rows = {cell: {column: getattr(cell, name) for name, column in settings} for cell in cells}
    differ = [name for name in labels.group_columns([*rows.values()]) if name not in labels.SIZES]
    others = {cell: labels.describe({n: row[n] for n in differ}) for cell, row in rows.items()}
    return {cell: ", ".join(filter(None, [cell.label, others[cell]])) for cell in cells}


def run(
    sweep: Grid,
    pending: Sequence[grid.Cell],
    console: Console,
    launcher: launchers.Launcher,
    cell_estimates: dict[grid.Cell, estimates.Estimate],
    stop: launchers.Stop,
) -> None:
    """Measures the pending cells, whose earlier results are removed.

    `cell_estimates` has estimates of their time, for the progress bar.
    """
    settings = sweep.experiment
    printed: dict[grid.Cell, set[str]] = {}
    if len(pending) < len(sweep.cells):
        console.print(f"{len(pending)} of {len(sweep.cells)} cells are to do in {sweep.directory}")
    if not pending:
        return
    cells = {}
    for cell in pending:
        folder = sweep.folders[cell].resolve()
        store.write_cell(folder, grid.resolved(cell))
        if sweep.state(cell) != "to do":
            store.clear(folder)
        cells[folder] = cell
    limits = Limits(settings.memory_limit_gb, settings.timeout_minutes, settings.profile)
    total = sum(cell_estimates[cell].seconds for cell in pending)
    count = TextColumn("{task.fields[done]} of {task.fields[count]} cells")
    parts = (count, BarColumn(), TimeRemainingColumn(), TextColumn("left"))
    prints_steps = isinstance(launcher, launchers.InProcess)
    with Progress(*parts, console=console, disable=prints_steps) as progress:
        task = progress.add_task("", total=total, count=len(pending), done=0)
        for done, folder in enumerate(launcher.run(list(cells), limits, stop), 1):
            cell = cells[folder]
            progress.update(task, advance=cell_estimates[cell].seconds, done=done)
            row = results_folder.row_of(folder)
            if row is None:
                continue  # the user has stopped it
            errors = printed.setdefault(grid.plain_of(cell), set())
            _print_cell(progress.console, sweep.labels[cell], row, errors)


def _print_cell(console: Console, label: str, row: dict[str, Any], printed: set[str]) -> None:
    """Prints the result of a cell; an error in `printed`, those of its group, is not repeated."""
    if row["status"] == "ok":
        result = f"τ {row['tau']:.2f}"
        if row["speedup"] is not None:
            result = f"{row['decode_tok_s']:.0f} tokens/s, {row['speedup']:.2f}×, {result}"
        if not labels.is_exact(row):
            result += f", NOT equal to plain decoding ({row['exact_match']:.3f} of the rows)"
    elif row["error"] in printed:
        return
    else:
        printed.add(row["error"])
        result = f"{row['status']}: {row['error']}"
    console.print(f"{label}: {result}", markup=False, highlight=False)


def publish(sweep: Grid, console: Console) -> list[dict[str, Any]]:
    """Writes the summary and the report; returns the rows of the cells that have ended."""
    rows = [row for c in sweep.share if (row := results_folder.row_of(sweep.folders[c]))]
    if sweep.experiment.worker:
        console.print("run the command without --worker for the report of all workers")
    elif rows:
        console.print("writing the report")
        _report(sweep, console, rows)
    else:
        console.print("no cell has ended: nothing to report")
    if left := len(sweep.share) - len(rows):
        console.print(
            f"{left} of {len(sweep.share)} cells are still to do: rerun the command to resume"
        )
    return rows


def _report(sweep: Grid, console: Console, rows: list[dict[str, Any]]) -> None:
    """Writes and prints the results."""
    results = results_folder.read(sweep.directory, [row["key"] for row in rows])
    to_do = len(sweep.cells) - len(rows)
    rows = answer.with_intervals(results.cells)
    names = columns.names_of([cell.row for cell in results.cells])
    store.write_summary(sweep.directory, rows, names)
    page.write(results, to_do)
    for sentence in answer.sentences(rows):
        console.print(sentence, markup=False, highlight=False)
    console.print(terminal.table(rows, sweep.experiment.name, console.width))
    for line in (*terminal.LEGEND, *terminal.notes(rows)):
        console.print(line, markup=False)
    console.print(f"wrote {sweep.directory}: summary.csv, {page.PAGE}, cells/", markup=False)


def dry_run(
    sweep: Grid, console: Console, cell_estimates: dict[grid.Cell, estimates.Estimate], on_gpu: bool
) -> None:
    """Prints the cells, their state, and estimates of memory and time."""
    table = Table(title=f"{sweep.experiment.name}: {len(sweep.cells)} cells")
    for name in ("key", "cell", "state", "memory (GB)", "time (estimate)"):
        table.add_column(name, justify="right" if "(" in name else "left", no_wrap=name == "key")
    for cell in sweep.cells:
        estimate = cell_estimates[cell]
        table.add_row(
            sweep.folders[cell].name[:8],
            sweep.labels[cell],
            sweep.state(cell),
            f"{estimate.memory_gb:.2f}",
            _duration(estimate.seconds),
        )
    console.print(table)
    pending = sweep.pending()
    total = _duration(sum(cell_estimates[cell].seconds for cell in pending))
    _print_failing(sweep, console)
    processor = "on GPUs" if on_gpu else "on this CPU"
    console.print(f"{len(pending)} cells to run, about {total} if run one at a time {processor}")


def _print_failing(sweep: Grid, console: Console) -> None:
    """Prints the cells that cannot run, and each reason once."""
    cells = collections.defaultdict(list)
    for cell, problem in sweep.failing().items():
        cells[problem].append(sweep.labels[cell])
    for problem, names in cells.items():
        console.print(f"{'; '.join(names)} cannot run: {problem}", markup=False)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _console() -> Console:
    """Returns a console that prints eagle:eagle:512 as it is, not as an emoji."""
    console = Console(emoji=False)
    return console if console.is_terminal else Console(width=140, emoji=False)  # for log files


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status.

    0; 1 if a cell failed or is not exact; 2 for invalid settings; 130 if the user stopped the run.
    `arguments` are by default those of the process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return reported(lambda: run_experiment(config.from_command_line(words, PROG)))


def reported(command: Callable[[], int]) -> int:
    """Returns the exit status of a command, after printing why it ended early."""
    try:
        return command()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished cells are kept: rerun the command to resume", file=sys.stderr)
        return INTERRUPTED


def run_experiment(
    experiment: config.Experiment, launcher: launchers.InProcess | None = None
) -> int:
    """Returns the exit status of an experiment; `launcher` replaces the experiment's.

    Raises:
      ConfigError: settings that cannot be run.
    """
    console = _console()
    if not experiment.distributed:
        return _launch(experiment, console, launcher)
    multihost.join(experiment)
    if jax.process_index() > 0:
        return multihost.follow()
    leader = multihost.Leader()
    return multihost.lead(leader, lambda: _launch(experiment, console, leader))


def _launch(
    experiment: config.Experiment,
    console: Console,
    launcher: launchers.InProcess | None = None,
) -> int:
    """Returns the exit status of an experiment; `launcher` replaces the experiment's."""
    sweep = Grid(experiment)
    store.check_folder(sweep.directory, {folder.name for folder in sweep.folders.values()})
    on_gpu = bool(launchers.gpus())
    in_process = launcher is not None or experiment.launcher == "in_process"
    devices = 0 if in_process else _use_only_cpu(sweep.cells)
    record = experiment.impossible == "record"
    sweep.invalid = preflight.model_problems(sweep.groups, record)
    sweep.too_large = _too_large(sweep, on_gpu and not in_process)
    failing = sweep.invalid.keys() | sweep.too_large
    left = [[c for c in group if c not in failing] for group in sweep.groups]
    sweep.invalid |= preflight.cell_problems([*filter(None, left)], record)
    cell_estimates = {
        cell: estimates.of(cell, on_gpu, chooses=cell is group[0])
        for group in sweep.groups
        for cell in group
        if cell not in sweep.invalid
    }
    cell_estimates |= dict.fromkeys(sweep.invalid, estimates.Estimate(0.0, 0.0))
    if experiment.dry_run:
        dry_run(sweep, console, cell_estimates, on_gpu)
        return 0
    shared = bool(experiment.worker)
    with locked(sweep.directory / ".lock", wait=False, shared=shared) as acquired:
        if not acquired:
            raise ConfigError(
                f"{sweep.directory} is in use by another launcher: wait for it, or give another "
                "--name"
            )
        used = launcher or launchers.make(experiment, devices)
        return _measure(sweep, console, used, cell_estimates)


def _too_large(sweep: Grid, gpu_processes: bool) -> dict[grid.Cell, str]:
    """Returns the cells to measure that do not fit this machine's memory, with the reasons.

    Cells that run on other machines are refused there. With `gpu_processes`, cells run in processes
    that have the GPUs.

    Raises:
      ConfigError: no cell fits, or some do not and `impossible` is "refuse"; not in a dry run.
    """
    available = launchers.gpu_memory() if gpu_processes else None
    if sweep.experiment.launcher != "local" or (gpu_processes and available is None):
        return {}
    pending = sweep.pending()
    too_large = preflight.too_large(pending, available)
    refused = sweep.experiment.impossible == "refuse" or len(too_large) == len(pending)
    if too_large and refused and not sweep.experiment.dry_run:
        lines = [f"{sweep.labels[cell]}: {problem}" for cell, problem in too_large.items()]
        raise ConfigError("\n".join(lines))
    return too_large


def _measure(
    sweep: Grid,
    console: Console,
    launcher: launchers.Launcher,
    cell_estimates: dict[grid.Cell, estimates.Estimate],
) -> int:
    """Returns the exit status of a run that holds the folder's lock."""
    pending = sweep.pending()  # refuses stale cells before anything is written
    if not sweep.experiment.worker:  # else others may be writing
        store.remove_partials(sweep.directory)
    hidden = {*multihost.SETTINGS, "worker"}
    settings = sweep.experiment.model_dump(mode="json", exclude_unset=True, exclude=hidden)
    store.write_experiment(sweep.directory, settings)
    for cell, problem in sweep.failing().items():
        store.write_cell(sweep.folders[cell], grid.resolved(cell))
        kind = "memory" if cell in sweep.too_large else "config"
        store.write_failure(sweep.folders[cell], kind, problem)
    _print_failing(sweep, console)
    stop = launchers.Stop()
    with stop.on_signals(console.print):
        run(sweep, pending, console, launcher, cell_estimates, stop)
        rows = publish(sweep, console)
    passed = all(row["status"] == "ok" and labels.is_exact(row) for row in rows)
    passed &= all(sweep.state(cell) == "finished" for cell in pending)
    return INTERRUPTED if stop.no_more else 0 if passed else 1


def _use_only_cpu(cells: Sequence[grid.Cell]) -> int:
    """Restricts this process to the CPU; returns how many devices a cell needs.

    Cells run in other processes, which need all memory of the accelerators. The preflight check
    needs the same number of devices, of any kind.
    """
    needed = max(parse_mesh(c.mesh).devices if c.mesh else 1 for c in cells)
    jax.config.update("jax_platforms", "cpu")
    if needed > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", needed)
    return needed


def end(status: int) -> NoReturn:
    """Exits; if the user stopped the run, without waiting for a cell in one of the threads."""
    if status != INTERRUPTED:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end(main())
