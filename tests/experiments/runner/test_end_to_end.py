"""Grids on tiny models: text, prompts, models from disk, decoding, results."""

import csv
import json

import pytest

import magicjax
from experiments import launch
from experiments.runner import workload
from magicjax.prediction import cost_model


@pytest.mark.slow
def test_a_grid_runs_from_file_to_summary_and_is_exact(zoo, here, capsys):
    here()
    path = zoo / "grid.yaml"
    path.write_text(
        f"target: {zoo / 'target'}\n"
        f"results: {zoo / 'results'}\n"
        "new_tokens: 12\n"
        "agreement_tokens: 96\n"
        "batch: 2\ncontext: 48\n"
        "methods:\n"
        "  - {drafter: self, budget: 24, sinks: 4, tree: chain:3}\n"
        f"  - {{drafter: small:{zoo / 'draft'}, tree: 'expansion:2,1'}}\n"
    )
    assert launch.main([str(path), "--profile"]) == 0
    with (zoo / "results" / "grid" / "summary.csv").open() as file:
        plain, streaming, small = csv.DictReader(file)
    for row in (plain, streaming, small):
        assert (row["status"], float(row["exact_match"])) == ("ok", 1.0)
        assert float(row["decode_s"]) > 0
    assert float(plain["tau"]) == 1.0 and float(plain["compile_s"]) > 0
    assert int(plain["target_passes"]) == 2 * 11  # the first token of each row is the prefill's
    assert float(streaming["kv_mb_draft"]) < float(streaming["kv_mb_target"])
    assert 0 <= float(small["agreement"]) <= 1
    assert (streaming["verifier"], streaming["draw"], streaming["temperature"]) == (
        "greedy",
        "",
        "0.0",
    )
    folder = zoo / "results" / "grid"
    records = [json.loads(path.read_text()) for path in folder.glob("cells/*/metrics.json")]
    assert sum("acceptance_by_depth" in record for record in records) == 2
    for row in (streaming, small):
        spent = ("draft_s", "score_s", "verify_s", "commit_s", "host_s")
        assert all(float(row[name]) > 0 for name in spent)
    assert len(list(folder.glob("cells/*/trace.perfetto.json.gz"))) == 2
    prompts = [path.read_text() for path in folder.glob("prompts/*.json")]
    assert len(prompts) == 1  # chosen once for all cells of a group
    out = " ".join(capsys.readouterr().out.split())
    assert "τ: tokens emitted per target pass and row" in out


def test_cells_in_one_process_share_the_model_and_one_that_fails_ends_no_others(zoo, monkeypatch):
    loaded, load = [], magicjax.load

    def counted(source, **options):
        loaded.append(source)
        return load(source, **options)

    def fails(bench, cell, *arguments):
        if cell.batch == 2 and cell.draft != "none":
            raise RuntimeError("this cell fails")
        return call(bench, cell, *arguments)

    call = workload.Bench.call
    monkeypatch.setattr(magicjax, "load", counted)
    monkeypatch.setattr(workload.Bench, "call", fails)
    path = zoo / "one.yaml"
    path.write_text(
        f"target: {zoo / 'target'}\nresults: {zoo / 'results'}\nlauncher: in_process\n"
        "new_tokens: 8\nagreement_tokens: 0\nphases: false\nrepeats: 1\ncontext: 48\n"
        "grid:\n  batch: [2, 1]\nmethods:\n  - {drafter: prompt-lookup, tree: chain:2}\n"
    )
    assert launch.main([str(path)]) == 1
    with (zoo / "results" / "one" / "summary.csv").open() as file:
        rows = {(row["batch"], row["draft"]): row for row in csv.DictReader(file)}
    assert rows["2", "prompt-lookup"]["status"] == "failed"
    assert float(rows["1", "prompt-lookup"]["exact_match"]) == 1.0
    assert len(loaded) == 1


@pytest.mark.slow
def test_auto_reports_its_choice(zoo, here):
    here()
    profile = zoo / "here.json"
    cost_model.save_profile(
        profile, cost_model.Device("here", 2e10, 1e11, 1e10, None, dtype="float32"), {}
    )
    path = zoo / "auto.yaml"
    path.write_text(
        f"target: {zoo / 'target'}\n"
        f"results: {zoo / 'results'}\n"
        "new_tokens: 12\nrepeats: 1\ncandidates: 1\nagreement_tokens: 0\n"
        "batch: 2\ncontext: 48\n"
        "methods:\n"
        f"  - {{drafter: auto, profile: {profile}, tree: chain:3,\n"
        f"     drafters: ['self:streaming:24', 'small:{zoo / 'draft'}', prompt-lookup]}}\n"
    )
    assert launch.main([str(path)]) == 0
    with (zoo / "results" / "auto" / "summary.csv").open() as file:
        plain, auto = csv.DictReader(file)
    assert (auto["method"], auto["status"], float(auto["exact_match"])) == (
        "auto, chain:3",
        "ok",
        1.0,
    )
    names = {"off", "self:streaming:24", "small:draft:full", "prompt-lookup:4"}
    assert auto["chosen"].split(",")[0] in names and plain["chosen"] == ""


@pytest.mark.slow
def test_a_sampled_grid_compares_with_plain_sampling_of_the_same_parameters(zoo, here):
    here()
    path = zoo / "sampled.yaml"
    path.write_text(
        f"target: {zoo / 'target'}\n"
        f"results: {zoo / 'results'}\n"
        "temperature: 0.7\ntop_p: 0.9\nseed: 5\n"
        "new_tokens: 12\nrepeats: 1\ncandidates: 2\nagreement_tokens: 96\n"
        "batch: 2\ncontext: 48\n"
        "methods:\n"
        f"  - {{drafter: small:{zoo / 'draft'}, tree: 'expansion:2,1', "
        "verifier: [mss, naive]}\n"
        f"  - {{drafter: small:{zoo / 'draft'} + prompt-lookup, "
        "tree: 'expansion:1,1 + chain:2'}\n"
        "  - {drafter: prompt-lookup, tree: 'expansion:2,1', verifier: naive}\n"
    )
    assert launch.main([str(path)]) == 0
    with (zoo / "results" / "sampled" / "summary.csv").open() as file:
        plain, mss, naive, ensemble, prompt_lookup = csv.DictReader(file)
    assert [row["exact_match"] for row in (plain, naive, prompt_lookup)] == ["1.0"] * 3
    assert mss["exact_match"] == ensemble["exact_match"] == ""
    assert {row["temperature"] for row in (plain, mss)} == {"0.7"}
    assert (mss["verifier"], mss["draw"], plain["verifier"]) == ("mss", "without_replacement", "")
    assert (ensemble["nodes"], ensemble["gamma"]) == ("5", "2")
    assert 1 <= float(ensemble["nodes_per_round"]) <= 5
    assert float(mss["nodes_per_round"]) == 5
    assert float(mss["tau_by_request"]) >= 1
    assert mss["agreement"] and not ensemble["agreement"] and not prompt_lookup["agreement"]
