"""Where cells run: on this machine, as SLURM jobs, or on a Ray cluster.

Each launcher takes the cells' folders and yields them as they end. A folder then holds a result or
a failure; neither if the user asked for the end before it was begun, or while it ran.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from experiments.runner import cell_process
from experiments.runner.cell_process import Limits
from experiments.schema import store
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError

POLL_S = 1.0


class Stop:
    """What Ctrl-C asks for: at first that nothing new begins, then that what runs ends.

    Attributes:
      asked: how often it was pressed.
    """

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, times: int = 1) -> None:
        """Asks for the end."""
        self.asked += times

    @property
    def no_more(self) -> bool:
        return self.asked > 0

    def now(self) -> bool:
        """Returns whether running cells are to end."""
        return self.asked > 1

    @contextlib.contextmanager
    def on_signals(self, tell: Any) -> Iterator[None]:
        """Lets SIGINT ask once each time, and SIGTERM at once for the end; `tell` prints a line."""

        def interrupted(number: int, frame: Any) -> None:
            self.ask(2 if number == signal.SIGTERM else 1)
            if self.now():
                tell("ending what runs; finished cells are kept")
            else:
                tell("no more cells are begun; once more ends those that run")

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, interrupted) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Launcher(Protocol):
    """Runs cells somewhere."""

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end."""


def make(experiment: Experiment, devices: int) -> Launcher:
    """Returns the launcher that an experiment asks for.

    Args:
      experiment: its settings.
      devices: that a cell needs.

    Raises:
      ConfigError: a package is missing, or this machine has too few GPUs.
    """
    if experiment.launcher == "slurm":
        return Slurm(experiment, devices)
    if experiment.launcher == "ray":
        return Ray(experiment, devices)
    return Local(gpus(), devices, experiment.jobs)


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA ends the list at the first name of none, such as -1
        names = [name.strip() for name in visible.split(",")]
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(i) for i in range(count)]


class Local:
    """Processes on this machine: one after the other, or as many as there are GPUs for."""

    def __init__(self, names: Sequence[str], devices: int, jobs: int | None):
        """Makes a launcher.

        Args:
          names: of the GPUs; none: cells run on the CPU.
          devices: that each cell gets: as many as the largest mesh of the grid has.
          jobs: cells at once; None: as many as there are GPUs for, and one on a CPU.

        Raises:
          ConfigError: there are fewer devices than that needs.
        """
        flag = "host_platform_device_count"
        if devices > max(1, len(names)) and flag not in os.environ.get("XLA_FLAGS", ""):
            raise ConfigError(
                f"mesh: a cell needs {devices} devices, and this machine has {len(names)} GPUs; "
                f"on a CPU it can be tried with XLA_FLAGS=--xla_force_{flag}={devices}"
            )
        self.free, self.devices = collections.deque(names), devices if names else 0
        most = len(names) // devices if names else jobs or 1
        if jobs is not None and jobs > most:
            raise ConfigError(
                f"jobs={jobs}: {len(names)} GPUs are enough for {most} cells of {devices} at once: "
                f"set jobs to at most {most}, or leave it out"
            )
        self.jobs = jobs or most

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end."""
        waiting = collections.deque(folders)
        running: dict[concurrent.futures.Future, tuple[pathlib.Path, list[str]]] = {}
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < self.jobs and not stop.no_more:
                        taken = [self.free.popleft() for _ in range(self.devices)]
                        seen = {"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {}
                        folder = waiting.popleft()
                        begun = pool.submit(cell_process.run, folder, limits, seen, stop.now)
                        running[begun] = folder, taken
                    if not running:
                        return
                    done, _ = concurrent.futures.wait(
                        running, POLL_S, concurrent.futures.FIRST_COMPLETED
                    )
                    for future in done:
                        folder, taken = running.pop(future)
                        self.free.extend(taken)
                        future.result()
                        yield folder
            finally:
                if running:  # the caller has left: what runs ends, and nothing is lost but that
                    stop.ask(2)


class Slurm:
    """SLURM jobs, through submitit: an array of one job for each cell.

    The folder of results must be seen by all nodes.
    """

    def __init__(self, experiment: Experiment, devices: int):
        """Makes a launcher; raises ConfigError without submitit, without SLURM, or GPUs enough."""
        try:
            import submitit
        except ImportError as error:
            raise ConfigError("launcher=slurm needs submitit: pip install submitit") from error
        slurm = experiment.slurm
        if slurm.cluster == "slurm" and 0 < slurm.gpus < devices:
            raise ConfigError(
                f"mesh: a cell needs {devices} devices, and slurm.gpus is {slurm.gpus}: set it to "
                f"{devices}"
            )
        if slurm.cluster == "slurm" and not shutil.which("sbatch"):
            raise ConfigError(
                "launcher=slurm: this machine has no `sbatch`: start it where SLURM is, or try it "
                "with --slurm.cluster local"
            )
        logs = pathlib.Path(experiment.results) / experiment.name / "jobs"
        self.executor = submitit.AutoExecutor(folder=logs, cluster=slurm.cluster)
        self.executor.update_parameters(name=experiment.name, timeout_min=slurm.minutes)
        if slurm.cluster == "slurm":
            asked = {
                "slurm_partition": slurm.partition or None,
                "slurm_account": slurm.account or None,
                "slurm_gpus_per_node": slurm.gpus or None,
                "slurm_cpus_per_task": slurm.cpus,
                "slurm_mem": f"{slurm.memory_gb:g}GB" if slurm.memory_gb else None,
                "slurm_array_parallelism": slurm.at_once,
                "slurm_setup": slurm.setup or None,
            }
            self.executor.update_parameters(**{k: v for k, v in asked.items() if v is not None})
        self.at_once = slurm.at_once if slurm.cluster == "slurm" else 1

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end; a job that SLURM ended is a failure."""
        waiting = collections.deque(folder.resolve() for folder in folders)
        jobs: dict[Any, pathlib.Path] = {}
        try:
            while waiting or jobs:
                if not stop.no_more and waiting and (self._all_at_once or not jobs):
                    some = [
                        waiting.popleft() for _ in range(len(waiting) if self._all_at_once else 1)
                    ]
                    jobs |= dict(zip(self._submit(some, limits), some))
                if stop.no_more:
                    for job in [job for job in jobs if job.state == "PENDING"]:
                        job.cancel()
                        del jobs[job]
                if not jobs or stop.now():
                    return
                for job in [job for job in jobs if job.done()]:
                    folder = jobs.pop(job)
                    if not stop.no_more:
                        _check_job(folder, job)
                    yield folder
                time.sleep(POLL_S)
        finally:
            for job in jobs:
                job.cancel()

    def _submit(self, folders: Sequence[pathlib.Path], limits: Limits) -> list[Any]:
        """Returns the jobs of the folders; raises ConfigError if SLURM refuses them."""
        task = functools.partial(cell_process.run, limits=limits)
        try:
            return self.executor.map_array(task, folders)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"SLURM refused the jobs: {error}") from error

    @property
    def _all_at_once(self) -> bool:
        return self.at_once > 1


