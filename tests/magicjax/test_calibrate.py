"""Calibration: constants come back from times that they made, and the profile serves a plan."""

import dataclasses
import itertools

import numpy as np
import pytest

import models
from magicjax import cost_model
from magicjax.benchmarks.step_times import StepTimes
from magicjax.cli import calibrate
from magicjax.cli.calibrate import Timed, foretold
from tests.quick import quick

SIZES = cost_model.sizes_of(models.preset("llama-68m"), "float32", "llama-68m")
MEASURED = cost_model.Device("here", 2e10, 1e11, 1e10, None, dtype="float32", round_seconds=0.0)
# Shares that the search can name exactly.
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
    return [dataclasses.replace(row, seconds=foretold(SIZES, row, device)) for row in rows]


def test_constants_are_found_again_in_the_times_that_they_make():
    rows = rows_that(TRUE)
    found, times = calibrate.fit(SIZES, rows, MEASURED)
    for field in dataclasses.fields(found):
        true = getattr(TRUE, field.name)
        assert getattr(found, field.name) == (
            pytest.approx(true) if isinstance(true, float) else true
        )
    np.testing.assert_allclose(times, [row.seconds for row in rows])


def test_without_steps_of_tokens_the_same_times_cannot_be_fitted(monkeypatch):
    monkeypatch.setattr(calibrate, "TILES", (1,))
    rows = rows_that(TRUE)
    _, times = calibrate.fit(SIZES, rows, MEASURED)
    assert np.abs(times / [row.seconds for row in rows] - 1).max() > 0.05


def test_no_time_is_ever_fitted_as_negative():
    """Against every choice of two numbers from a grid, with times that ask for negative ones."""
    rng = np.random.default_rng(0)
    columns, wanted = rng.random((6, 2)), rng.normal(size=(50, 6))
    found = calibrate._non_negative(columns, wanted)
    assert (found >= 0).all() and (found == 0).any() and (found > 0).any()
    errors = ((found @ columns.T - wanted) ** 2).sum(1)
    grid = np.array([*itertools.product(np.linspace(0, 3, 61), repeat=2)])
    tried = ((grid @ columns.T)[:, None] - wanted) ** 2
    assert (errors <= tried.sum(2).min(0) + 1e-12).all()


def test_a_round_is_fitted_as_its_drafts_and_its_pass():
    round_s = foretold(SIZES, Timed(2, 512, 4, 64, 1.0), TRUE)
    cost = cost_model.round_cost(
        SIZES, cost_model.Draft(SIZES, 64), cost_model.Machine(TRUE), 2, 512, nodes=4, depth=3
    )
    assert round_s == pytest.approx(cost.total)
    plain = foretold(SIZES, Timed(2, 512, 1, None, 1.0), TRUE)
    assert plain == pytest.approx(cost.target)


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


def test_what_was_timed_becomes_a_table_for_each_model():
    passes, own, small = calibrate.steps_of(SIZES, DRAFTS, TIMES)
    assert (passes.model, passes.kind, passes.nodes) == (SIZES.key, cost_model.PASS, (1, 2, 4))
    assert dict(zip(passes.grid, passes.seconds, strict=True))[4, 512, 2] == 4 * 512 * 2
    assert (own.model, own.slots, own.seconds) == (SIZES.key, (64,), (2.0, 8.0))
    # With a budget the context does not matter, and the contexts' median counts.
    assert (small.model, small.batches, small.slots) == (SMALL.key, (1, 4), (256, 512, 1024))
    assert small.seconds == (768.5, 513, 1025, 770.0, 516, 1028)


def test_a_difference_that_noise_made_negative_stands_for_nothing():
    noisy = {
        place: dataclasses.replace(times, drafts={"self": -1.0}) for place, times in TIMES.items()
    }
    *_, own = calibrate.steps_of(SIZES, DRAFTS, noisy)
    assert own.seconds == (calibrate.SHORTEST,) * 2


