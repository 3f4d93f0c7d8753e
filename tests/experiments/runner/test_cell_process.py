"""However the process of a cell ends, the cell has a result or a failure."""

import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from experiments.runner import cell_process
from experiments.runner.cell_process import Limits
from experiments.schema import store

UNLIMITED = Limits()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs a script as the worker and returns its failure, if any."""

    def run(script, limits=UNLIMITED, stopped=lambda: False):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        monkeypatch.setattr(cell_process, "WORKER", (sys.executable, str(path)))
        folder = tmp_path / "cell"
        store.write_cell(folder, {})
        store.clear(folder)
        cell_process.run(folder, limits, stopped=stopped)
        return store.read_json(folder / store.FAILURE)

    return run


@pytest.mark.parametrize("number", [15, 2])
def test_a_terminated_cell_is_still_to_do(run, tmp_path, number):
    default = f"signal.signal({number}, signal.SIG_DFL)"  # background jobs ignore Ctrl-C
    assert run(f"import os, signal; {default}; os.kill(os.getpid(), {number})") is None
    assert not (tmp_path / "cell" / store.METRICS).exists()


def test_the_failure_of_a_killed_process_names_the_signal(run):
    failure = run("import os; print('before the end', flush=True); os.kill(os.getpid(), 11)")
    assert (failure["kind"], failure["error"]) == ("crash", "the process was killed by SIGSEGV")
    assert "before the end" in failure["trace"]
    assert "run out of memory" in run("import os; os.kill(os.getpid(), 9)")["error"]


def test_a_process_above_the_memory_limit_is_killed(run):
    started = time.monotonic()
    script = "import time; kept = b'x' * 400_000_000; time.sleep(60)"
    failure = run(script, Limits(memory_gb=0.2))
    assert failure["kind"] == "memory" and "more than memory_limit_gb=0.2" in failure["error"]
    assert time.monotonic() - started < 30


def test_a_process_above_the_time_limit_is_killed(run):
    failure = run("import time; time.sleep(60)", Limits(minutes=0.01))
    assert failure["kind"] == "timeout"
    assert failure["error"] == "killed after timeout_minutes=0.01"


def test_a_cell_that_the_user_stopped_has_neither_result_nor_failure(run, tmp_path):
    assert run("import time; time.sleep(60)", stopped=lambda: True) is None
    assert {path.name for path in (tmp_path / "cell").iterdir()} == {"config.yaml", "worker.log"}


@pytest.mark.slow
def test_a_worker_exits_with_its_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from experiments.runner.worker import watch_parent\n"
        "watch_parent()\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(120)\n"
    )
    code = (
        "import pathlib, sys\n"
        "from experiments.runner import cell_process\n"
        "from experiments.schema import store\n"
        f"cell_process.WORKER = (sys.executable, {str(script)!r})\n"
        f"folder = pathlib.Path({str(tmp_path / 'cell')!r})\n"
        "store.write_cell(folder, {}); cell_process.run(folder)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _until(lambda: not psutil.pid_exists(pid))


def _until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("timeout")