def _check_job(folder: pathlib.Path, job: Any) -> None:
    """Records a job that ended without a result: a node that died, a limit of the cluster."""
    if (folder / store.METRICS).exists() or (folder / store.FAILURE).exists():
        return
    error = job.exception()
    said = f"{type(error).__name__}: {error}" if error else "the job left no result"
    store.write_failure(folder, "crash", said.splitlines()[0], said)


class Ray:
    """Tasks on a Ray cluster. The folder of results must be seen by all nodes."""

    def __init__(self, experiment: Experiment, devices: int):
        """Makes a launcher, connected to the cluster.

        Raises:
          ConfigError: ray is missing, the cluster does not answer, or no node has GPUs enough.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigError("launcher=ray needs ray: pip install ray") from error
        address = experiment.ray_address or None
        try:
            ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:  # ConnectionError is an OSError
            raise ConfigError(f"ray_address={experiment.ray_address!r}: {error}") from error
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = [int(node.get("GPU", 0)) for node in nodes]
        if any(gpus):
            if max(gpus) < devices:
                raise ConfigError(
                    f"mesh: a cell needs {devices} GPUs, and no node of the cluster has more than "
                    f"{max(gpus)}"
                )
            self.needs = {"num_gpus": devices, "num_cpus": 1}
            most = sum(count // devices for count in gpus)
        else:  # a cell takes a CPU for itself, unless more are asked for
            most = len(nodes)
            self.needs = {"num_cpus": 1}
        self.ray, self.jobs = ray, experiment.jobs or most

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end; a task that died is a failure."""
        ray = self.ray
        task = ray.remote(max_retries=0, **self.needs)(cell_process.run)
        waiting = collections.deque(folder.resolve() for folder in folders)
        running: dict[Any, pathlib.Path] = {}
        try:
            while (waiting or running) and not stop.now():
                while waiting and len(running) < self.jobs and not stop.no_more:
                    folder = waiting.popleft()
                    running[task.remote(folder, limits)] = folder
                if not running:
                    return
                done, _ = ray.wait(list(running), timeout=POLL_S)
                for reference in done:
                    folder = running.pop(reference)
                    _check_task(ray, folder, reference)
                    yield folder
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            ray.shutdown()


def _check_task(ray: Any, folder: pathlib.Path, reference: Any) -> None:
    """Records a task that ended without a result, unless the user has taken it back."""
    try:
        ray.get(reference)
    except ray.exceptions.TaskCancelledError:
        return
    except ray.exceptions.RayError as error:
        if not ((folder / store.METRICS).exists() or (folder / store.FAILURE).exists()):
            store.write_failure(folder, "crash", str(error).splitlines()[0], str(error))
