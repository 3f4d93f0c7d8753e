"""Two processes of four devices each give the text of one: data, model or stages across them."""

import itertools
import os
import re
import subprocess
import sys

import pytest

import models
from tests.magicjax import mesh_cases
from tests.magicjax.grammars import test_constrained_texts
from tests.quick import quick
from tests.two_processes import Two, free_port

# (data, model, stage): devices are given process by process, to stages, then data, then model.
ACROSS = {"data": (2, 4, 1), "model": (1, 8, 1), "stage": (2, 2, 2)}
CASES = ("plain", "self", "self sampled", "snapkv", "small sampled", "several")
ALL = [*itertools.product(CASES, ACROSS)]


@pytest.fixture(scope="module")
def two():
    processes = Two()
    yield processes
    processes.close()


@pytest.mark.parametrize(("case", "axis"), quick(ALL))
def test_two_processes_give_the_text_of_one(two, record_property, case, axis):
    mesh = ACROSS[axis]
    mesh_cases.check(two, record_property, case=case, mesh=mesh, shards=None)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ACROSS)
def test_each_process_computes_the_masks_of_grammars(two, axis):
    found = two(test_constrained_texts.on_a_mesh, mesh=ACROSS[axis], drafter=True)
    assert found == test_constrained_texts.on_a_mesh([], drafter=False)


@pytest.mark.slow
def test_text_comes_round_by_round(two):
    assert two(mesh_cases.compare_streamed, case="self", mesh=ACROSS["stage"])


@pytest.mark.slow
def test_each_process_loads_its_own_part(two, tmp_path):
    path, model = tmp_path / "target", mesh_cases.target(4)
    models.save_checkpoint(path, model.module, model.params)
    for axis in ("stage", "model"):
        found = two(mesh_cases.loaded_here, path=str(path), mesh=ACROSS[axis])
        # Blocks are divided, and the embeddings: over `model` only.
        assert found["here"] < found["all"] * (0.75 if axis == "stage" else 0.6)


def generate(rank: int, coordinator: str, *options: str) -> subprocess.Popen:
    """Starts the command in a process of four devices."""
    where = ["--distributed", "--coordinator", coordinator, "--processes", "2", "--rank", str(rank)]
    target = ["--target", "experiments/zoo/target", "--prompt", "def main(", "--max-tokens", "8"]
    return subprocess.Popen(
        [sys.executable, "-m", "magicjax", "generate", *target, *where, *options],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_command_prints_in_rank_0_and_refuses_different_options():
    mesh, coordinator = ["--mesh", "stage=2,model=4"], f"localhost:{free_port()}"
    started = [generate(rank, coordinator, *mesh) for rank in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in started]
    first, second = (re.sub(r"(?m)^\[Gloo\].*\n", "", text).strip() for text in printed)
    assert [process.returncode for process in started] == [0, 0] and first and not second
    coordinator = f"localhost:{free_port()}"
    started = [generate(r, coordinator, *mesh, "--stop", "xy"[r]) for r in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert all("the processes have different options, files or versions" in e for e in errors)
