"""Devices of each cell, and requests to stop."""

import pathlib
import threading
import time

import pytest

from experiments.runner import cell_process, launchers
from experiments.runner.cell_process import Limits
from experiments.schema.fields import ConfigError

FOLDERS = [pathlib.Path(f"cell-{i}") for i in range(5)]


@pytest.fixture
def ran(monkeypatch):
    """Replaces the cells' processes; records (folder, devices, number of concurrent cells)."""
    runs, running, lock = [], [], threading.Lock()

    def run(folder, limits, environment, stopped):
        with lock:
            running.append(folder)
            runs.append((folder, environment.get("CUDA_VISIBLE_DEVICES"), len(running)))
        time.sleep(0.1)
        with lock:
            running.remove(folder)

    monkeypatch.setattr(cell_process, "run", run)
    return runs


def test_each_cell_has_separate_gpus_which_are_released(ran):
    launcher = launchers.Local(["0", "1", "2", "3", "4"], 2, None)
    assert launcher.jobs == 2
    assert {*launcher.run(FOLDERS, Limits(), launchers.Stop())} == {*FOLDERS}
    assert {devices for _, devices, _ in ran} >= {"0,1", "2,3"}
    assert max(concurrent for *_, concurrent in ran) == 2
    assert sorted(launcher.free) == ["0", "1", "2", "3", "4"]


def test_after_an_interrupt_no_cell_starts(ran):
    stop = launchers.Stop()
    done = []
    for folder in launchers.Local([], 1, None).run(FOLDERS, Limits(), stop):
        done.append(folder)
        stop.request()
    assert done == FOLDERS[:1] and len(ran) == 1


@pytest.mark.parametrize(
    ("names", "devices", "jobs", "message"),
    [
        (["0"], 8, None, "a cell needs 8 devices, but this machine has 1 GPUs"),
        ([], 8, None, "xla_force_host_platform_device_count=8"),
        (["0", "1"], 1, 8, "jobs=8 is too large: 2 GPUs allow 2 concurrent cells of 1"),
    ],
)
def test_too_few_devices_are_refused(monkeypatch, names, devices, jobs, message):
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(ConfigError, match=message):
        launchers.Local(names, devices, jobs)


@pytest.mark.parametrize(
    ("visible", "platforms", "names"),
    [
        ("0,3", "", ["0", "3"]),
        ("-1", "", []),
        ("2,-1,3", "", ["2"]),
        ("", "", []),
        ("0", "cpu", []),
    ],
)
def test_gpus_are_those_visible_to_cuda(monkeypatch, visible, platforms, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert launchers.gpus() == names
