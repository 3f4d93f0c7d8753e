"""The study of weights in host memory: speedups from times, predictions, and a run."""

import dataclasses
import json

import pytest

from experiments.studies import offloading
from experiments.studies.offloading import Times
from magicjax import cost_model


def options(*arguments):
    return offloading.parser().parse_args(arguments)


def test_published_figures_are_means_of_the_greedy_rows():
    tokens, rates = offloading.published()
    assert tokens[1] == pytest.approx((2.95 + 2.58 + 2.27 + 2.73 + 2.18) / 5)
    assert rates[0] == pytest.approx((0.68 + 0.69 + 0.62 + 0.70 + 0.63) / 5)
    assert sum(rates) == pytest.approx((0.85 + 0.87 + 0.82 + 0.89 + 0.85) / 5)


def test_speedup_is_tokens_times_a_plain_step_over_a_round():
    assert [offloading.tree_nodes(width) for width in offloading.WIDTHS] == [9, 15, 21, 27, 33]
    times = Times(passes={1: 2.0} | {n: 2.5 for n in (9, 15, 21, 27, 33)}, draft=0.125)
    rows = offloading.speedups(4, times)
    tokens, _ = offloading.published()
    assert [row["speedup"] for row in rows] == pytest.approx([2 * tokens[w] / 3.5 for w in tokens])


def test_the_best_number_of_nodes_depends_on_their_cost():
    def best(passes):
        rows = offloading.by_nodes(options("--nodes", "1", "2", "8", "64"), 1, Times(passes, 0.0))
        assert rows[0]["τ (positional model)"] == 1 and rows[0]["depth"] == 0
        return max(rows, key=lambda row: row["tokens/s"])["nodes"]

    assert best(dict.fromkeys((1, 2, 8, 64), 1.0)) == 64
    assert best({1: 1.0, 2: 1.1, 8: 1.3, 64: 8.0}) == 8
    assert best({1: 1.0, 2: 2.0, 8: 8.0, 64: 64.0}) == 1


def test_predicted_speedups_are_near_tau_if_the_link_dominates(capsys, tmp_path):
    """A round costs about one pass, so the speedup is nearly τ, as the paper's 2.6 to 3.5."""
    out = tmp_path / "out.json"
    models = ("--target", "opt-13b", "--draft", "opt-125m")
    offloading.main([*models, "--predict", "a10", "--batch", "1", "16", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "PREDICTED for one a10" in printed and "SYNTHETIC acceptance" in printed
    rows = [row for row in json.loads(out.read_text())["rows"] if row["table"] == "speedup"]
    tokens, _ = offloading.published()
    assert {row["batch"] for row in rows} == {1, 16}
    for row in rows:
        assert 0.97 * tokens[row["width"]] < row["speedup"] < tokens[row["width"]]


def test_the_overhead_of_a_round_is_predicted():
    device = cost_model.find_device("a10")
    slow = dataclasses.replace(device, round_seconds=device.round_seconds + 1)
    quick, slow = (
        offloading.predicted(options(), "opt-13b", "opt-125m", each, 1, True)
        for each in (device, slow)
    )
    assert slow.passes[1] == quick.passes[1] and slow.draft == quick.draft
    assert slow.passes[9] == pytest.approx(quick.passes[9] + 1)


def test_each_target_needs_a_draft(capsys):
    with pytest.raises(SystemExit):
        offloading.main(["--target", "opt-13b", "opt-30b", "--draft", "opt-125m"])
    assert "1 --draft for 2 --target: give one for each" in capsys.readouterr().err


@pytest.mark.slow
def test_an_offloaded_model_is_timed(capsys, tmp_path):
    out = tmp_path / "out.json"
    zoo = "experiments/zoo/"
    offloading.main(
        [
            *("--target", f"{zoo}target", "--draft", f"{zoo}draft-1", "--dtype", "float32"),
            *("--batch", "1", "--nodes", "1", "4", "--repeats", "2", "--out", str(out)),
        ]
    )
    rows = json.loads(out.read_text())["rows"]
    assert {row["table"] for row in rows} == {"link", "speedup", "nodes"}
    assert all(row["share"] > 0 for row in rows if row["table"] == "link")
    assert "batch 1: best with" in capsys.readouterr().out
