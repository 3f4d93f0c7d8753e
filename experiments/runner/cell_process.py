"""Runs and monitors the process of a cell; a crash is recorded as the cell's failure.

Ray tasks call the same function as the local launcher.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from experiments.schema import store

POLL_S = 0.2
STOPPED = (signal.SIGTERM, signal.SIGINT)  # by a user or the cluster: the cell stays to do
WORKER = (sys.executable, "-m", "experiments.runner.worker")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a cell's process.

    Attributes:
      memory_gb: main memory; None for no limit.
      minutes: running time; None for no limit.
      profile: whether the process writes a trace.
    """

    memory_gb: float | None = None
    minutes: float | None = None
    profile: bool = False


def run(
    folder: pathlib.Path,
    limits: Limits = Limits(),
    environment: dict[str, str] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Measures an unfinished cell in a new process.

    Afterwards the folder holds a result or a failure, or neither if the cell was stopped: by the
    cluster, or when `stopped` returns true. A process beyond its limits is killed, which is a
    failure. `environment` is added to that of this process.
    """
    command = [*WORKER, str(folder.resolve())]
    command += ["--profile"] if limits.profile else []
    with (folder / "worker.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closes when this process ends; the worker then exits
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            start_new_session=True,  # the launcher handles Ctrl-C
        )
        try:
            failure = _watch(process, limits, stopped)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
    by_user = stopped() or (failure is None and -process.returncode in STOPPED)
    if by_user or store.state(folder) != "to do":
        return
    kind, error = failure or ("crash", _exit_reason(process.returncode))
    trace = (folder / "worker.log").read_text(errors="replace")[-20_000:]
    store.write_failure(folder, kind, error, trace)


def _watch(
    process: subprocess.Popen, limits: Limits, stopped: Callable[[], bool]
) -> tuple[str, str] | None:
    """Returns kind and error when the process exceeds a limit, None when it ends or is stopped."""
    started, watched = time.monotonic(), psutil.Process(process.pid)
    while process.poll() is None and not stopped():
        if limits.minutes and time.monotonic() - started > 60 * limits.minutes:
            return "timeout", f"killed after timeout_minutes={limits.minutes:g}"
        used_gb = _memory(watched) / 1e9
        if limits.memory_gb and used_gb > limits.memory_gb:
            limit = f"memory_limit_gb={limits.memory_gb:g}"
            return "memory", f"out of memory: the process used {used_gb:.2f} GB, more than {limit}"
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    return None


def _memory(process: psutil.Process) -> int:
    """Returns the resident bytes of a process, 0 if it has ended."""
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def _exit_reason(status: int) -> str:
    """Returns why a process without a result ended."""
    if status >= 0:
        return f"the process exited with status {status} without a result"
    names = {number.value: number.name for number in signal.Signals}
    name = names.get(-status, f"signal {-status}")
    hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}"
