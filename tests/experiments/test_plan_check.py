"""The planner's check: its table's lines and sentences, and folders that are not mixed."""

import dataclasses
import re

import pandas as pd
import pytest

from experiments.studies import plan_check
from magicjax import cost_model

FOUND = {
    "chosen": "self:streaming:64, chain:4",
    "planned": "self:streaming:64, chain:4",
    "foretold": 1.2,
    "expected": 1.4,
    "measured": 1.5,
    "best": "look-up:4, chain:2",
    "best_speed_up": 1.6,
    "chosen_speed_up": 1.5,
    "auto_speed_up": 1.55,
}
OFF = FOUND | {"chosen": "off", "measured": 0.8, "best_speed_up": 0.9, "chosen_speed_up": 1.0}


def test_a_line_says_how_near_the_choice_is_and_how_much_was_foretold():
    row = plan_check.row_of(4, 1024, FOUND)
    assert row["choice / best"] == pytest.approx(1.5 / 1.6)
    assert row["error"] == pytest.approx(1.2 / 1.5 - 1)
    assert row["error of expected"] == pytest.approx(1.4 / 1.5 - 1)


def test_off_is_compared_with_plain_decoding_where_all_is_slower_and_with_what_gains_elsewhere():
    assert plan_check.row_of(4, 1024, OFF)["choice / best"] == 1.0
    missed = plan_check.row_of(4, 1024, OFF | {"best_speed_up": 1.25})
    assert missed["choice / best"] == pytest.approx(0.8)
    assert missed["error"] == pytest.approx(1.2 / 0.8 - 1)  # what it did not choose was timed too


def test_what_was_never_planned_is_no_error():
    nothing = OFF | dict.fromkeys(["planned", "foretold", "expected", "measured"])
    table = pd.DataFrame([plan_check.row_of(1, 1024, each) for each in (FOUND, nothing)])
    assert plan_check.summary(table) == (
        "choice / best: at least 0.938; foretold against measured speed-up: mean error 20.0%, "
        "largest 20.0% (1 cells); expected against measured speed-up: mean error 6.7%, largest "
        "6.7% (1 cells); auto / plain: at least 1.550"
    )


@pytest.fixture
def settings(tmp_path):
    profile = tmp_path / "here.json"
    cost_model.save_profile(profile, cost_model.find_device("h200"), {})
    return plan_check.Settings(profile=str(profile), results=str(tmp_path / "results"))


def test_cells_that_were_made_otherwise_are_not_mixed(settings, tmp_path):
    folder, made = tmp_path / "results", plan_check.made_by(settings)
    plan_check.check_folder(folder, made)
    other = plan_check.made_by(dataclasses.replace(settings, turns=4, depths=(1, 2)))
    plan_check.check_folder(folder, other)  # there is no cell yet
    plan_check.check_folder(folder, made)
    (folder / "cells").mkdir()
    (folder / "cells" / "1-1024.json").write_text("{}")
    plan_check.check_folder(folder, made)  # a second run goes on
    more = dataclasses.replace(settings, batch=(2,), context=(512,))
    assert plan_check.made_by(more) == made
    with pytest.raises(ValueError, match="another depths, turns: give another --results"):
        plan_check.check_folder(folder, other)
    cost_model.save_profile(settings.profile, cost_model.find_device("h100"), {})
    with pytest.raises(ValueError, match=re.escape("another profile: give")):
        plan_check.check_folder(folder, plan_check.made_by(settings))


def test_cells_of_which_nothing_is_known_are_not_gone_on_with(settings, tmp_path):
    (tmp_path / "results" / "cells").mkdir(parents=True)
    (tmp_path / "results" / "cells" / "1-1024.json").write_text("{}")
    with pytest.raises(ValueError, match="another target, drafters"):
        plan_check.check_folder(tmp_path / "results", plan_check.made_by(settings))


def test_a_profile_that_is_not_there_is_refused_before_anything_is_loaded(settings, monkeypatch):
    monkeypatch.setattr(plan_check.magicjax, "load", None)
    missing = dataclasses.replace(settings, profile="no.json")
    with pytest.raises(
        SystemExit, match=r"the profile no\.json does not exist.*magicjax calibrate"
    ):
        plan_check.main(missing)


def test_a_target_or_a_drafter_that_is_not_there_ends_it_with_one_line(settings):
    for wrong, said in (({"target": "no/such"}, "no/such"), ({"drafters": ("selv",)}, "selv")):
        with pytest.raises(SystemExit, match=said):
            plan_check.main(dataclasses.replace(settings, **wrong))
