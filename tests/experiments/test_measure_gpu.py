"""The parts of a measurement on a GPU: run once, gone on with, summed up beside targets."""

import json
import os
import pathlib
import sys
import time

import pytest

from experiments.studies import gpu_summary, measure_gpu, offloading
from experiments.studies.measure_gpu import SMOKE, Part, Plan, parts
from magicjax.benchmarks import bench, profile_ops
from pallas_kernels.benchmarks import bench as attention_bench
from pallas_kernels.benchmarks import tune, validate

ABOUT = {"device": "NVIDIA H200", "python": "3.12.3", "smoke": False}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def script(text: str) -> Part:
    """A part that runs a line of Python."""
    return Part("one", ("timeit", "-n1", "-r1", text), writes=False)


def measure(chosen, folder, again=False, minutes=5.0):
    return measure_gpu.measure(chosen, folder, again=again, minutes=minutes, about=ABOUT)


def kept(folder):
    return json.loads((folder / "measurements.json").read_text())["parts"]


def test_a_part_that_is_done_is_not_run_again_unless_asked(folder):
    log = folder / "log"
    once = script(f"open({str(log)!r}, 'a').write('x')")
    for again, length in ((False, 1), (False, 1), (True, 2)):
        assert measure([once], folder, again)
        assert len(log.read_text()) == length
    assert kept(folder)["one"]["command"].startswith("python -m timeit")
    assert (folder / "summary.md").read_text().startswith("# NVIDIA H200")
    assert {path.name for path in folder.iterdir()} == {"log", "measurements.json", "summary.md"}


def test_a_part_that_fails_is_kept_with_what_it_printed_and_tried_again_when_asked(folder):
    assert not measure([script("raise ValueError('no such kernel')")], folder)
    found = kept(folder)["one"]
    assert found["failed"] == "status 1" and "no such kernel" in found["printed"]
    assert "**status 1**" in (folder / "summary.md").read_text()
    assert not measure([script("pass")], folder) and "failed" in kept(folder)["one"]
    assert measure([script("pass")], folder, again=True) and "failed" not in kept(folder)["one"]


def test_a_part_is_stopped_and_none_is_begun_when_time_is_up(folder):
    slow = script("import time; time.sleep(60)")
    assert not measure([slow], folder, minutes=0.02)
    assert kept(folder)["one"]["failed"] == measure_gpu.OUT_OF_TIME
    assert measure([script("pass")], folder)  # goes on
    (folder / "measurements.json").unlink()
    assert not measure([slow], folder, minutes=0)
    assert not (folder / "measurements.json").exists()


def test_a_part_that_writes_leaves_its_result(folder):
    wanted = Part("check", ("json.tool", "--json-lines"))
    command = measure_gpu.run(wanted, 60)  # an option it does not take
    assert command["failed"] and "result" not in command
    found = measure_gpu.run(Part("tune", SMOKE_TUNE, platform="cpu", writes=False), 120)
    assert "failed" not in found and "Config(" in found["printed"]


SMOKE_TUNE = ("pallas_kernels.benchmarks.tune", "--list", "--shape", "1,64,1,1,64,1")


