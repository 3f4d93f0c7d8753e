"""Runs a cell's process and watches it: what it dies of is the cell's result.

This function is what SLURM's and Ray's jobs run too, so a cell is the same wherever it runs.
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
ASKED = (signal.SIGTERM, signal.SIGINT)  # somebody, or the cluster, ended it: it is still to do
WORKER = (sys.executable, "-m", "experiments.runner.worker")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a cell may take, and what is kept of it.

    Attributes:
      memory_gb: main memory of its process; None: no limit.
      minutes: None: no limit.
      profile: whether a trace is kept.
    """

    memory_gb: float | None = None
    minutes: float | None = None
    profile: bool = False


def run(
    folder: pathlib.Path,
    limits: Limits = Limits(),
    environment: dict[str, str] | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Measures a cell that is not finished in a process of its own.

    Afterwards its folder holds a result or a failure; neither where somebody ended it.

    Args:
      folder: the cell's, with its `config.yaml`.
      limits: beyond which it is ended, which is a failure.
      environment: variables beside this process's own.
      ended: whether the user has asked for the end.
    """
    command = [*WORKER, str(folder.resolve())]
    command += ["--profile"] if limits.profile else []
    with (folder / "worker.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closes when this process dies, and the worker with it
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | programs() | (environment or {}),
            start_new_session=True,  # Ctrl-C is for the launcher, which ends its workers in order
        )
        try:
            failure = _watch(process, limits, ended)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
    done = (folder / store.METRICS).exists() or (folder / store.FAILURE).exists()
    if done or ended() or (failure is None and -process.returncode in ASKED):
        return
    kind, error = failure or ("crash", _death(process.returncode))
    trace = (folder / "worker.log").read_text(errors="replace")[-20_000:]
    store.write_failure(folder, kind, error, trace)


def _watch(
    process: subprocess.Popen, limits: Limits, ended: Callable[[], bool]
) -> tuple[str, str] | None:
    """Returns (kind, error) if the process took too much; None: it has ended, or shall end."""
    started, watched = time.monotonic(), psutil.Process(process.pid)
    while process.poll() is None and not ended():
        if limits.minutes and time.monotonic() - started > 60 * limits.minutes:
            return "timeout", f"ended after {limits.minutes:g} minutes (timeout_minutes)"
        taken = _memory(watched) / 1e9
        if limits.memory_gb and taken > limits.memory_gb:
            return "memory", (
                f"out of memory: the process held {taken:.2f} GB, and memory_limit_gb is "
                f"{limits.memory_gb:g}"
            )
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    return None


def _memory(process: psutil.Process) -> int:
    """Returns the bytes a process holds, 0 of one that has ended."""
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def _death(status: int) -> str:
    """Returns what an exit status says of a process that left no result."""
    if status >= 0:
        return f"the process ended with status {status} and left no result"
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-status, f"signal {-status}")
    hint = ", as systems do that have run out of memory" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}"


def programs() -> dict[str, str]:
    """Returns the environment in which processes share what they have compiled.

    One folder for each kind of machine: a program for one CPU need not run on another.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    folder = pathlib.Path.home() / ".cache" / "magicjax" / "programs" / store.digest(_processor())
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


def _processor() -> str:
    """Returns what tells machines apart whose compiled programs differ."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else [os.uname().machine]
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
