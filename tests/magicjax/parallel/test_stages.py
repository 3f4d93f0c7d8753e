"""Pipeline stages generate the text of one device and exchange only activations and decisions."""

import itertools
import types

import pytest

import models
from magicjax.parallel import pipeline_stages
from tests.magicjax import mesh_cases, stage_cases
from tests.quick import quick

# (data, model, stage), micro-batches, layers of the target.
FEW = [
    ("self sampled", (1, 2, 4), 4, 4),
    ("snapkv", (2, 2, 2), None, 2),
    ("eagle sampled", (1, 2, 4), 2, 4),
    ("mtp", (1, 2, 4), 2, 4),
    ("family gemma-4", (1, 2, 2), 2, 4),  # heads of two sizes
]
SHAPES = (
    ((1, 1, 2), 1, 2),
    ((1, 4, 2), 8, 2),
    ((2, 2, 2), 4, 2),
    ((1, 2, 4), 2, 4),
    ((1, 1, 8), 8, 8),
)
ALL = [
    (case, *shape)
    for case, shape in itertools.product(mesh_cases.CASES, SHAPES)
    if not case.startswith("family ")
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path, model = tmp_path_factory.mktemp("model") / "target", mesh_cases.target(4)
    models.save_checkpoint(path, model.module, model.params)
    return path


@pytest.mark.parametrize(("case", "mesh", "micro_batches", "layers"), quick(FEW, FEW[1]))
def test_stages_give_the_text_of_one_device(
    eight, record_property, case, mesh, micro_batches, layers
):
    how = dict(mesh=mesh, shards=None, layers=layers, micro_batches=micro_batches)
    mesh_cases.check(eight, record_property, case=case, **how)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mesh", "micro_batches", "layers"), ALL)
def test_all_stages_give_the_text_of_one_device(
    eight, record_property, case, mesh, micro_batches, layers
):
    how = dict(mesh=mesh, shards=None, layers=layers, micro_batches=micro_batches)
    mesh_cases.check(eight, record_property, case=case, **how)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rows", "last"])
def test_wrong_stages_are_detected(eight, what):
    assert eight(stage_cases.differs, what=what)


@pytest.mark.slow
def test_between_stages_only_activations_travel(eight):
    rows, steps, depth, nodes, width = 8, 4 + 2 - 1, 3, 4, 32
    found = eight(stage_cases.exchanged, case="self", mesh=(1, 4, 2), micro_batches=4, layers=2)
    # In every step each device sends its quarter of a micro-batch's hidden states, per level of
    # the draft and for the tree; then the last stage broadcasts its own.
    tokens, item = depth + nodes, found["dtype"]
    passes = depth + 1
    pass_bytes = rows // 4 * tokens * width // 4 * item
    assert found["between"]["collective-permute"] == [passes * steps, steps * pass_bytes]
    # The first stage broadcasts tokens; path, accepted, bonus, ranks.
    decided = rows * nodes * 4 + rows * (nodes + 1 + 1 + depth) * 4
    states = rows * tokens * width // 4 * item
    assert found["between"]["all-reduce"] == [passes + 2, states + decided]
    assert set(found["between"]) == {"collective-permute", "all-reduce"}
    assert found["keys"] not in found["copied"]


def test_without_a_model_axis_nothing_is_exchanged_within_a_stage(eight):
    found = eight(stage_cases.exchanged, case="plain", mesh=(1, 1, 2), micro_batches=1, layers=2)
    assert found["within"] == []
    assert found["keys"] not in found["copied"]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int8", "int4:8"])
def test_a_checkpoint_is_loaded_stage_by_stage(eight, checkpoint, weights):
    found = eight(stage_cases.loaded, path=str(checkpoint), mesh=(1, 2, 2), weights=weights)
    assert found["same"] and found["slots"] == 1
    assert found["first"] == [2, 48, 32]
    assert found["tau"] == pytest.approx(7 / 3)  # the draft is the target: 3 + 3 + 1 of 7 tokens


def test_refusals(eight, checkpoint):
    errors = eight(stage_cases.refusals, path=str(checkpoint))
    expected = [
        "the target: stage=4 does not divide its 2 layers: use 2",
        "micro_batches=3 does not divide the 8 rows of a device group: use one of 1, 2, 4, 8",
        "micro_batches=2 requires a mesh with stages",
        "micro_batches=2 requires a mesh with stages",
        "is on 2 stages: pass the mesh that it was loaded for",
        "has 2 stages, and the mesh has 1",
        "load it with stages=1",
        "PyramidKV gives layers different budgets",
        "which pipeline stages do not support",
        "stage=2 with an offloaded target is not supported",
        "offload=True on a mesh with stages is not supported",
        "stages=1 requires a mesh",
        "stages=3 differs from the mesh's 2",
    ]
    assert len(errors) == len(expected)
    for text, part in zip(errors, expected, strict=True):
        assert part in text


@pytest.mark.parametrize(
    ("layers", "count", "nearest"), [(80, 3, "2 or 4"), (7, 2, "1 or 7"), (2, 4, "2")]
)
def test_layers_that_do_not_divide(layers, count, nearest):
    with pytest.raises(ValueError, match=f"stage={count} .* {layers} layers: use {nearest}$"):
        pipeline_stages.check_layers(types.SimpleNamespace(num_layers=layers), count)


def test_stages_with_different_layers_are_errors_that_name_the_nearest_numbers():
    slides, linear = (True, True, False) * 4, (True, True, False) * 4
    for pattern in ({"slides": slides}, {"rotations": (0, 0, 2) * 4}, {"linear": linear}):
        config = types.SimpleNamespace(num_layers=12, **pattern)
        pipeline_stages.check_layers(config, 4)
        with pytest.raises(ValueError, match="stage=6 gives .* must be alike: use 4$"):
            pipeline_stages.check_layers(config, 6)


def test_few_micro_batches_where_weights_dominate_and_many_where_caches_do():
    assert pipeline_stages.best_micro_batches(8, 2, weights=100, caches=1) == 1
    assert pipeline_stages.best_micro_batches(8, 2, weights=1, caches=100) == 8
    # (M + 3) (9 + 48 / M) is least at M = 4.
    assert pipeline_stages.best_micro_batches(8, 4, weights=9, caches=48) == 4
