"""Calibration: the fit recovers constants from predicted times, and plans use the profile."""

import dataclasses
import itertools

import numpy as np
import pytest

import models
from magicjax.benchmarks.step_times import StepTimes
from magicjax.cli import calibrate
from magicjax.cli.calibrate import Timed, predicted
from magicjax.prediction import cost_model
from tests.quick import quick

SIZES = cost_model.sizes_of(models.preset("llama-68m"), "float32", "llama-68m")
MEASURED = cost_model.Device("here", 2e10, 1e11, 1e10, None, dtype="float32", round_seconds=0.0)
# Efficiencies on the grid of the search.
TRUE = dataclasses.replace(
    MEASURED,
    bandwidth_efficiency=float(calibrate.EFFICIENCIES[60]),
    matrix_efficiency=float(calibrate.EFFICIENCIES[40]),
    layer_seconds=2e-4,
    round_seconds=3e-3,
    tile=4,
)


def rows_that(device):
    places = itertools.product((1, 8), (512, 8192))
    steps = [(1, None), (2, None), (4, None), (5, None), (9, None), (4, 64), (4, 256)]
    rows = [Timed(*place, *step, 1.0) for place in places for step in steps]
    return [dataclasses.replace(row, seconds=predicted(SIZES, row, device)) for row in rows]


def test_the_fit_recovers_the_constants_of_predicted_times():
    rows = rows_that(TRUE)
    found, times = calibrate.fit(SIZES, rows, MEASURED)
    for field in dataclasses.fields(found):
        true = getattr(TRUE, field.name)
        assert getattr(found, field.name) == (
            pytest.approx(true) if isinstance(true, float) else true
        )
    np.testing.assert_allclose(times, [row.seconds for row in rows])


def test_fitted_times_are_never_negative(monkeypatch):
    """They are the best of a grid of pairs, for times that would be fitted by negative ones."""
    monkeypatch.setattr(calibrate, "TILES", (1,))
    monkeypatch.setattr(calibrate, "EFFICIENCIES", np.ones(1))
    limits = dict(bandwidth_efficiency=1.0, matrix_efficiency=1.0)
    ideal = dataclasses.replace(MEASURED, layer_seconds=0.0, round_seconds=0.0, **limits)
    rows, rng, fitted = rows_that(ideal), np.random.default_rng(0), []
    work = np.array([row.seconds for row in rows])
    layers = [sum(part.layers for part in calibrate._parts(SIZES, row, MEASURED)) for row in rows]
    overheads = np.array([*zip(layers, (row.nodes > 1 for row in rows), strict=True)])
    grid = np.array([*itertools.product(np.linspace(0, 1e-3, 61), np.linspace(0, 1e-2, 61))])
    for _ in range(20):
        seconds = work * rng.uniform(0.8, 1.3, len(rows))
        noisy = [dataclasses.replace(row, seconds=s) for row, s in zip(rows, seconds, strict=True)]
        device, _ = calibrate.fit(SIZES, noisy, MEASURED)
        times = np.array([[device.layer_seconds, device.round_seconds]])
        errors = [
            (((work + each @ overheads.T) / seconds - 1) ** 2).sum(1) for each in (times, grid)
        ]
        assert errors[0] <= errors[1].min() + 1e-12
        fitted.append(times)
    assert (np.array(fitted) >= 0).all() and (np.array(fitted) == 0).any()


TIMES = {
    (batch, context): StepTimes(
        passes={n: batch * context * n for n in (1, 2, 4)},
        drafts={"self": 2.0 * batch, "small": context + batch, "streaming": 0.5 * batch + context},
        rounds={"self": 9.0, "small": 8.0, "streaming": 7.0},
    )
    for batch in (1, 4)
    for context in (512, 1024)
}
SMALL = cost_model.sizes_of(models.preset("tinyllama-1.1b"), "float32", "tinyllama-1.1b")
DRAFTS = {
    "self": cost_model.Draft(SIZES, 64),
    "small": cost_model.Draft(SMALL),
    "streaming": cost_model.Draft(SMALL, 256),
}


