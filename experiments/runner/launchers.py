"""Launchers run cells in processes of this machine, in this process, or on a Ray cluster.

Each launcher takes the folders of cells and yields them as the cells end. A folder then holds a
result or a failure, or neither if the user stopped the run before or during this cell.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from experiments.runner import cell_process, worker
from experiments.runner.cell_process import Limits
from experiments.runner.workload import Bench
from experiments.schema import store
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError

POLL_S = 1.0
INTERRUPTED = 130  # exit status


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
    if experiment.launcher == "ray":
        return Ray(devices)
    if experiment.launcher == "in_process":
        return InProcess()
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


class InProcess:
    """The launcher's process: cells share models, prompts and programs, and have no limits.

    Cells run in a thread, because Python handles signals between two instructions of the main
    thread only, and a program compiles or runs for longer.

    Attributes:
      ends_at_failure: whether no cell runs after one that failed.
      left_running: whether the user has stopped a cell: its thread runs up to its next step.
    """

    ends_at_failure = False

    def __init__(self, make_bench: Callable[[pathlib.Path], Bench] = Bench):
        """`make_bench` is called once, with the folder of chosen prompts."""
        self.make_bench, self.left_running = make_bench, False

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end."""
        bench = self.make_bench(folders[0].parent.parent / "prompts") if folders else None
        for number, folder in enumerate(folders, 1):
            if bench is None or stop.no_more:
                return
            bench.steps(f"cell {number} of {len(folders)}")
            measured = self.start(folder, bench, limits)
            while not measured.done():
                if stop.now():
                    self.left_running = bench.steps.stopped = True
                    return
                concurrent.futures.wait([measured], POLL_S)
                bench.steps.tick()
            succeeded = measured.result()
            yield folder
            if self.ends_at_failure and not succeeded:
                return

    def start(
        self, folder: pathlib.Path, bench: Bench, limits: Limits
    ) -> concurrent.futures.Future[bool]:
        """Starts `measure` in a thread, which does not keep the process alive."""
        future: concurrent.futures.Future[bool] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(self.measure(folder, bench, limits))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def measure(self, folder: pathlib.Path, bench: Bench, limits: Limits) -> bool:
        """Measures a cell; returns whether it succeeded."""
        return worker.measure_cell(folder, bench, limits.profile)


class Ray:
    """Tasks on a Ray cluster, which queues them and moves them off lost nodes.

    A cell has as many GPUs as its mesh, or a whole node of a cluster without GPUs. All nodes have
    magicjax installed and see the folder of results at the same path.
    """

    def __init__(self, devices: int):
        """Connects to the cluster of $RAY_ADDRESS or of this machine, or starts one here.

        Raises:
          ConfigError: ray is missing, the cluster does not answer, or all nodes have too few GPUs.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigError("launcher=ray needs ray: pip install 'magicjax[ray]'") from error
        try:
            ray.init(ignore_reinit_error=True, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:  # ConnectionError is an OSError
            raise ConfigError(f"launcher=ray: {error}") from error
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(max(node.get("GPU", 0) for node in nodes))
        if 0 < gpus < devices:
            raise ConfigError(
                f"mesh: a cell needs {devices} GPUs, but the nodes of the cluster have at most "
                f"{gpus}"
            )
        cpus = min(node["CPU"] for node in nodes if "CPU" in node)
        self.resources = {"num_gpus": devices} if gpus else {"num_cpus": cpus}
        self.ray = ray

    def run(
        self, folders: Sequence[pathlib.Path], limits: Limits, stop: Stop
    ) -> Iterator[pathlib.Path]:
        """Yields the folders as their cells end; a cell lost with its node thrice is a failure.

        Raises:
          ConfigError: the cluster is lost, or a node cannot run cells.
        """
        ray = self.ray
        errors = ray.exceptions
        lost = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)
        task = ray.remote(max_retries=2, **self.resources)(cell_process.run)
        running = {task.remote(folder.resolve(), limits): folder for folder in folders}
        try:
            while running and not stop.no_more:
                done, _ = ray.wait(list(running), timeout=POLL_S)
                for reference in done:
                    folder = running.pop(reference)
                    try:
                        ray.get(reference)
                    except lost as error:
                        message = f"{type(error).__name__}: {error}"
                        store.write_failure(folder, "crash", message.splitlines()[0], message)
                    except errors.RayError as error:
                        raise ConfigError(f"launcher=ray: {error}") from error
                    yield folder
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            ray.shutdown()
