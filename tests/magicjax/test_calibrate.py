"""Calibration: constants come back from times that they made, and the profile serves a plan."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

import models
from magicjax import bench, calibrate, costs
from magicjax.calibrate import Timed, foretold

SIZES = costs.sizes_of(models.preset("llama-68m"), "float32", "llama-68m")
MEASURED = costs.Device("here", 2e10, 1e11, 1e10, None, "float32", round_seconds=0.0)
# Shares that the search can name exactly.
TRUE = dataclasses.replace(
    MEASURED,
    bandwidth_efficiency=float(calibrate.EFFICIENCIES[60]),
    matrix_efficiency=float(calibrate.EFFICIENCIES[40]),
    layer_seconds=2e-4,
    round_seconds=3e-3,
    tile=4,
)


def rows_of(device):
    places = itertools.product((1, 8), (512, 8192))
    steps = [(1, None), (2, None), (4, None), (5, None), (9, None), (4, 64), (4, 256)]
    rows = [Timed(*place, *step, 1.0) for place in places for step in steps]
    return [dataclasses.replace(row, seconds=foretold(SIZES, row, device)) for row in rows]


def test_constants_are_found_again_in_the_times_that_they_make():
    rows = rows_of(TRUE)
    found, times = calibrate.fit(SIZES, rows, MEASURED)
    for field in dataclasses.fields(found):
        true = getattr(TRUE, field.name)
        assert getattr(found, field.name) == (
            pytest.approx(true) if isinstance(true, float) else true
        )
    np.testing.assert_allclose(times, [row.seconds for row in rows])


def test_without_steps_of_tokens_the_same_times_cannot_be_fitted(monkeypatch):
    monkeypatch.setattr(calibrate, "TILES", (1,))
    rows = rows_of(TRUE)
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
    cost = costs.round_cost(
        SIZES, costs.Draft(SIZES, 64), costs.Machine(TRUE), 2, 512, nodes=4, depth=3
    )
    assert round_s == pytest.approx(cost.total)
    plain = foretold(SIZES, Timed(2, 512, 1, None, 1.0), TRUE)
    assert plain == pytest.approx(cost.target)


def test_of_several_turns_the_shortest_time_counts(monkeypatch):
    turns = iter(
        [
            bench.Times(target=3.0, verify={2: 5.0, 4: 7.0}, draft={(64, 3): 1.0}),
            bench.Times(target=4.0, verify={2: 4.0, 4: 8.0}, draft={(64, 3): 0.5}),
        ]
    )
    monkeypatch.setattr(bench, "measure", lambda *arguments: next(turns))
    grid = [2], [512], [2], [64]
    rows = calibrate.timed_grid(None, *grid, gamma=3, turns=2)
    assert rows == [
        Timed(2, 512, 1, None, 3.0),
        Timed(2, 512, 2, None, 4.0),
        Timed(2, 512, 4, None, 7.0),
        Timed(2, 512, 4, 64, 9.5),  # 8 + 3 x 0.5, less than 7 + 3 x 1
    ]
    assert [row.name for row in rows] == ["plain", "verify 2", "verify 4", "round 64"]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(calibrate, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(calibrate, "matrix_rate", lambda dtype: 1e11)


@pytest.mark.usefixtures("quick")
def test_a_profile_is_written_and_serves_a_plan_here(directory, tmp_path, run):
    out = tmp_path / "here.json"
    grid = ("--batch", 1, "--context", 64, "--nodes", 2, "--budget", 32, "--gamma", 1)
    where = ("--target", directory, "--dtype", "float32")
    code, said, err = run("calibrate", *where, "--out", out, *grid, "--steps", 1, "--turns", 1)
    assert (code, err) == (0, "")
    assert "plain" in said and "round 32" in said and f"written to {out}" in said
    assert len(json.loads(out.read_text())["measured"]["rows"]) == 3
    device = costs.load_profile(out)
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
