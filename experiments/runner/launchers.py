"""Launchers run cells on this machine, as SLURM jobs, or on a Ray cluster.

Each launcher takes the folders of cells and yields them as the cells end. A folder then holds a
result or a failure, or neither if the user stopped the run before or during this cell.
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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from experiments.runner import cell_process
from experiments.runner.cell_process import Limits
from experiments.schema import store
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError

POLL_S = 1.0


class Stop:
    """Counts requests to stop: the first lets running cells finish, the second stops them."""

    def __init__(self) -> None:
        self.requests = 0

    def request(self, count: int = 1) -> None:
        """Adds requests."""
        self.requests += count

    @property
    def no_more(self) -> bool:
        """Whether no further cell may start."""
        return self.requests > 0

    def now(self) -> bool:
        """Returns whether running cells must stop."""
        return self.requests > 1

    @contextlib.contextmanager
    def on_signals(self, report: Callable[[str], Any]) -> Iterator[None]:
        """Counts SIGINT as one request and SIGTERM as two; calls `report` with a message."""

        def interrupted(number: int, frame: Any) -> None:
            self.request(2 if number == signal.SIGTERM else 1)
            if self.now():
                report("stopping the running cells; finished cells are kept")
            else:
                report("no further cells start; interrupt again to stop the running cells")

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, interrupted) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Launcher(Protocol):
    """Runs cells."""

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end."""


def make(experiment: Experiment, devices: int) -> Launcher:
    """Returns the launcher of an experiment, for cells that need `devices` devices.

    Raises:
      ConfigError: a package is missing, or there are too few GPUs.
    """
    if experiment.launcher == "slurm":
        return Slurm(experiment, devices)
    if experiment.launcher == "ray":
        return Ray(experiment, devices)
    return Local(gpus(), devices, experiment.jobs)


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs visible to this process, as in CUDA_VISIBLE_DEVICES."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA ends the list at the first invalid name, such as -1
        names = [name.strip() for name in visible.split(",")]
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(i) for i in range(count)]


