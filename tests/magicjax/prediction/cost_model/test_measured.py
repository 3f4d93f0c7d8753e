"""Timed steps correct the roofline: exactly at the measured points, smoothly between them."""

import dataclasses
import re

import numpy as np
import pytest

import models
from magicjax.prediction import cost_model
from magicjax.prediction.cost_model import Draft, Machine, Steps

SIZES = cost_model.sizes_of(models.preset("llama-68m"), "float32", "llama-68m")
SMALL = cost_model.sizes_of(models.preset("tinyllama-1.1b"), "float32", "tinyllama-1.1b")
HERE = cost_model.Device("here", 2e10, 1e11, 1e10, None, dtype="float32", round_seconds=1e-3)
RNG = np.random.default_rng(0)
PASSES = Steps(
    SIZES.key, cost_model.PASS, (1, 4), (512, 2048), (1, 2, 5), tuple(RNG.uniform(0.01, 0.1, 12))
)
LEVELS = Steps(SIZES.key, cost_model.DRAFT, (1, 4), (64, 256), (1,), (1e-3, 2e-3, 3e-3, 5e-3))
MACHINE = Machine(dataclasses.replace(HERE, measured=(PASSES, LEVELS)))


def cost(batch, context, budget, nodes, machine=MACHINE, sizes=SIZES):
    return cost_model.round_cost(
        sizes, Draft(sizes, budget), machine, batch, context, nodes, nodes - 1
    )


def test_predictions_equal_the_measured_times_on_the_grid():
    timed = dict(zip(PASSES.grid, PASSES.seconds, strict=True))
    levels = dict(zip(LEVELS.grid, LEVELS.seconds, strict=True))
    for batch, context, nodes in PASSES.grid:
        if nodes == 1:
            continue
        for budget in LEVELS.slots:
            found = cost(batch, context, budget, nodes)
            assert found.target == pytest.approx(timed[batch, context, 1])
            assert found.verify + found.rest == pytest.approx(timed[batch, context, nodes])
            assert found.draft == pytest.approx(levels[batch, budget, 1])
            assert sum(found.parts.values()) == pytest.approx(found.total)


def test_ratios_are_interpolated_in_logarithms():
    plain = Machine(HERE)
    ratios = [
        cost(batch, context, 64, 2).target / cost(batch, context, 64, 2, plain).target
        for batch, context in [(1, 512), (1, 2048), (4, 512), (4, 2048)]
    ]
    middle = cost(2, 1024, 64, 2).target / cost(2, 1024, 64, 2, plain).target
    assert middle == pytest.approx(np.exp(np.mean(np.log(ratios))))


def test_outside_the_grid_the_nearest_ratio_applies():
    plain = Machine(HERE)
    for outside, nearest in [((9, 9000), (4, 2048)), ((1, 100), (1, 512))]:
        ratio = cost(*outside, 64, 2).target / cost(*outside, 64, 2, plain).target
        assert ratio == pytest.approx(
            cost(*nearest, 64, 2).target / cost(*nearest, 64, 2, plain).target
        )


def test_a_quantized_draft_is_faster_by_its_share_of_bytes():
    """Steps are timed with caches in the dtype of the model only."""
    whole, eight = (Draft(SIZES, 256, bits) for bits in (None, 8))
    timed, constants = (
        [sum(cost_model.draft_step(draft, machine, 4, 2048).values()) for draft in (whole, eight)]
        for machine in (MACHINE, Machine(HERE))
    )
    assert timed[0] == pytest.approx(5e-3)
    assert timed[1] / timed[0] == pytest.approx(constants[1] / constants[0]) and timed[1] < timed[0]


def test_a_profile_stores_measured_steps(tmp_path):
    cost_model.save_profile(tmp_path / "a" / "here.json", MACHINE.device, {})
    assert cost_model.load_profile(tmp_path / "a" / "here.json") == MACHINE.device


WRONG = {
    "an axis": (dict(batches=(4, 1)), "batches=(4, 1) must be increasing whole numbers"),
    "no axis": (dict(slots=()), "slots=() must be"),
    "a kind": (dict(kind="step"), "kind='step' must be 'pass' or 'draft'"),
    "too few": (dict(seconds=(1.0,)), "1 seconds for 4 steps"),
    "no time": (dict(seconds=(1.0, 1.0, 0.0, 1.0)), "seconds=0.0 must be positive"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_steps_are_errors(what):
    changes, message = WRONG[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(LEVELS, **changes)
