"""Trackers log the results, are checked before the run, and never end it."""

import logging
import struct

import numpy as np
import pytest

from experiments.runner import tracking

ROWS = [
    {"method": "plain", "batch": 1, "context": 64, "tau": 1.0, "status": "ok", "error": ""},
    {"method": "self", "batch": 1, "context": 64, "tau": np.float32(2.5), "speedup": None},
]


class Recorder:
    def __init__(self):
        self.logged = []

    def cell(self, row, step):
        self.logged.append(step)

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
        tracker.close("ok")
    assert broken.logged == [0]
    assert good.logged == [0, 1, 2, "ok"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "wandb failed and is switched off" in message and "OSError: disk full" in message


def events(path):
    """Yields the events of a file: 8 bytes of length, 4 of checksum, the event, 4 of checksum."""
    from tensorboardX.proto import event_pb2

    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        event = event_pb2.Event()
        event.ParseFromString(content[at + 12 : at + 12 + length])
        yield event
        at += 16 + length


def values(folder):
    """Returns {tag: (step, value)} of the event files in a folder."""
    logged = [e for path in sorted(folder.glob("events.*")) for e in events(path)]
    return {v.tag: (e.step, v) for e in logged for v in e.summary.value}


def test_tensorboard_has_a_run_for_each_cell_with_settings_and_results(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = tracking.open(["tensorboard"], "demo", tmp_path, {"batch": [1]})
    for step, row in enumerate(ROWS):
        tracker.cell(row, step)
    tracker.close("ok")

    folder = tmp_path / "tensorboard"
    second = values(folder / "0001")
    step, tau = second["tau"]
    assert step == 1 and tau.simple_value == 2.5
    (started,) = [v for tag, (_, v) in second.items() if tag.endswith("session_start_info")]
    settings = started.metadata.plugin_data.content
    assert b"method" in settings and b"self" in settings and b"context" in settings
    assert "batch" not in second and "speedup" not in second
    whole = values(folder)
    texts = {
        tag.split("/")[0]: v.tensor.string_val[0]
        for tag, (_, v) in whole.items()
        if v.tensor.string_val
    }
    assert b"batch" in texts["config"] and texts["status"] == b"ok"
