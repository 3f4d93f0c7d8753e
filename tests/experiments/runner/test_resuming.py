"""Grids whose cells run in separate processes: kills, crashes, limits and other launchers."""

import csv
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from experiments.schema import grid, store
from experiments.schema.columns import TIMES

SPEND = {*TIMES, "compile_s", "memory_mb", "wall_s", "draft_s", "score_s", "verify_s"}
SPEND |= {"commit_s", "rest_s", "host_s"}
COMMAND = (sys.executable, "-m", "experiments.launch")
ENVIRONMENT = os.environ | {"XLA_FLAGS": ""}


def write(zoo, name, **changes):
    """Writes a text and an experiment file with tiny models; returns the file's path."""
    text = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(900))
    (zoo / "text.txt").write_text(text)
    settings = {
        "target": str(zoo / "target"),
        "results": str(zoo / "results"),
        "prompts": "files",
        "prompt_path": str(zoo / "text.txt"),
        "context": 48,
        "new_tokens": 12,
        "repeats": 1,
        "agreement_tokens": 0,
        "phases": False,
        "methods": [{"drafter": "self", "budget": 24, "sinks": 4, "tree": "chain:3"}],
    }
    path = zoo / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path


def launch(path, *arguments):
    return subprocess.run([*COMMAND, str(path), *arguments], env=ENVIRONMENT, check=False)


def computed(directory):
    """Returns the rows, tokens and histograms of the cells, without times."""
    with (directory / "summary.csv").open() as file:
        rows = {row["key"]: row for row in csv.DictReader(file) if row["key"]}
    results = {}
    for key, row in rows.items():
        lines = (directory / "cells" / key / "requests.jsonl").read_text().splitlines()
        requests = [json.loads(line) for line in lines]
        kept = {name: value for name, value in row.items() if name not in SPEND}
        names = ("request", "tokens", "tau", "histogram", "exact")
        results[key] = kept, [[request[name] for name in names] for request in requests]
    return results


def whole_files(directory):
    """Asserts that every result file is readable; returns the finished cells."""
    for path in directory.rglob("*"):
        if path.suffix == ".json":
            json.loads(path.read_text())
        if path.suffix == ".jsonl":
            [json.loads(line) for line in path.read_text().splitlines()]
        if path.suffix == ".yaml":
            yaml.safe_load(path.read_text())
    return {p.parent.name: p.stat().st_mtime_ns for p in directory.glob(f"cells/*/{store.METRICS}")}


@pytest.mark.slow
def test_a_grid_killed_ten_times_ends_like_an_uninterrupted_one(zoo):
    axes = {"batch": [1, 2, 3, 4], "context": [48, 56, 64]}
    path, unbroken = write(zoo, "killed", grid=axes), write(zoo, "unbroken", grid=axes)
    assert launch(unbroken).returncode == 0
    expected = computed(zoo / "results" / "unbroken")
    assert len(expected) == 12
    chance, finished, kills = random.Random(0), {}, 0
    directory = zoo / "results" / "killed"
    while kills < 10:
        running = subprocess.Popen([*COMMAND, str(path)], env=ENVIRONMENT)
        time.sleep(chance.uniform(4, 30))
        if running.poll() is not None:
            assert kills >= 5, "the grid ended before enough kills"
            break
        running.send_signal(signal.SIGKILL)
        running.wait()
        kills += 1
        now = whole_files(directory)
        assert finished.items() <= now.items(), "a finished cell was lost or measured twice"
        finished = now
        print(f"kill {kills}: {len(finished)} of 12 cells are finished")
    assert launch(path).returncode == 0
    assert finished.items() <= whole_files(directory).items()
    assert not list(directory.rglob("*.partial"))
    assert computed(directory) == expected


@pytest.mark.slow
def test_a_crashed_cell_is_recorded_and_the_exit_status_is_1(zoo):
    method = {"drafter": "self", "budget": [24, 8], "sinks": 4, "tree": "chain:5"}
    path = write(
        zoo, "dying", impossible="record", repeats=0, grid={"batch": [1, 2]}, methods=[method]
    )
    killer = zoo / "sitecustomize.py"  # kills the process of one cell
    killer.write_text(
        "import os, sys, pathlib, threading, time\n"
        "def wait():\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), 11)\n"
        "folder = pathlib.Path(sys.orig_argv[-1] if len(sys.orig_argv) > 3 else '.')\n"
        "config = folder / 'config.yaml'\n"
        "if config.exists() and 'drafter: self' in config.read_text() and "
        "'batch: 2' in config.read_text():\n"
        "    threading.Thread(target=wait, daemon=True).start()\n"
    )
    paths = os.pathsep.join([str(zoo), str(pathlib.Path(grid.__file__).parents[2])])
    done = subprocess.run(
        [*COMMAND, str(path)], env=ENVIRONMENT | {"PYTHONPATH": paths}, check=False
    )
    assert done.returncode == 1
    with (zoo / "results" / "dying" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok", "ok", "config", "crash", "config"]
    assert rows[3]["error"] == "the process was killed by SIGSEGV"
    assert "budget=8 is too small: its ring has 4" in rows[4]["error"]


@pytest.mark.slow
def test_a_cell_beyond_the_memory_limit_is_recorded_and_the_others_are_measured(zoo):
    """The limit is between the memory of a small cell and that of a large one."""
    sizes = [{"batch": [1, 8], "context": [256, 8192]}]
    settings = {"target": "experiments/zoo/target", "prompts": "random", "prompt_path": ""}
    settings |= {"zip": sizes, "methods": [], "repeats": 0, "new_tokens": 32}
    assert launch(write(zoo, "free", **settings)).returncode == 0
    with (zoo / "results" / "free" / "summary.csv").open() as file:
        small, large = (float(row["memory_mb"]) / 1e3 for row in csv.DictReader(file))
    assert large > 1.5 * small
    limit = (small + large) / 2
    assert launch(write(zoo, "tight", **settings, memory_limit_gb=limit)).returncode == 1
    with (zoo / "results" / "tight" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok", "memory"]
    assert "out of memory: the process used" in rows[1]["error"]


@pytest.mark.slow
def test_workers_and_ray_give_the_local_summary(zoo):
    axes = {"grid": {"batch": [1, 2]}}
    assert launch(write(zoo, "here", **axes)).returncode == 0
    path = write(zoo, "shared", **axes)
    workers = [
        subprocess.Popen([*COMMAND, str(path), "--worker", share], env=ENVIRONMENT)
        for share in ("0/2", "1/2")
    ]
    assert [worker.wait() for worker in workers] == [0, 0]
    measured = whole_files(zoo / "results" / "shared")
    assert len(measured) == 2 and not (zoo / "results" / "shared" / "summary.csv").exists()
    assert launch(path).returncode == 0
    assert whole_files(zoo / "results" / "shared") == measured
    expected = computed(zoo / "results" / "here")
    assert computed(zoo / "results" / "shared") == expected
    pytest.importorskip("ray")
    assert launch(write(zoo, "ray", **axes), "--launcher", "ray").returncode == 0
    assert computed(zoo / "results" / "ray") == expected
