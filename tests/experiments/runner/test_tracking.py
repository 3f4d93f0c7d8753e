"""Trackers log the results, are checked before the run, and never end it."""

import importlib.machinery
import logging
import sys
import types

import numpy as np
import pytest

from experiments.runner import tracking

ROWS = [
    {"method": "plain", "batch": 1, "context": 64, "tau": 1.0, "status": "ok", "error": ""},
    {"method": "self", "batch": 1, "context": 64, "tau": np.float32(2.5), "speedup": None},
]


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package wandb.*magicjax\[tracking\]"):
        tracking.open(["wandb"], "demo", tmp_path, {})


class FakeRun:
    def __init__(self, options):
        self.options = options
        self.logged, self.kept, self.summary, self.exit_code = [], [], {}, None

    def log(self, row, step=None):
        self.logged.append((step, row))

    def log_artifact(self, artifact):
        self.kept.append(artifact)

    def finish(self, exit_code):
        self.exit_code = exit_code


class FakeArtifact:
    def __init__(self, name, type):
        self.name, self.type, self.files = name, type, []

    def add_file(self, path):
        self.files.append(path)


@pytest.fixture
def wandb(monkeypatch):
    """A module with the used functions of wandb, and its runs."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.runs = []

    def init(**options):
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    module.Artifact = FakeArtifact
    module.Table = lambda **options: options
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_wandb_logs_settings_cells_files_and_the_status(wandb, tmp_path):
    (tmp_path / "summary.csv").write_text("batch\n1\n")
    (tmp_path / "report.html").touch()
    tracker = tracking.open(["wandb", "wandb"], "a demo", tmp_path, {"batch": [1, 2]})
    for step, row in enumerate(ROWS):
        tracker.cell(row, step)
    tracker.artifacts([tmp_path / "summary.csv", tmp_path / "report.html"])
    tracker.close("ok")
    (run,) = wandb.runs
    assert run.options["config"] == {"batch": [1, 2]}
    assert (run.options["name"], run.options["project"]) == ("a demo", "magicjax")
    assert run.logged[0] == (0, {key: x for key, x in ROWS[0].items() if key != "error"})
    assert run.logged[1] == (1, {key: x for key, x in ROWS[1].items() if x is not None})
    table = run.logged[2][1]["cells"]
    assert table["columns"] == ["method", "batch", "context", "tau", "status"]
    assert table["data"][1] == ["self", 1, 64, 2.5, None]
    assert run.kept[0].name == "a-demo-results" and len(run.kept[0].files) == 2
    assert run.exit_code == 0 and run.summary == {"status": "ok"}


class Recorder:
    def __init__(self):
        self.logged = []

    def cell(self, row, step):
        self.logged.append(step)

    def artifacts(self, paths):
        self.logged.append([path.name for path in paths])

    def close(self, status):
        self.logged.append(status)


class Broken(Recorder):
    def cell(self, row, step):
        super().cell(row, step)
        raise OSError("disk full")


def test_a_tracker_that_fails_is_switched_off_and_the_others_continue(caplog):
    good, broken = Recorder(), Broken()
    tracker = tracking.Tracker({"wandb": broken, "tensorboard": good})
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            tracker.cell({}, step)
        tracker.artifacts(["results/plot.png"])
        tracker.close("ok")
    assert broken.logged == [0]
    assert good.logged == [0, 1, 2, ["plot.png"], "ok"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "wandb failed and is switched off" in message and "OSError: disk full" in message
