"""Two processes of four devices each give the text of one: data, model or stages across them."""

import itertools

import pytest

import models
from tests.magicjax import mesh_cases
from tests.quick import quick
from tests.two_processes import Two

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
def test_each_process_loads_its_own_part(two, tmp_path):
    path, model = tmp_path / "target", mesh_cases.target(4)
    models.save_checkpoint(path, model.module, model.params)
    for axis in ("stage", "model"):
        found = two(mesh_cases.loaded_here, path=str(path), mesh=ACROSS[axis])
        # Blocks are divided, and the embeddings: over `model` only.
        assert found["here"] < found["all"] * (0.75 if axis == "stage" else 0.6)