def gpu_memory() -> float | None:
    """Returns the bytes of the smallest NVIDIA GPU of this machine; None if it cannot be read."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    sizes = [int(line) for line in listed.stdout.split() if line.isdigit()]
    return min(sizes) * 2.0**20 if sizes else None


class Local:
    """Processes on this machine: one at a time on a CPU, or as many as its GPUs allow."""

    def __init__(self, names: Sequence[str], devices: int, jobs: int | None):
        """Raises ConfigError if there are too few devices.

        `names` are the GPUs; without them cells run on the CPU. `devices` are those of the largest
        mesh in the grid.
        """
        flag = "host_platform_device_count"
        if devices > max(1, len(names)) and flag not in os.environ.get("XLA_FLAGS", ""):
            raise ConfigError(
                f"mesh: a cell needs {devices} devices, but this machine has {len(names)} GPUs; "
                f"to try it on a CPU, set XLA_FLAGS=--xla_force_{flag}={devices}"
            )
        self.free, self.devices = collections.deque(names), devices if names else 0
        most = len(names) // devices if names else jobs or 1
        if jobs is not None and jobs > most:
            raise ConfigError(
                f"jobs={jobs} is too large: {len(names)} GPUs allow {most} concurrent cells of "
                f"{devices}: give at most {most}, or omit it"
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
                        names = [self.free.popleft() for _ in range(self.devices)]
                        variables = {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}
                        folder = waiting.popleft()
                        arguments = folder, limits, variables, stop.now
                        running[pool.submit(cell_process.run, *arguments)] = folder, names
                    if not running:
                        return
                    done, _ = concurrent.futures.wait(
                        running, POLL_S, concurrent.futures.FIRST_COMPLETED
                    )
                    for future in done:
                        folder, names = running.pop(future)
                        self.free.extend(names)
                        future.result()
                        yield folder
            finally:
                if running:  # the caller has left the loop
                    stop.request(2)


class Slurm:
    """SLURM jobs through submitit: a job array with one job per cell.

    All nodes must see the folder of results.
    """

    def __init__(self, experiment: Experiment, devices: int):
        """Raises ConfigError if submitit or SLURM is missing, or `slurm.gpus` is too small."""
        try:
            import submitit
        except ImportError as error:
            raise ConfigError("launcher=slurm needs submitit: pip install submitit") from error
        slurm = experiment.slurm
        if slurm.cluster == "slurm" and 0 < slurm.gpus < devices:
            raise ConfigError(
                f"mesh: a cell needs {devices} devices, but slurm.gpus is {slurm.gpus}: set it to "
                f"{devices}"
            )
        if slurm.cluster == "slurm" and not shutil.which("sbatch"):
            raise ConfigError(
                "launcher=slurm: this machine has no `sbatch`: run it on a SLURM login node, or "
                "try it with --slurm.cluster local"
            )
        logs = pathlib.Path(experiment.results) / experiment.name / "jobs"
        self.executor = submitit.AutoExecutor(folder=logs, cluster=slurm.cluster)
        self.executor.update_parameters(name=experiment.name, timeout_min=slurm.minutes)
        if slurm.cluster == "slurm":
            options = {
                "slurm_partition": slurm.partition or None,
                "slurm_account": slurm.account or None,
                "slurm_gpus_per_node": slurm.gpus or None,
                "slurm_cpus_per_task": slurm.cpus,
                "slurm_mem": f"{slurm.memory_gb:g}GB" if slurm.memory_gb else None,
                "slurm_array_parallelism": slurm.at_once,
                "slurm_setup": slurm.setup or None,
            }
            self.executor.update_parameters(**{k: v for k, v in options.items() if v is not None})
        self.size = sys.maxsize if slurm.cluster == "slurm" else 1  # cells of a job array

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end; a job that SLURM killed is a failure."""
        task = functools.partial(cell_process.run, limits=limits)
        waiting = [folder.resolve() for folder in folders]
        jobs: dict[Any, pathlib.Path] = {}
        try:
            while (waiting or jobs) and not stop.now():
                if stop.no_more:
                    waiting = []
                    for job in [job for job in jobs if job.state == "PENDING"]:
                        job.cancel()
                        del jobs[job]
                elif not jobs:
                    batch, waiting = waiting[: self.size], waiting[self.size :]
                    try:
                        jobs = dict(zip(self.executor.map_array(task, batch), batch))
                    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                        raise ConfigError(f"SLURM refused the jobs: {error}") from error
                for job in [job for job in jobs if job.done()]:
                    folder = jobs.pop(job)
                    if not stop.no_more:
                        _record_crash(folder, job.exception())
                    yield folder
                time.sleep(POLL_S)
        finally:
            for job in jobs:
                job.cancel()


def _record_crash(folder: pathlib.Path, error: BaseException | None) -> None:
    """Records the failure of a job without a result, such as a lost node or a cluster limit."""
    if store.state(folder) == "to do":
        message = f"{type(error).__name__}: {error}" if error else "the job ended without a result"
        store.write_failure(folder, "crash", message.splitlines()[0], message)


class Ray:
    """Tasks on a Ray cluster. All nodes must see the folder of results."""

    def __init__(self, experiment: Experiment, devices: int):
        """Connects to the cluster.

        Raises:
          ConfigError: ray is missing, the cluster does not answer, or all nodes have too few GPUs.
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
        if 0 < max(gpus, default=0) < devices:
            raise ConfigError(
                f"mesh: a cell needs {devices} GPUs, but the nodes of the cluster have at most "
                f"{max(gpus)}"
            )
        self.resources = {"num_cpus": 1} | ({"num_gpus": devices} if any(gpus) else {})
        # Without GPUs one cell per node, unless `jobs` sets more.
        most = sum(count // devices for count in gpus) if any(gpus) else len(nodes)
        self.ray, self.jobs = ray, experiment.jobs or most

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end; a task that crashed is a failure."""
        ray = self.ray
        task = ray.remote(max_retries=0, **self.resources)(cell_process.run)
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
                    try:
                        ray.get(reference)
                    except ray.exceptions.TaskCancelledError:
                        pass  # by the user: the cell stays to do
                    except ray.exceptions.RayError as error:
                        _record_crash(folder, error)
                    yield folder
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            ray.shutdown()