def test_constants_are_fitted_to_passes_and_to_rounds_of_the_target_itself():
    rows = calibrate.rows_of(4, 512, TIMES[4, 512], {"self": 64}, 3)
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


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize("offload", quick([False, True], False))
def test_a_profile_is_written_and_serves_a_plan_here(directory, tmp_path, run, offload):
    out = tmp_path / "here.json"
    grid = ("--batch", 1, "--context", 64, "--nodes", 2, "--drafter", "self:streaming:32")
    where = ("--target", directory, "--dtype", "float32", *["--offload"] * offload)
    code, said, err = run("calibrate", *where, "--out", out, *grid, "--gamma", 1, "--turns", 1)
    assert (code, err) == (0, "")
    assert "ms of a pass by nodes  1:" in said and "self:streaming:32:" in said
    assert f"written to {out}" in said
    device = cost_model.load_profile(out)
    passes, draft = device.measured
    assert (passes.nodes, draft.slots) == ((1, 2), (32,))
    # A plan for the very place that was timed foretells what was timed.
    sizes = cost_model.sizes_of(models.load_config(directory), "float32", offload=offload)
    assert passes.model == sizes.key and ("streamed" in sizes.key) == offload
    cost = cost_model.round_cost(
        sizes, cost_model.Draft(sizes, 32), cost_model.Machine(device), 1, 64, 2, 1
    )
    assert cost.target == pytest.approx(passes.seconds[0])
    assert cost.verify + cost.rest == pytest.approx(passes.seconds[1])
    if draft.seconds[0] > calibrate.SHORTEST:
        assert cost.draft == pytest.approx(draft.seconds[0])
    else:  # noise ate it, and bytes say how short it is
        assert "self:streaming:32: lost in noise" in said
        constants = cost_model.Machine(dataclasses.replace(device, measured=()))
        by_bytes = cost_model.draft_step(cost_model.Draft(sizes, 32), constants, 1, 64)
        assert cost.draft == pytest.approx(sum(by_bytes.values()))
    assert ("constants for other models are not fitted" in said) == offload
    assert (device.bandwidth, device.matrix_rate, device.link) == (1e10, 1e11, None)
    plan = ("plan", *where, "--batch", 2, "--context", 64, "--device", out, "--acceptance", 0.8)
    code, said, err = run(*plan, "--drafter", "self:streaming:32")
    assert (code, err) == (0, "")
    assert "plain decoding: T_target" in said
    code, _, err = run(*plan, "--mesh", "model=2")
    assert code == 2 and "the link between devices of" in err


def test_matrix_products_are_timed_at_their_flops(monkeypatch):
    monkeypatch.setitem(calibrate.MATRIX_SIZE, "cpu", 64)
    monkeypatch.setattr(calibrate, "fastest_seconds", lambda calls, rounds: {"product": 0.5})
    assert calibrate.matrix_rate("float32") == 2 * 64**3 / 0.5


REFUSED = {
    "no profile": (["--out", "here.txt"], "--out here.txt: a profile is a .json file"),
    "one node": (["--out", "a.json", "--nodes", "1"], "--nodes 1 must be at least 2"),
    "no turn": (["--out", "a.json", "--turns", "0"], "--turns 0 must be at least 1"),
    "a drafter": (
        ["--out", "a.json", "--target", "DIR", "--drafter", "slef"],
        "'slef' is no drafter",
    ),
    "a budget": (
        [
            "--out",
            "a.json",
            "--target",
            "DIR",
            "--context",
            "100",
            "--drafter",
            "self:streaming:20",
        ],
        "too small a ring",
    ),
    "no model": (["--out", "a.json", "--target", "lama"], "is no directory"),
    "too long": (
        ["--out", "a.json", "--target", "DIR", "--context", "100", "9000"],
        "9000 tokens",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_options_are_refused_before_anything_is_measured(what, run, directory, monkeypatch):
    def measured(*arguments):
        raise AssertionError("measured")

    monkeypatch.setattr(calibrate, "read_bandwidth", measured)
    arguments, message = REFUSED[what]
    given = [directory if argument == "DIR" else argument for argument in arguments]
    code, _, err = run("calibrate", *given)
    assert code == 2 and message in err
