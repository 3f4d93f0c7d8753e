"""A cell's process may die of anything: the cell then has a failure, and nothing else has."""

import json
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from experiments.runner import cell_process, worker
from experiments.runner.cell_process import Limits
from experiments.schema import store

FREE = Limits()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script in a worker's place, and returns the failure it left; None: a result."""

    def run(script, limits=FREE, ended=lambda: False):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        monkeypatch.setattr(cell_process, "WORKER", (sys.executable, str(path)))
        folder = tmp_path / "cell"
        store.write_cell(folder, {})
        store.clear(folder)
        cell_process.run(folder, limits, ended=ended)
        return store.read_json(folder / store.FAILURE)

    return run


RESULT = """
import pathlib, sys
pathlib.Path(sys.argv[1], "metrics.json").write_text('{"row": {}}')
"""


def test_a_process_that_leaves_a_result_has_no_failure(run, tmp_path):
    assert run(RESULT) is None
    assert (tmp_path / "cell" / store.METRICS).exists()


def test_a_process_that_leaves_nothing_says_with_which_status(run):
    assert run("raise SystemExit(7)")["error"] == (
        "the process ended with status 7 and left no result"
    )


@pytest.mark.parametrize("number", [15, 2])
def test_a_cell_that_somebody_ended_is_still_to_do(run, tmp_path, number):
    heard = f"signal.signal({number}, signal.SIG_DFL)"  # a shell's background job ignores Ctrl-C
    assert run(f"import os, signal; {heard}; os.kill(os.getpid(), {number})") is None
    assert not (tmp_path / "cell" / store.METRICS).exists()


def test_a_process_that_was_killed_says_by_what(run):
    found = run("import os; print('before the end', flush=True); os.kill(os.getpid(), 11)")
    assert (found["kind"], found["error"]) == ("crash", "the process was killed by SIGSEGV")
    assert "before the end" in found["trace"]
    assert "run out of memory" in run("import os; os.kill(os.getpid(), 9)")["error"]


def test_a_process_that_takes_too_much_memory_is_ended(run):
    started = time.monotonic()
    found = run("import time; kept = b'x' * 400_000_000; time.sleep(60)", Limits(memory_gb=0.2))
    assert found["kind"] == "memory" and "memory_limit_gb is 0.2" in found["error"]
    assert time.monotonic() - started < 30


def test_a_process_that_takes_too_long_is_ended(run):
    found = run("import time; time.sleep(60)", Limits(minutes=0.01))
    assert (found["kind"], found["error"]) == (
        "timeout",
        "ended after 0.01 minutes (timeout_minutes)",
    )


def test_a_cell_that_the_user_ended_has_neither_result_nor_failure(run, tmp_path):
    assert run("import time; time.sleep(60)", ended=lambda: True) is None
    assert {path.name for path in (tmp_path / "cell").iterdir()} == {"config.yaml", "worker.log"}


def test_a_worker_ends_with_the_process_that_started_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from experiments.runner.worker import watch_parent\n"
        "watch_parent()\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(120)\n"
    )
    code = (
        "import pathlib, sys; from experiments.runner import cell_process\n"
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


def _until(holds):
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    pytest.fail("it did not come")


def test_errors_of_too_little_memory_are_told_from_others():
    assert worker.kind_of(MemoryError("no")) == "memory"
    assert worker.kind_of(RuntimeError("RESOURCE_EXHAUSTED: Out of memory")) == "memory"
    assert worker.kind_of(ValueError("budget")) == "error"


def test_programs_are_shared_where_the_user_says_or_by_kind_of_machine(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    mine = cell_process.programs()["JAX_COMPILATION_CACHE_DIR"]
    monkeypatch.setattr(cell_process, "_processor", lambda: "another")
    assert cell_process.programs()["JAX_COMPILATION_CACHE_DIR"] != mine
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    assert not cell_process.programs()


def test_a_worker_does_not_measure_a_finished_cell_a_second_time(tmp_path):
    folder = tmp_path / "cell"
    store.write_cell(folder, {})
    store.write_json(folder / store.METRICS, {"row": {}})
    command = [sys.executable, "-m", "experiments.runner.worker", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait() == 0
    assert json.loads((folder / store.METRICS).read_text()) == {"row": {}}
