"""The launcher in two processes: one summary, one that writes, and nothing lost with a process."""

import json
import os
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
from sharding.processes import LOST
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
  - {{draft: self, kv_budget: 32, tree: chain:2}}
grid:
  context: [64, 96, 128]
"""
# The launcher, with a cell that fails in some ranks.
FAILING = """
import sys
import jax
from experiments import bench, launch
run, fails = bench.Bench.run, sys.argv.pop(1)
def failing(self, cell, rows=None):
    if cell.context == 96 and cell.draft == "self" and str(jax.process_index()) in fails:
        raise ZeroDivisionError("told")
    return run(self, cell, rows)
bench.Bench.run = failing
sys.exit(launch.main(sys.argv[1:]))
"""
ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def launch(tmp_path):
    """Returns what starts the launcher in both processes, whose results lie in `tmp_path`."""
    path, started = tmp_path / "two.yaml", []
    path.write_text(CONFIG.format(results=tmp_path / "results"))

    def launch(
        *options: str,
        of_second: tuple[str, ...] = (),
        program: tuple[str, ...] = ("-m", "experiments.launch"),
    ) -> list[subprocess.Popen]:
        shared = ("--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", *options)
        both = []
        for rank, own in enumerate(((), of_second)):
            command = [sys.executable, *program, str(path), *shared, *own]
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
def test_a_killed_process_ends_the_run_and_the_next_one_goes_on(launch, tmp_path, lost):
    results = tmp_path / "results"
    both = launch()
    await_cells(results, 2, both)
    both[lost].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    _, said = both[1 - lost].communicate(timeout=60)
    assert time.monotonic() - begin < 60
    assert both[1 - lost].returncode == LOST
    assert f"rank {1 - lost} of 2: rank {lost} was lost" in said
    kept = {path: path.stat().st_mtime_ns for path in finished(results)}
    assert 2 <= len(kept) < 6
    assert not list(results.glob("two/cells/*/failure.json"))  # none is blamed for it

    again = launch()
    for process in again:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    summary = pd.read_csv(results / "two" / "summary.csv")
    assert len(summary) == len(finished(results)) == 6
    assert (summary.status == "ok").all() and (summary.exact_match == 1).all()
    for path in finished(results):
        assert json.loads((path.parent / "env.json").read_text())["devices"] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "statuses"), [("01", (1, 1)), ("0", (1, LOST)), ("1", (LOST, 1))]
)
def test_a_cell_that_fails_ends_the_run_and_the_next_goes_on_behind_it(
    launch, tmp_path, fails, statuses
):
    results = tmp_path / "results"
    for rank, process in enumerate(launch(program=("-c", FAILING, fails))):
        _, said = process.communicate(timeout=300)
        assert process.returncode == statuses[rank], said
        assert "stack trace" not in said
        assert str(rank) not in fails or "ZeroDivisionError: told" in said
    failures = list(results.glob("two/cells/*/failure.json"))
    assert len(failures) == ("0" in fails)  # what rank 0 does not see is to do
    assert len(finished(results)) == 3
    for process in launch():
        process.communicate(timeout=300)
        assert process.returncode == ("0" in fails)  # the failed cell is not tried again
    assert len(finished(results)) == 6 - ("0" in fails)
    for process in launch("--retry-failed"):
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert len(pd.read_csv(results / "two" / "summary.csv")) == len(finished(results)) == 6


@pytest.mark.slow
def test_the_command_generates_in_two_processes_and_rank_0_prints():
    command = [sys.executable, "-m", "magicjax", "generate", "--target", "experiments/zoo/target"]
    command += ["--prompt", "def main(", "--max-new-tokens", "12", "--drafter", "self:streaming:64"]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    together = ("--mesh", "stage=2,model=4", "--processes", "2")
    where = ("--coordinator", f"127.0.0.1:{free_port()}", *together)
    both = [
        subprocess.Popen(
            [*command, *where, "--rank", str(rank)],
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


@pytest.mark.slow
def test_rows_across_processes_are_traced(launch):
    """The trace reads counters of rows that lie in the other process."""
    both = launch("--mesh", "data=2,model=4", "--phases", "--grid.context", "64")
    for process in both:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said


@pytest.mark.slow
def test_ranks_that_are_to_run_something_else_stop_at_once(launch, tmp_path):
    both = launch(of_second=("--new-tokens", "16", "--seed", "1", "--do-sample"))
    for process in both:
        _, said = process.communicate(timeout=100)
        assert process.returncode == 2
        assert "rank 1 is to run something else: settings.new_tokens is 16 there and 8 in" in said
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_mesh_of_fewer_devices_is_refused_by_both(launch):
    for process in launch("--mesh", "model=4"):
        _, said = process.communicate(timeout=100)
        assert process.returncode == 2
        assert "mesh='model=4' has 4 devices, and the 2 processes have 8" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_limit_gb": 3.0}, "memory_limit_gb: 2 processes run every cell together"),
        ({"jobs": 2, "timeout_minutes": 1.0}, "timeout_minutes, jobs: 2 processes"),
        ({"launcher": "slurm"}, "launcher: 2 processes"),
        ({"profile": True}, "profile: 2 processes"),
        ({"methods": [{"draft": "auto"}]}, "auto decides by measured times"),
        ({"rank": 7}, "rank=7 of 2 processes"),
    ],
)
def test_what_many_processes_do_not_do_is_refused(given, message, monkeypatch):
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    settings = {"coordinator": "localhost:9", "processes": 2, "rank": 0} | given
    with pytest.raises(ConfigError, match=message):
        multihost.find(Experiment(**settings))


def test_one_process_is_not_among_others():
    assert multihost.find(Experiment()) is None
