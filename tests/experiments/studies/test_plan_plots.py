"""Plots of plans show what the planner predicts, and no point without measured acceptance."""

import numpy as np
import pytest

from experiments.studies import cost_tables, plan_plots
from magicjax import planner


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(plan_plots, "BATCHES", (1, 64, 256))
    monkeypatch.setattr(plan_plots, "CONTEXTS", (1000, 32000))
    monkeypatch.setattr(plan_plots, "LINES", (1, 64))


def study(**given):
    defaults = {"target": "llama-3.1-8b", "device": "a100", "gpus": 8, "dtype": "bfloat16"}
    options = defaults | {"acceptance": None, "drafter": None} | given
    return plan_plots.study_of(plan_plots.argparse.Namespace(**options))


@pytest.mark.usefixtures("small")
def test_all_plots_are_written_and_listed(tmp_path, capsys):
    out = tmp_path / "plots"
    arguments = ["--target", "llama-3.1-8b", "--device", "a100", "--gpus", "8", "--out", str(out)]
    assert plan_plots.main(arguments) == 0
    names = ["speedup", "best", "break_even", "time_split", "inflection"]
    assert capsys.readouterr().out.split() == [str(out / f"{name}.png") for name in names]
    assert sorted(p.name for p in out.iterdir()) == sorted(f"{name}.png" for name in names)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in out.iterdir())


@pytest.mark.usefixtures("small")
def test_cells_show_what_the_planner_predicts():
    mine = study()
    found = plan_plots.plans(mine)
    assert set(found) == {(b, c) for b in (1, 64, 256) for c in (1000, 32000)} - {(256, 32000)}
    drawn = [text.get_text() for text in plan_plots.speedups(mine, found).axes[0].texts]
    assert "memory" in drawn
    assert {f"{plan.best.speedup:.2f}" for plan in found.values()} == {*drawn} - {"memory"}
    best = [text.get_text() for text in plan_plots.best(mine, found).axes[0].texts]
    assert ("off" in best) == any(not plan.speculate for plan in found.values())
    even = [text.get_text() for text in plan_plots.break_evens(mine, found).axes[0].texts]
    candidate = mine.candidate(32000)
    rate = planner.break_even(mine.target, candidate, mine.machine, 64, 32000)
    assert f"{rate:.2f}" in even and "never" in even


@pytest.mark.usefixtures("small")
def test_the_parts_of_a_round_fill_its_bar():
    axes = plan_plots.time_split(study()).axes[0]
    tops = {}
    for bar in axes.patches:
        x = round(bar.get_x() + bar.get_width() / 2)
        tops[x] = tops.get(x, 0.0) + bar.get_height()
    np.testing.assert_allclose(list(tops.values()), 1.0)


@pytest.mark.usefixtures("small")
def test_the_inflection_is_marked_where_the_claim_turns(monkeypatch):
    ends = cost_tables.CLAIM_BATCHES[0], cost_tables.CLAIM_BATCHES[-1]
    monkeypatch.setattr(plan_plots, "LINES", ends)
    _, turn = cost_tables.claim()
    (said,) = [text.get_text() for text in plan_plots.inflections(study()).axes[0].texts]
    assert said == f"inflection: {turn:,.0f}\n(batch {ends[1]} overtakes {ends[0]})"


def test_acceptance_of_drafts_without_any_follows_from_their_tokens_per_step():
    found = {(m.drafter, m.context): m.acceptance for m in cost_tables.published_acceptance()}
    assert found["self:streaming:512", 32000] == ((0.81,),)  # published, not solved for
    (snapkv,), (small,) = (
        found[name, 32000] for name in ("self:snapkv:2049", "small:llama-3.2-1b:streaming:512")
    )
    of_batches = {3: 3.41, 4: 4.03, 5: 4.55, 6: 5.07}
    rates = [planner.required_acceptance(tokens, gamma) for gamma, tokens in of_batches.items()]
    for rate, (gamma, tokens) in zip(rates, of_batches.items(), strict=True):
        assert (1 - rate ** (gamma + 1)) / (1 - rate) == pytest.approx(tokens)
    assert snapkv[0] == pytest.approx(np.mean(rates))
    assert small[0] < 0.7 < snapkv[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "llama-2-7b"}, "--acceptance is missing for llama-2-7b: pass a rate"),
        ({"device": "a10x"}, "device 'a10x' is unknown"),
        (
            {"drafter": "prompt-lookup"},
            "--drafter prompt-lookup: acceptance is measured for self:streaming:512",
        ),
        ({"gpus": 3}, "does not divide the 8 KV heads"),
        ({"acceptance": "none.csv"}, "none.csv does not exist"),
    ],
)
def test_invalid_options_exit_with_a_message(given, message, capsys, tmp_path):
    options = [f"--{name}={value}" for name, value in given.items()]
    with pytest.raises(SystemExit):
        plan_plots.main([*options, "--out", str(tmp_path)])
    assert message in " ".join(capsys.readouterr().err.split())
