"""The launcher's promises, on a bench that answers at once."""

import csv
import importlib.metadata
import importlib.util
import io
import json
import sys

import pytest
from rich.console import Console

from experiments import config, launch, measure


def experiment(tmp_path, **changes):
    settings = {
        "name": "mine",
        "results": str(tmp_path),
        "new_tokens": 16,
        "shapes": [{"batch": [1, 2], "context": 8}],
        "methods": [
            {"draft": "self", "tree": "chain:3"},
            {"draft": "small", "model": "draft-1", "tree": "expansion:2,1"},
        ],
    }
    return config.validate(settings | changes, "test")


def console():
    return Console(file=io.StringIO(), width=200)


def summary(tmp_path):
    with (tmp_path / "mine" / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def test_cells_of_a_group_take_turns_and_plain_decoding_opens_each(tmp_path, scripted):
    bench = scripted()
    launch.run(experiment(tmp_path, shapes=[{"batch": 1, "context": 8}]), console(), bench)
    assert [cell.draft for cell in bench.ran] == ["none", "self", "small"] * 4  # 1 + 3 repeats


def test_a_run_writes_summary_plot_and_a_record_for_each_cell(tmp_path, scripted):
    mine, out = experiment(tmp_path), console()
    launch.publish(mine, launch.run(mine, out, scripted()), out)
    rows = summary(tmp_path)
    assert [(r["batch"], r["draft"]) for r in rows] == [
        (batch, draft) for batch in "12" for draft in ("none", "self", "small")
    ]
    assert {r["status"] for r in rows} == {"ok"}
    self_row = rows[1]
    assert float(self_row["speedup"]) == 2.0
    assert float(self_row["decode_tok_s"]) == 32.0
    assert float(self_row["ar_decode_tok_s"]) == 16.0
    assert float(self_row["exact_match"]) == 1.0
    assert float(self_row["compile_s"]) == 3.0
    assert (self_row["gamma"], self_row["nodes"], self_row["repeat"]) == ("3", "4", "3")
    assert float(self_row["round_ms"]) == 500 / 16
    assert self_row["prompts"] == "held_out"
    assert len(list((tmp_path / "mine" / "cells").glob("*.json"))) == 6
    assert (tmp_path / "mine" / "speedup.png").read_bytes().startswith(b"\x89PNG")
    assert "2.00×" in out.file.getvalue()


def test_without_repeats_every_cell_runs_once_and_nothing_is_timed(tmp_path, scripted):
    bench, out = scripted(), console()
    methods = [{"draft": "self", "policy": ["snapkv", "h2o"], "kv_budget": [8, 16]}]
    mine = experiment(tmp_path, repeats=0, methods=methods)
    folder = launch.publish(mine, launch.run(mine, out, bench), out)
    assert len(bench.ran) == len(set(bench.ran)) == 2 * (1 + 4)
    for row in summary(tmp_path):
        assert (row["status"], row["exact_match"]) == ("ok", "1.0")
        assert row["tau"] and not any(row[name] for name in measure.TIMES if name in row)
    assert not (folder / "speedup.png").exists()
    assert (folder / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    assert "acceptance.png" in out.file.getvalue()


def test_a_plot_of_an_earlier_grid_does_not_stay_beside_other_results(tmp_path, scripted):
    methods = [{"draft": "self", "kv_budget": [8, 16]}]
    for changes, plots in (
        ({"methods": methods}, {"speedup.png", "acceptance.png"}),
        ({"methods": methods, "repeats": 0}, {"acceptance.png"}),
        ({}, {"speedup.png"}),
    ):
        mine = experiment(tmp_path, **changes)
        folder = launch.publish(mine, launch.run(mine, console(), scripted()), console())
        assert {path.name for path in folder.glob("*.png")} == plots


def test_a_row_says_what_the_drafts_cache_keeps(tmp_path, scripted):
    methods = [
        {"draft": "self", "policy": "snapkv", "refresh_every": [0, 4], "kv_dtype": ["", "int8"]},
        {"draft": "self", "policy": "full"},
        {"draft": "small", "model": "draft-1", "policy": "streaming", "sink_positions": "in_cache"},
    ]
    mine = experiment(tmp_path, methods=methods, shapes=[{"batch": 1, "context": 8}])
    launch.publish(mine, launch.run(mine, console(), scripted()), console())
    names = ("policy", "kv_budget", "refresh_every", "kv_dtype", "sink_positions", "sinks")
    assert [tuple(row[name] for name in names) for row in summary(tmp_path)] == [
        ("", "", "", "", "", ""),
        ("snapkv", "256", "", "", "", ""),
        ("snapkv", "256", "", "int8", "", ""),
        ("snapkv", "256", "4", "", "", ""),
        ("snapkv", "256", "4", "int8", "", ""),
        ("full", "", "", "", "", ""),
        ("streaming", "256", "", "", "in_cache", "16"),
    ]


def test_a_result_does_not_outlive_the_code_of_a_policy_of_another_package(
    tmp_path, scripted, monkeypatch
):
    code = "import magicjax\nclass Mine(magicjax.Policy): pass\n"
    source = tmp_path / "mine_policy.py"

    def install(text):
        source.write_text(text)
        spec = importlib.util.spec_from_file_location("mine_policy", source)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mine_policy", module)
        spec.loader.exec_module(module)

    point = importlib.metadata.EntryPoint("mine", "mine_policy:Mine", "magicjax.policies")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    for text, measured in ((code, 4), (code, 0), (code + "# another\n", 4)):
        install(text)
        bench = scripted()
        mine = experiment(tmp_path, methods=[{"draft": "self", "policy": "mine"}])
        launch.run(mine, console(), bench)
        assert len({(c.batch, c.draft) for c in bench.ran}) == measured


def test_finished_cells_are_not_measured_again_and_their_rows_stay(tmp_path, scripted):
    mine = experiment(tmp_path)
    first = launch.run(mine, console(), scripted())
    again = scripted()
    second = launch.run(mine, console(), again)
    assert again.ran == []
    assert [r["row"] for r in first] == [r["row"] for r in second]
    anew = scripted()
    launch.run(experiment(tmp_path, fresh=True), console(), anew)
    assert len(anew.ran) == 6 * 4


def test_what_is_missing_is_measured_beside_plain_decoding(tmp_path, scripted):
    launch.run(experiment(tmp_path), console(), scripted())
    more = scripted()
    methods = [{"draft": "self", "tree": ["chain:3", "chain:5"]}]
    records = launch.run(experiment(tmp_path, methods=methods), console(), more)
    assert {(cell.draft, cell.tree) for cell in more.ran} == {("none", ""), ("self", "chain:5")}
    assert len(records) == 6


def test_a_killed_run_keeps_what_was_finished_and_leaves_no_half_record(tmp_path, scripted):
    def killed(cell):
        if cell.batch == 2 and cell.draft == "small":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.run(experiment(tmp_path), console(), scripted(killed))
    files = list((tmp_path / "mine" / "cells").iterdir())
    assert len(files) == 3 and all(json.loads(f.read_text())["row"]["batch"] == 1 for f in files)
    rest = scripted()
    records = launch.run(experiment(tmp_path), console(), rest)
    assert {cell.batch for cell in rest.ran} == {2}
    assert [r["row"]["status"] for r in records] == ["ok"] * 6


def test_a_run_killed_in_the_last_turn_keeps_the_cells_that_had_ended(tmp_path, scripted):
    calls = []

    def killed(cell):
        calls.append(cell)
        if len(calls) == 4 * 3:  # the last cell's last run
            raise KeyboardInterrupt

    one = {"shapes": [{"batch": 1, "context": 8}]}
    with pytest.raises(KeyboardInterrupt):
        launch.run(experiment(tmp_path, **one), console(), scripted(killed))
    files = (tmp_path / "mine" / "cells").iterdir()
    assert {json.loads(f.read_text())["row"]["draft"] for f in files} == {"none", "self"}


def test_a_cell_that_fails_is_recorded_with_its_error_and_the_grid_goes_on(tmp_path, scripted):
    def fails(cell):
        if cell.draft == "self" and cell.batch == 1:
            raise ValueError("budget=8 leaves no ring:\n it must be larger")

    mine, out = experiment(tmp_path), console()
    launch.publish(mine, launch.run(mine, out, scripted(fails)), out)
    rows = summary(tmp_path)
    assert [r["status"] for r in rows] == ["ok", "failed", "ok", "ok", "ok", "ok"]
    assert rows[1]["error"] == "ValueError: budget=8 leaves no ring: it must be larger"
    assert rows[1]["speedup"] == ""
    assert "budget=8 leaves no ring" in out.file.getvalue()
    failed = [
        record
        for path in (tmp_path / "mine" / "cells").glob("*.json")
        if (record := json.loads(path.read_text()))["row"]["status"] == "failed"
    ]
    assert len(failed) == 1 and "Traceback" in failed[0]["trace"]
    repaired = scripted()
    launch.run(mine, console(), repaired)  # failures are tried again
    assert {(c.batch, c.draft) for c in repaired.ran} == {(1, "none"), (1, "self")}


def test_without_plain_decoding_no_cell_of_its_group_counts(tmp_path, scripted):
    def fails(cell):
        if cell.draft == "none" and cell.batch == 2:
            raise MemoryError("no room")

    records = launch.run(experiment(tmp_path), console(), scripted(fails))
    assert [r["row"]["status"] for r in records] == ["ok"] * 3 + ["failed"] * 3
    assert records[4]["row"]["error"] == "plain decoding failed: MemoryError: no room"


def test_what_failed_plain_decoding_is_told_once_for_all_that_depend_on_it(tmp_path, scripted):
    def fails(cell):
        if cell.draft == "none" and cell.batch == 2:
            raise MemoryError("no room")

    mine, out = experiment(tmp_path), console()
    records = launch.run(mine, out, scripted(fails))
    running = out.file.getvalue()
    launch.publish(mine, records, out)
    published = out.file.getvalue()[len(running) :]
    assert running.count("no room") == published.count("no room") == 1
    assert "batch 2, context 8: plain: failed: MemoryError: no room" in running


def test_methods_that_fail_alike_are_each_told(tmp_path, scripted):
    def fails(cell):
        if cell.draft != "none" and cell.batch == 2:
            raise MemoryError("no room")

    out = console()
    launch.run(experiment(tmp_path), out, scripted(fails))
    assert out.file.getvalue().count("no room") == 2


def test_a_timed_run_that_compiles_is_no_result(tmp_path, scripted):
    bench = scripted()
    honest = bench.run

    def run(cell):
        out = honest(cell)
        if cell.draft == "small":
            out.stats.__dict__["compile_s"] = 1.0
        return out

    bench.run = run
    rows = [r["row"] for r in launch.run(experiment(tmp_path), console(), bench)]
    assert [r["status"] for r in rows] == ["ok", "ok", "failed"] * 2
    assert "a timed run compiled again" in rows[2]["error"]


def test_wrong_settings_end_with_status_2_and_a_message(tmp_path, capsys):
    path = tmp_path / "wrong.yaml"
    path.write_text("repeets: 3")
    assert launch.main([str(path)]) == 2
    assert "did you mean 'repeats'?" in capsys.readouterr().err
    assert launch.main([str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err


IMPOSSIBLE = {
    "no such target": ("target: ./none", "target: ./none is no directory"),
    "no model": ("target: tests", "target: tests/config.json does not exist"),
    "a preset": ("target: opt-125m", "target: 'opt-125m' is a preset, which has no tokenizer"),
    "no such draft": (
        "methods: [{draft: small, model: ./none}]",
        "model: ./none is no directory",
    ),
    "no such member": (
        "methods: [{draft: ensemble, models: [./none, look_up], tree: chain:2}]",
        "model: ./none is no directory",
    ),
    "a verifier that is not exact": (
        "do_sample: true\nmethods: [{draft: self, draw: top, verifier: mss_with_replacement}]",
        "verifier='mss_with_replacement' is not exact for children drawn 'top'",
    ),
    "texts too long": (
        "shapes: [{batch: [1, 2], context: [64, 16300]}]\nnew_tokens: 128",
        "context 16300: prompt 0 has 16300 tokens; with 128 new ones it needs 16428 positions, and "
        "the target has 16384",
    ),
    "a budget too small": (
        "methods: [{draft: self, kv_budget: [64, 8], sinks: 4, tree: chain:5}]",
        "self streaming 8 sinks 4, chain:5: kv_budget=8 leaves too small a ring",
    ),
    "more of the newest tokens than slots": (
        "methods: [{draft: self, policy: snapkv, kv_budget: 64, recent: 64}]",
        "self snapkv 64 recent 64, chain:4: kv_budget=64 leaves nothing to pin beside a ring of 64",
    ),
    "a small draft's budget too small": (
        "methods: [{draft: small, model: experiments/zoo/draft-1, policy: streaming, "
        "kv_budget: 24}]",
        "draft-1 streaming 24, chain:4: kv_budget=24 leaves too small a ring for the newest "
        "tokens: 8 slots beside 16 pinned ones, and it must have at least 2 x tree depth (4) + 1",
    ),
    "a context too short for the question": (
        "prompts: variable_tracking\nshapes: [{batch: [1, 2], context: [64, 2048]}]",
        "prompts: context=64 is too short for variable_tracking: what it asks for",
    ),
    "more prompts than the text gives": (
        "candidates: 1000000",
        "prompts: 1000000 prompts of context=2048 need 1002048 tokens, but the held-out text has",
    ),
    "a cell twice": ("shapes: [{}, {}]", "shapes name a (batch, context) twice"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_run_is_said_once_before_the_grid_starts(what, tmp_path, capsys, monkeypatch):
    settings, message = IMPOSSIBLE[what]
    monkeypatch.setattr(measure, "Bench", lambda: pytest.fail("the grid started"))
    path = tmp_path / "mine.yaml"
    path.write_text(f"results: {tmp_path / 'results'}\n{settings}")
    assert launch.main([str(path)]) == 2
    assert capsys.readouterr().err.count(message) == 1
    assert not (tmp_path / "results").exists()


def test_a_run_that_is_not_exact_or_failed_ends_with_status_1(tmp_path, scripted, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text(f"results: {tmp_path}\nnew_tokens: 16\nshapes: [{{context: 8}}]")
    monkeypatch.setattr(measure, "Bench", scripted)
    assert launch.main([str(path)]) == 0

    def fails(cell):
        raise ValueError("no")

    monkeypatch.setattr(measure, "Bench", lambda: scripted(fails))
    assert launch.main([str(path), "--fresh"]) == 1
