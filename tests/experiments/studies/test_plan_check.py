"""The table and summary of the plan check, and folders with cells of other settings."""

import dataclasses
import re

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


def test_cells_of_other_settings_are_not_mixed(settings, tmp_path):
    folder, made = tmp_path / "results", plan_check.made_by(settings)
    plan_check.check_folder(folder, made)
    other = plan_check.made_by(dataclasses.replace(settings, repeats=4, depths=(1, 2)))
    plan_check.check_folder(folder, other)  # there is no cell yet
    plan_check.check_folder(folder, made)
    (folder / "cells").mkdir()
    (folder / "cells" / "1-1024.json").write_text("{}")
    plan_check.check_folder(folder, made)  # a second run resumes
    more = dataclasses.replace(settings, batch=(2,), context=(512,))
    assert plan_check.made_by(more) == made
    with pytest.raises(ValueError, match="different depths, repeats: use another --results"):
        plan_check.check_folder(folder, other)
    cost_model.save_profile(settings.profile, cost_model.find_device("h100"), {})
    with pytest.raises(ValueError, match=re.escape("different profile: use")):
        plan_check.check_folder(folder, plan_check.made_by(settings))


def test_cells_of_unknown_settings_are_refused(settings, tmp_path):
    (tmp_path / "results" / "cells").mkdir(parents=True)
    (tmp_path / "results" / "cells" / "1-1024.json").write_text("{}")
    with pytest.raises(ValueError, match="different target, drafters"):
        plan_check.check_folder(tmp_path / "results", plan_check.made_by(settings))


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
