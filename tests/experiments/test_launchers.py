"""Which cell gets which devices, and what an end that was asked for does."""

import pathlib
import threading
import time

import pytest

from experiments.runner import cell_process, launchers
from experiments.runner.cell_process import Limits
from experiments.schema import config
from experiments.schema.fields import ConfigError

FOLDERS = [pathlib.Path(f"cell-{i}") for i in range(5)]


@pytest.fixture
def ran(monkeypatch):
    """Stands in for the cells' processes: (folder, devices, how many ran beside it)."""
    found, running, lock = [], [], threading.Lock()

    def run(folder, limits, environment, ended):
        with lock:
            running.append(folder)
            found.append((folder, environment.get("CUDA_VISIBLE_DEVICES"), len(running)))
        time.sleep(0.1)
        with lock:
            running.remove(folder)

    monkeypatch.setattr(cell_process, "run", run)
    return found


def test_cells_run_one_after_the_other_on_a_cpu(ran):
    done = list(launchers.Local([], 1, None).run(FOLDERS, Limits(), launchers.Stop()))
    assert done == FOLDERS
    assert [(folder, None, 1) for folder in FOLDERS] == ran


def test_each_cell_has_gpus_of_its_own_and_they_are_given_back(ran):
    launcher = launchers.Local(["0", "1", "2", "3", "4"], 2, None)
    assert launcher.jobs == 2
    assert {*launcher.run(FOLDERS, Limits(), launchers.Stop())} == {*FOLDERS}
    assert {devices for _, devices, _ in ran} >= {"0,1", "2,3"}
    assert max(beside for *_, beside in ran) == 2
    assert sorted(launcher.free) == ["0", "1", "2", "3", "4"]


def test_after_an_interrupt_no_cell_begins(ran):
    stop = launchers.Stop()
    done = []
    for folder in launchers.Local([], 1, None).run(FOLDERS, Limits(), stop):
        done.append(folder)
        stop.ask()
    assert done == FOLDERS[:1] and len(ran) == 1


@pytest.mark.parametrize(
    ("names", "devices", "jobs", "message"),
    [
        (["0"], 8, None, "a cell needs 8 devices, and this machine has 1 GPUs"),
        ([], 8, None, "xla_force_host_platform_device_count=8"),
        (["0", "1"], 1, 8, "jobs=8: 2 GPUs are enough for 2 cells of 1 at once"),
    ],
)
def test_more_than_there_is_is_refused(monkeypatch, names, devices, jobs, message):
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ConfigError, match=message):
        launchers.Local(names, devices, jobs)


@pytest.mark.parametrize(
    ("visible", "platforms", "found"),
    [
        ("0,3", "", ["0", "3"]),
        ("-1", "", []),
        ("2,-1,3", "", ["2"]),
        ("", "", []),
        ("0", "cpu", []),
    ],
)
def test_gpus_are_those_that_cuda_would_see(monkeypatch, visible, platforms, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert launchers.gpus() == found


def test_slurm_is_refused_where_it_is_not_or_has_too_few_gpus(monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(launchers.shutil, "which", lambda name: None)
    mine = config.Experiment(launcher="slurm")
    with pytest.raises(ConfigError, match="has no `sbatch`.*--slurm.cluster local"):
        launchers.make(mine, 1)
    with pytest.raises(ConfigError, match="needs 8 devices, and slurm.gpus is 1: set it to 8"):
        launchers.make(mine, 8)