def test_a_part_that_is_stopped_leaves_no_process_of_its_own():
    start = "import subprocess; p = subprocess.Popen(['sleep', '99']); print(p.pid, flush=True)"
    command = [sys.executable, "-c", f"{start}; p.wait()"]
    status, printed = measure_gpu._call(command, dict(os.environ), 3)
    assert status is None
    deadline = time.monotonic() + 30  # a killed process takes a moment to end
    while _lives(int(printed)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rsplit(")", 1)[1].split()[0] not in "ZX"


def test_full_and_trial_runs_have_the_same_kinds_of_parts():
    kinds = [{part.name.split("-")[0] for part in parts(plan)} for plan in (Plan(), SMOKE)]
    wanted = "tests check tune attention decoding profile grid offload".split()
    assert kinds[0] == kinds[1] == set(wanted)
    names = [part.name for part in parts(Plan())]
    assert len(set(names)) == len(names)


COMMANDS = {
    "pallas_kernels.benchmarks.bench": attention_bench,
    "pallas_kernels.benchmarks.validate": validate,
    "pallas_kernels.benchmarks.tune": tune,
    "magicjax.benchmarks.bench": bench,
    "magicjax.benchmarks.profile_ops": profile_ops,
    "experiments.studies.offloading": offloading,
}


class ReachedError(Exception):
    pass


@pytest.mark.parametrize("plan", [Plan(), SMOKE], ids=["full", "trial"])
def test_every_command_takes_its_arguments(plan, monkeypatch):
    def reached(*arguments, **options):
        raise ReachedError

    # The first thing that each does behind its arguments.
    for module, name in (
        (attention_bench, "_backends"),
        (validate, "choose_backend"),
        (tune, "key_of"),
        (tune.mosaic, "why_not"),
        (bench, "load"),
        (offloading.magicjax, "load"),
        (bench, "_theirs"),
    ):
        monkeypatch.setattr(module, name, reached)
    for part in parts(plan):
        if part.command[0] in COMMANDS:
            with pytest.raises(ReachedError):
                COMMANDS[part.command[0]].main(part.command[1:])


def attention(share, seconds=1e-3, peer=2e-3):
    at = {"batch": 16, "context": 32768, "nodes": 16}
    rates = {"share_of_copy_bandwidth": share, "bytes_per_second": 4e12}
    rows = [
        at | rates | {"backend": "mosaic", "seconds": seconds},
        at | rates | {"backend": "torch flex", "seconds": peer},
        at | {"backend": "tokamax", "why": "tokamax is not installed"},
    ]
    result = {"rows": rows, "copy_bandwidth": {"copy": 4.3e12}, "jax": "0.11.2"}
    return {"attention-16x32768": {"command": "c", "seconds": 1.0, "result": result}}


def met(found, what):
    (target,) = (t for t in gpu_summary.targets(found) if t.what == what)
    return target.met


OF_COPY = "attention, % of copy, B=16 S=32768 N=16"
AHEAD = "attention, fastest peer / ours, B=16 S=32768 N=16"


def test_a_target_is_met_missed_or_not_measured():
    assert met(attention(0.86), OF_COPY) is True
    assert met(attention(0.84), OF_COPY) is False
    assert met({}, OF_COPY) is None
    assert met(attention(0.9), AHEAD) is True
    assert met(attention(0.9, peer=0.5e-3), AHEAD) is False


def grid(**figures):
    at = {"batch": 16, "context": 32768}
    loop = {
        "part": "loop 512",
        "gamma": 4,
        "synthetic acceptance": 0.8,
        "tau": 3.3,
        "overhead": 0.0,
    }
    loop |= {"speed-up": 1.8, "of a round": 1.95, "by its parts": 2.0, "round ms": 30.0}
    rows = [at | {"part": "plain loop", "overhead": 0.01}, at | loop | figures]
    return {"grid-16x32768-gamma4": {"command": "c", "seconds": 1.0, "result": {"rows": rows}}}


@pytest.mark.parametrize(
    ("figures", "overhead", "wall", "a_round"),
    [
        ({}, True, True, True),
        ({"overhead": 0.031}, False, True, True),
        ({"speed-up": 1.79}, True, False, True),
        ({"of a round": 1.7}, True, True, False),
    ],
)
def test_the_loop_is_held_against_its_parts(figures, overhead, wall, a_round):
    found = grid(**figures)
    tail = "over Omega T_T / (gamma T_D + T_V)"
    assert met(found, "loop overhead, gamma 4") is overhead
    assert met(found, f"synthetic 0.8, gamma 4: speed-up {tail}") is wall
    assert met(found, f"synthetic 0.8, gamma 4: of a round {tail}") is a_round


def test_the_summary_has_every_table_and_says_why_a_peer_is_missing():
    text = gpu_summary.summary({"about": ABOUT, "parts": attention(0.9) | grid()})
    assert "jax 0.11.2, Python 3.12.3" in text
    assert f"| {OF_COPY} | ≥ 0.85 | 0.900 | yes |" in text
    assert "| T_verify(5) / T_target | ≤ 1.1 | not measured | – |" in text
    assert "| tokamax | tokamax is not installed |" in text
    assert "| 16 | 32768 | 512 | 4 | 0.8 | 3.300 | 1.800 | 1.950 | 2.000 | 0.000 |" in text
