"""The parts of a measurement on a GPU or TPU: run once, resumed, summarized."""

import json
import re

import pytest

from experiments.studies.accelerator import __main__ as measure_all
from experiments.studies.accelerator import summary as tables
from experiments.studies.accelerator.__main__ import SMALL, SMOKE, Part, Plan, parts
from magicjax.benchmarks import bench
from pallas_kernels.benchmarks import bench as attention_bench
from pallas_kernels.benchmarks import validate

ABOUT = {"device": "NVIDIA H200", "python": "3.12.3", "smoke": False}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def script(text: str) -> Part:
    """A part that runs a line of Python."""
    return Part("one", ("timeit", "-n1", "-r1", text), writes=False)


def measure(chosen, folder, again=False, minutes=5.0):
    return measure_all.measure(chosen, folder, again=again, minutes=minutes, about=ABOUT)


def stored(folder):
    return json.loads((folder / "measurements.json").read_text())["parts"]


def test_a_finished_part_runs_again_only_on_request(folder):
    log = folder / "log"
    once = script(f"open({str(log)!r}, 'a').write('x')")
    for again, length in ((False, 1), (False, 1), (True, 2)):
        assert measure([once], folder, again)
        assert len(log.read_text()) == length
    assert stored(folder)["one"]["command"].startswith("python -m timeit")
    assert (folder / "summary.md").read_text().startswith("# NVIDIA H200")
    assert {path.name for path in folder.iterdir()} == {"log", "measurements.json", "summary.md"}


def test_a_failed_part_is_stored_with_its_output_and_runs_again_on_request(folder):
    assert not measure([script("raise ValueError('no such kernel')")], folder)
    outcome = stored(folder)["one"]
    assert outcome["failed"] == "status 1" and "no such kernel" in outcome["printed"]
    assert "**status 1**" in (folder / "summary.md").read_text()
    assert not measure([script("pass")], folder) and "failed" in stored(folder)["one"]
    assert measure([script("pass")], folder, again=True) and "failed" not in stored(folder)["one"]


def test_no_part_runs_longer_than_the_time_limit(folder):
    slow = script("import time; time.sleep(60)")
    assert not measure([slow], folder, minutes=0.02)
    assert stored(folder)["one"]["failed"] == measure_all.OUT_OF_TIME
    assert measure([script("pass")], folder)  # resumes
    (folder / "measurements.json").unlink()
    assert not measure([slow], folder, minutes=0)
    assert not (folder / "measurements.json").exists()


COMMANDS = {
    "pallas_kernels.benchmarks.bench": attention_bench,
    "pallas_kernels.benchmarks.validate": validate,
    "magicjax.benchmarks.bench": bench,
}


class ReachedError(Exception):
    pass


@pytest.mark.parametrize("plan", [Plan(), SMALL, SMOKE], ids=["full", "small", "trial"])
def test_every_command_takes_its_arguments(plan, monkeypatch):
    def reached(*arguments, **options):
        raise ReachedError

    # The first call of each command after parsing its arguments.
    for module, name in (
        (attention_bench, "_backends"),
        (validate, "choose_backend"),
        (bench, "load"),
    ):
        monkeypatch.setattr(module, name, reached)
    for part in parts(plan):
        if part.command[0] in COMMANDS:
            with pytest.raises(ReachedError):
                COMMANDS[part.command[0]].main(part.command[1:])


def attention():
    at = {"batch": 16, "context": 32768, "nodes": 16}
    rates = {"% of copy": 90.0, "GB/s": 4000.0}
    rows = [
        at | rates | {"backend": "mosaic", "us/layer": 1000.0},
        at | rates | {"backend": "torch flex", "us/layer": 2000.0},
        at | {"backend": "tokamax", "skipped": "tokamax is not installed"},
    ]
    result = {"rows": rows, "jax": "0.11.2"}
    return {"attention-16x32768": {"command": "c", "seconds": 1.0, "result": result}}


def grid(**figures):
    at = {"batch": 16, "context": 32768}
    loop = {"part": "loop 512", "gamma": 4, "synthetic acceptance": 0.8, "tau": 3.3}
    loop |= {"speedup": 1.8, "speedup per round": 1.95, "predicted speedup": 2.0, "round ms": 30.0}
    rows = [at | {"part": "plain loop"}, at | loop | figures]
    return {"grid-16x32768-gamma4": {"command": "c", "seconds": 1.0, "result": {"rows": rows}}}


def test_the_summary_has_every_table_and_reasons_for_missing_baselines():
    text = tables.summary({"about": ABOUT, "parts": attention() | grid()})
    text = re.sub(" +", " ", text)
    assert "jax 0.11.2, Python 3.12.3" in text
    assert "| tokamax | – | – | – | tokamax is not installed |" in text
    assert "| 16 | 32768 | loop 512 | 4 | 0.8 | 3.3 | 1.8 | 1.95 | 2 |" in text
