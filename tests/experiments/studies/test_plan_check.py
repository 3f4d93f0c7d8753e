"""The table and summary of the plan check, and folders with cells of other settings."""

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.studies import plan_check
from magicjax import cost_model

FOUND = {
    "chosen": "self:streaming:64, chain:4",
    "pick": "self:streaming:64, chain:4",
    "predicted": 1.2,
    "timed": 1.4,
    "measured": 1.5,
    "best": "prompt-lookup:4, chain:2",
    "best_speedup": 1.6,
    "chosen_speedup": 1.5,
    "auto_speedup": 1.55,
}
OFF = FOUND | {"chosen": "off", "measured": 0.8, "best_speedup": 0.9, "chosen_speedup": 1.0}


def test_a_row_has_the_relative_speedup_of_the_choice_and_the_errors():
    row = plan_check.row_of(4, 1024, FOUND)
    assert row["chosen / best"] == pytest.approx(1.5 / 1.6)
    assert row["error of prediction"] == pytest.approx(1.2 / 1.5 - 1)
    assert row["error of timing"] == pytest.approx(1.4 / 1.5 - 1)


def test_off_is_compared_with_the_faster_of_plain_decoding_and_the_grid():
    assert plan_check.row_of(4, 1024, OFF)["chosen / best"] == 1.0
    missed = plan_check.row_of(4, 1024, OFF | {"best_speedup": 1.25})
    assert missed["chosen / best"] == pytest.approx(0.8)
    assert missed["error of prediction"] == pytest.approx(1.2 / 0.8 - 1)  # off, but timed


def test_cells_without_a_pick_do_not_count_in_the_errors():
    nothing = OFF | dict.fromkeys(["pick", "predicted", "timed", "measured"])
    table = pd.DataFrame([plan_check.row_of(1, 1024, each) for each in (FOUND, nothing)])
    assert plan_check.summary(table) == (
        "chosen / best: at least 0.938; error of prediction: mean 20.0%, largest 20.0% (1 cells); "
        "error of timing: mean 6.7%, largest 6.7% (1 cells); auto / plain: at least 1.550"
    )


@pytest.fixture
def settings(tmp_path):
    profile = tmp_path / "here.json"
    cost_model.save_profile(profile, cost_model.find_device("h200"), {})
    return plan_check.Settings(profile=str(profile), results=str(tmp_path / "results"))


def test_cells_of_other_settings_are_not_mixed(settings):
    made = plan_check.made_by(settings)
    more = dataclasses.replace(settings, batch=(2,), context=(512,))
    assert plan_check.made_by(more) == made
    for changes in ({"repeats": 4}, {"depths": (1, 2)}):
        assert plan_check.made_by(dataclasses.replace(settings, **changes)) != made
    cost_model.save_profile(settings.profile, cost_model.find_device("h100"), {})
    assert plan_check.made_by(settings) != made


def test_a_finished_cell_is_not_measured_again(settings, monkeypatch):
    measured = []
    target = SimpleNamespace(tokenizer=None)
    monkeypatch.setattr(plan_check.magicjax, "load", lambda *arguments, **options: target)
    monkeypatch.setattr(plan_check.prompts, "make", lambda *arguments: [])
    monkeypatch.setattr(plan_check, "measure", lambda *a: measured.append(a[0].repeats) or FOUND)
    one = dataclasses.replace(settings, batch=(1,), context=(1024,), drafters=("prompt-lookup:4",))
    for repeats in (8, 8, 4, 8):
        plan_check.main(dataclasses.replace(one, repeats=repeats))
    assert measured == [8, 4]


def test_a_missing_profile_is_refused_before_loading(settings, monkeypatch):
    monkeypatch.setattr(plan_check.magicjax, "load", None)
    missing = dataclasses.replace(settings, profile="no.json")
    with pytest.raises(
        SystemExit, match=r"the profile no\.json does not exist.*magicjax calibrate"
    ):
        plan_check.main(missing)


def test_an_invalid_target_or_drafter_ends_the_command_with_one_line(settings):
    for wrong, said in (({"target": "no/such"}, "no/such"), ({"drafters": ("selv",)}, "selv")):
        with pytest.raises(SystemExit, match=said):
            plan_check.main(dataclasses.replace(settings, **wrong))