def test_constants_are_fitted_to_passes_and_self_speculation_rounds():
    rows = calibrate.rows_of(SIZES, DRAFTS, {(4, 512): TIMES[4, 512]}, 3)
    assert rows[1:] == [
        Timed(4, 512, 2, None, 4096),
        Timed(4, 512, 4, None, 8192),
        Timed(4, 512, 4, 64, 9.0),
    ]
    assert rows[0] == Timed(4, 512, 1, None, 2048)


@pytest.fixture
def rates(monkeypatch):
    monkeypatch.setattr(calibrate, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(calibrate, "matrix_rate", lambda dtype: 1e11)


@pytest.mark.slow
@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize("offload", quick([False, True], False))
def test_calibrate_writes_a_profile_that_plan_uses(directory, tmp_path, run, offload):
    out = tmp_path / "here.json"
    grid = ("--batch", 1, "--context", 64, "--nodes", 2, "--drafter", "self:streaming:32")
    where = ("--target", directory, "--dtype", "float32", *["--offload"] * offload)
    code, said, err = run("calibrate", *where, "--out", out, *grid, "--gamma", 1, "--repeats", 1)
    assert (code, err) == (0, "")
    assert "ms per pass, by nodes  1:" in said and "self:streaming:32:" in said
    assert f"wrote {out}" in said
    device = cost_model.load_profile(out)
    passes, draft = device.measured
    assert (passes.nodes, draft.slots) == ((1, 2), (32,))
    # A plan for the timed batch and context predicts the measured times.
    sizes = cost_model.sizes_of(models.load_config(directory), "float32", offload=offload)
    assert passes.model == sizes.key and ("streamed" in sizes.key) == offload
    cost = cost_model.round_cost(
        sizes, cost_model.Draft(sizes, 32), cost_model.Machine(device), 1, 64, 2, 1
    )
    assert cost.target == pytest.approx(passes.seconds[0])
    assert cost.verify + cost.rest == pytest.approx(passes.seconds[1])
    if draft.seconds[0] > calibrate.SHORTEST:
        assert cost.draft == pytest.approx(draft.seconds[0])
    else:  # too short to measure: the roofline predicts it
        assert "self:streaming:32: below noise" in said
        constants = cost_model.Machine(dataclasses.replace(device, measured=()))
        by_bytes = cost_model.draft_step(cost_model.Draft(sizes, 32), constants, 1, 64)
        assert cost.draft == pytest.approx(sum(by_bytes.values()))
    assert ("constants for other models: not fitted" in said) == offload
    assert (device.bandwidth, device.matrix_rate, device.link) == (1e10, 1e11, None)
    plan = ("plan", *where, "--batch", 2, "--context", 64, "--device", out, "--acceptance", 0.8)
    code, said, err = run(*plan, "--drafter", "self:streaming:32")
    assert (code, err) == (0, "")
    assert "plain decoding: predicted T_target" in said
    code, _, err = run(*plan, "--mesh", "model=2")
    assert code == 2 and "the link between devices of" in err


REFUSED = {
    "no profile": (["--out", "here.txt"], "--out here.txt must be a .json file"),
    "one node": (["--out", "a.json", "--nodes", "1"], "--nodes 1 must be at least 2"),
    "too long": (
        ["--out", "a.json", "--target", "DIR", "--context", "100", "9000"],
        "--context 9000 exceeds the 512 positions of DIR, of which a timed loop needs 145: use "
        "at most 367",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_options_are_errors_before_measurement(what, run, directory, monkeypatch):
    def measured(*arguments):
        raise AssertionError("measured")

    monkeypatch.setattr(calibrate, "read_bandwidth", measured)
    arguments, message = REFUSED[what]
    given = [directory if argument == "DIR" else argument for argument in arguments]
    code, _, err = run("calibrate", *given)
    assert code == 2 and message.replace("DIR", str(directory)) in err
