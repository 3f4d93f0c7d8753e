"""Eight devices generate the text of one, and exchange only the expected collectives."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import magicjax
import models
from magicjax import placement
from sharding import abstract_mesh, make_mesh
from tests.magicjax import mesh_cases, tiny
from tests.quick import quick

MESHES = mesh_cases.MESHES
# What differs most, each kind on a mesh that divides it; all other pairs are another test.
FEW = [
    ("self sampled", (2, 4)),
    ("snapkv", (1, 8)),
    ("h2o int8", (4, 2)),
    ("penalties", (2, 4)),
    ("penalties sampled", (1, 8)),
    ("sinks in the cache", (1, 8)),
    ("OPT", (1, 8)),
    ("Falcon", (2, 4)),
    ("MPT", (1, 8)),
    ("int4", (2, 4)),
    ("eagle sampled", (2, 4)),
    ("mtp", (2, 4)),
    ("cascade sampled", (4, 2)),
]
FAMILIES = [case for case in mesh_cases.CASES if case.startswith("family ")]
OTHERS = [case for case in mesh_cases.CASES if case not in FAMILIES]
ALL = [pair for pair in itertools.product(OTHERS, MESHES) if pair not in FEW]
ALL += [(case, (2, 2)) for case in FAMILIES]


def shards_of(mesh) -> int | None:
    """Returns the number of shards of the draft on a mesh."""
    return 2 if mesh[1] > 4 else None


@pytest.mark.parametrize(("case", "mesh"), quick(FEW, FEW[0]))
def test_a_mesh_gives_the_text_of_one_device(eight, record_property, case, mesh):
    shards = shards_of(mesh)
    mesh_cases.check(eight, record_property, case=case, mesh=mesh, shards=shards)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mesh"), ALL)
def test_every_mesh_gives_the_text_of_one_device(eight, record_property, case, mesh):
    shards = shards_of(mesh)
    mesh_cases.check(eight, record_property, case=case, mesh=mesh, shards=shards)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["small", "small sampled"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_draft_may_be_divided_over_fewer_devices(eight, case, shards):
    assert eight(mesh_cases.compare, case=case, mesh=(1, 8), shards=shards)["rows"] == 8


@pytest.mark.slow
def test_a_stream_gives_the_same_text(eight):
    assert eight(mesh_cases.compare_streamed, case="snapkv", mesh=(2, 4))


@pytest.mark.slow
def test_without_all_reduces_the_text_differs(eight):
    assert eight(mesh_cases.differs_without_sums)


def test_a_step_has_two_all_reduces_per_layer_and_the_vocabularys_all_gathers(eight):
    found = eight(mesh_cases.exchanged, case="self", mesh=(1, 8))
    layers, passes = 2, 1 + 3  # the target's over the tree, and one for each drafted token
    assert found["collectives"]["all-reduce"] == passes * (2 * layers + 1)  # and the embedding's
    assert set(found["collectives"]) <= {"all-reduce", "all-gather"}
    # The best logit of each device, and where it is.
    assert found["collectives"]["all-gather"] <= passes * 2
    assert found["largest"] < found["keys"]
    assert found["keys"] not in found["copied"]


def test_groups_of_rows_exchange_only_the_number_of_rounds(eight):
    found = eight(mesh_cases.exchanged, case="self", mesh=(8, 1))
    assert found["collectives"] == {"all-reduce": 1} and found["largest"] == 1


@pytest.mark.parametrize("devices", quick([2, 4, 6, 8], 4, 6))
def test_collectives_on_a_divided_axis_equal_those_on_the_whole(eight, devices):
    assert eight(mesh_cases.functions_of_a_divided_axis, devices=devices) == []


def test_a_coarse_part_is_sliced_into_finer_ones(eight):
    assert eight(mesh_cases.narrowed)


@pytest.mark.parametrize("mesh", [(1, 8), (2, 4)])
def test_a_checkpoint_goes_to_devices_in_parts(eight, tmp_path, mesh):
    model = mesh_cases.target(4)
    models.save_checkpoint(tmp_path / "x", model.module, model.params)
    found = eight(mesh_cases.loaded, path=str(tmp_path / "x"), mesh=mesh)
    assert found["same"]
    assert found["most"] == found["share"] < found["whole"]


# Bad input; it needs no devices.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_heads=24, num_kv_heads=3, intermediate_size=96), "3 KV heads"),
        (dict(intermediate_size=36), "36 MLP units"),
        (dict(vocab_size=60), "60 tokens"),
        (
            dict(num_experts=8, experts_per_token=2, shared_expert_size=36),
            "36 units of the shared expert are not a multiple of 8; use model=1, 2, 4",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, message):
    assert message in refused(**changes)


@pytest.mark.parametrize("sizes", [(0, 1), (1, -1)])
def test_a_mesh_has_at_least_one_device(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        make_mesh(*sizes)


def refused(**changes):
    """Returns the error for a target of other sizes on 8 abstract devices."""
    shape = tiny.config(**mesh_cases.SIZES | dict(num_kv_heads=4) | changes)
    with pytest.raises(ValueError) as error:
        placement.split_of(shape, None, abstract_mesh(1, 8))
    return str(error.value)


def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do():
    message = refused(num_heads=12, num_kv_heads=4)
    assert "12 query heads are not a multiple of 8" in message and "1, 2, 4" in message


def test_a_vocabulary_is_divided_as_tokens_are_drawn():
    shape = tiny.config(**mesh_cases.SIZES | dict(num_kv_heads=6, num_heads=6))
    with pytest.raises(ValueError, match="model=3 .*16 shares of the vocabulary of 96.*1, 2, 4, 8"):
        shape = dataclasses.replace(shape, vocab_size=96)
        placement.split_of(shape, None, abstract_mesh(1, 3))


def test_a_draft_vocabulary_is_not_divided():
    shape = dataclasses.replace(tiny.config(), draft_vocab_size=16)
    with pytest.raises(ValueError, match="draft_vocab_size=16 .* model=2 devices: .* shards=1"):
        placement.split_of(shape, None, abstract_mesh(1, 2))
    assert placement.split_of(shape, 1, abstract_mesh(1, 2)).shards == 1


def test_kv_heads_are_held_in_groups_along_the_last_factors():
    shape = tiny.config(**mesh_cases.SIZES | dict(num_heads=6, num_kv_heads=3))
    with pytest.raises(
        ValueError, match="3 KV heads are not a multiple of 6; .* there must be 1, 2"
    ):
        placement.split_of(shape, None, abstract_mesh(1, 6))


def test_models_of_another_mesh_are_refused(eight, tmp_path):
    model = mesh_cases.target(4)
    models.save_checkpoint(tmp_path / "x", model.module, model.params)
    said = eight(mesh_cases.refusals, path=str(tmp_path / "x"))
    assert ["is on 8 devices: pass the mesh" in message for message in said] == [True, True, False]
    assert "make one with magicjax.make_mesh" in said[2]


@pytest.mark.slow
def test_a_mesh_with_explicit_axes_serves_too(eight):
    assert eight(mesh_cases.with_explicit_axes)


def test_more_devices_than_there_are_is_an_error_that_says_how_to_get_them():
    with pytest.raises(ValueError, match="needs 16 devices, and there are 1.*device_count=16"):
        make_mesh(2, 8)


def test_prompts_must_divide_over_the_groups():
    with pytest.raises(ValueError, match=r"3 prompts do not divide over data=4.*such as 4"):
        placement.check(abstract_mesh(4, 1), mesh_cases.target(4), None, 3)


def test_a_target_is_divided_over_all_of_the_axis():
    whole = dataclasses.replace(mesh_cases.target(4), shards=2)
    with pytest.raises(ValueError, match="the target has shards=2"):
        magicjax.generate(whole, [[1, 2]], mesh=make_mesh())


def test_other_mesh_axes_are_refused():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    with pytest.raises(ValueError, match="axes x: it must have stage, data, model or some of them"):
        magicjax.generate(tiny.model(), [[1, 2]], mesh=mesh)


def test_shards_without_a_mesh_are_refused(tmp_path):
    with pytest.raises(ValueError, match="shards=2 requires a mesh"):
        magicjax.load(tmp_path, shards=2)
