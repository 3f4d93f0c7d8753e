"""The launcher in two processes: one summary, failures of one process, and resume."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from experiments.runner import multihost
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError
from tests.two_processes import environment, free_port

CONFIG = """
name: two
results: {results}
mesh: stage=2,data=2,model=2
batch: 4
new_tokens: 8
repeats: 1
agreement_tokens: 0
phases: false
candidates: 2
methods:
  - {{drafter: self, budget: 32, tree: chain:2}}
grid:
  context: [64, 96, 128]
"""
# The launcher with a cell that fails in some ranks.
FAILING = """
import sys
import jax
from experiments import launch
from experiments.runner.workload import Bench
call, fails = Bench.call, sys.argv.pop(1)
def failing(self, cell, rows=None):
    if cell.context == 96 and cell.draft == "self" and str(jax.process_index()) in fails:
        raise ZeroDivisionError("on purpose")
    return call(self, cell, rows)
Bench.call = failing
sys.exit(launch.main(sys.argv[1:]))
"""
ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def launch(tmp_path):
    """Returns a function that starts the launcher in both processes, with results in `tmp_path`."""
    path, started = tmp_path / "two.yaml", []
    path.write_text(CONFIG.format(results=tmp_path / "results"))

    def launch(
        *options: str,
        second_only: tuple[str, ...] = (),
        program: tuple[str, ...] = ("-m", "experiments.launch"),
    ) -> list[subprocess.Popen]:
        shared = (
            "--distributed",
            "--coordinator",
            f"127.0.0.1:{free_port()}",
            "--processes",
            "2",
            *options,
        )
        both = []
        for rank, extra in enumerate(((), second_only)):
            command = [sys.executable, *program, str(path), *shared, *extra]
            both.append(
                subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    stdout=(tmp_path / f"out-{rank}").open("a"),
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env=environment(),
                )
            )
        started.extend(both)
        return both

    yield launch
    for process in started:
        process.kill()
        process.wait()


def finished(results: pathlib.Path) -> list[pathlib.Path]:
    return sorted(results.glob("two/cells/*/metrics.json"))


def await_cells(results: pathlib.Path, count: int, both: list[subprocess.Popen]) -> None:
    until = time.monotonic() + 300
    while len(finished(results)) < count:
        assert time.monotonic() < until
        assert all(process.poll() is None for process in both)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_run_and_the_next_run_resumes(launch, tmp_path, lost):
    results = tmp_path / "results"
    both = launch()
    await_cells(results, 1, both)
    both[lost].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    _, output = both[1 - lost].communicate(timeout=60)
    assert time.monotonic() - begin < 60
    assert both[1 - lost].returncode, output
    kept = {path: path.stat().st_mtime_ns for path in finished(results)}
    assert 1 <= len(kept) < 3
    assert not list(results.glob("two/cells/*/failure.json"))

    again = launch()
    for process in again:
        _, output = process.communicate(timeout=300)
        assert process.returncode == 0, output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    summary = pd.read_csv(results / "two" / "summary.csv")
    assert len(summary) == 2 * len(finished(results)) == 6  # half of them of plain decoding
    assert (summary.status == "ok").all() and (summary.exact_match == 1).all()
    for path in finished(results):
        assert json.loads((path.parent / "env.json").read_text())["devices"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["01", "0", "1"])
def test_a_cell_that_fails_ends_the_run_and_the_next_run_resumes_after_it(launch, tmp_path, fails):
    results = tmp_path / "results"
    for rank, process in enumerate(launch(program=("-c", FAILING, fails))):
        _, output = process.communicate(timeout=300)
        assert process.returncode, output
        assert str(rank) != fails or "ZeroDivisionError: on purpose" in output
    failures = list(results.glob("two/cells/*/failure.json"))
    assert len(failures) == ("0" in fails)  # otherwise the cell is still to do
    assert len(finished(results)) == 1
    for process in launch():
        process.communicate(timeout=300)
        assert process.returncode == ("0" in fails)  # the failed cell is not tried again
    assert len(finished(results)) == 3 - ("0" in fails)
    for process in launch("--retry-failed"):
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert len(pd.read_csv(results / "two" / "summary.csv")) == 2 * len(finished(results)) == 6


@pytest.mark.slow
def test_generate_runs_in_two_processes_and_rank_0_prints():
    command = [sys.executable, "-m", "magicjax", "generate", "--target", "experiments/zoo/target"]
    command += ["--dtype", "float32", "--prompt", "def main(", "--max-tokens", "12"]
    command += ["--drafter", "self:streaming:64"]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    options = ("--distributed", "--mesh", "stage=2,model=4", "--processes", "2")
    options += ("--coordinator", f"127.0.0.1:{free_port()}")
    both = [
        subprocess.Popen(
            [*command, *options, "--rank", str(rank)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=200) for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert first[0].endswith(alone) and "tokens/s" in first[1]
    assert alone.strip() not in second[0] and "tokens/s" not in second[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_limit_gb": 3.0}, "memory_limit_gb: not supported with distributed"),
        (
            {"jobs": 2, "timeout_minutes": 1.0},
            "timeout_minutes, jobs: not supported with distributed",
        ),
        ({"launcher": "ray"}, "launcher: not supported with distributed"),
        ({"profile": True}, "profile: not supported with distributed"),
        ({"methods": [{"drafter": "auto"}]}, "auto depends on timings"),
        ({"worker": "0/2"}, "worker: not supported with distributed"),
        ({"rank": 7}, "JAX cannot join the processes .*: outside SLURM"),
    ],
)
def test_unsupported_settings_are_refused(changes, message):
    position = {"distributed": True, "coordinator": "localhost:9", "processes": 2, "rank": 0}
    settings = position | {"methods": [], "target": "experiments/zoo/target"} | changes
    with pytest.raises(ConfigError, match=message):
        multihost.join(Experiment(**settings))
