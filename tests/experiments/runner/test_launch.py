"""The launcher: results, resume, refusals and messages, on a scripted bench."""

import csv
import importlib.metadata
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest
import yaml

from experiments import launch
from experiments.runner import estimates, launchers, preflight, provenance
from experiments.schema import config, grid, store
from magicjax.downloads import DOWNLOADS

SETTINGS = {
    "name": "mine",
    "new_tokens": 16,
    "context": 8,
    "grid": {"batch": [1, 2]},
    "methods": [
        {"drafter": "self", "tree": "chain:3"},
        {"drafter": "small:experiments/zoo/draft-1", "tree": "expansion:2,1"},
    ],
}


@pytest.fixture
def start(tmp_path, monkeypatch, scripted, here):
    """Starts the launcher on a file of these settings, and returns its exit status."""
    monkeypatch.setattr(preflight, "cell_problems", lambda groups, record=False: {})
    monkeypatch.setattr(estimates, "of", lambda cell, on_gpu, chooses: estimates.Estimate(1, 60))
    monkeypatch.setattr(provenance, "code", lambda: "this code")

    def start(*arguments, bench=None, before=lambda folder: None, file="mine.yaml", **changes):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(SETTINGS | {"results": str(tmp_path)} | changes))
        here(bench or scripted(), before)
        return launch.main([str(path), *arguments])

    return start


def summary(tmp_path):
    with (tmp_path / "mine" / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def folders(tmp_path, name):
    return {path.parent.name for path in (tmp_path / "mine" / "cells").glob(f"*/{name}")}


def test_a_cell_is_interleaved_with_plain_decoding_which_starts_each_repeat(start, scripted):
    bench = scripted()
    assert start(bench=bench, grid={}) == 0
    mine, small = ["none", "self"], ["none", "small"]
    assert [cell.draft for cell in bench.ran] == mine * 4 + small * 4  # 1 + 3 repeats


def test_a_run_writes_a_summary_and_a_folder_for_each_cell(start, tmp_path, capsys):
    assert start() == 0
    rows = summary(tmp_path)
    assert [(r["batch"], r["draft"]) for r in rows] == [
        (batch, draft) for batch in "12" for draft in ("none", "self", "small")
    ]
    assert {r["status"] for r in rows} == {"ok"}
    row = rows[4]
    figures = {
        "speedup": 2.0,
        "speedup_low": 2.0,
        "speedup_high": 2.0,
        "decode_tok_s": 60.0,
        "ar_decode_tok_s": 30.0,
        "decode_tok_s_user": 30.0,
        "decode_tok_s_device": 60.0,
        "exact_match": 1.0,
        "noise_match": 1.0,
        "compile_s": 3.0,
        "ttft_s": 0.25,
        "round_ms": 1e3 * 0.5 / 8,
        "tpot_ms_p50": 1e3 * 0.5 / 15,  # prefill emits the first token
        "draft_s": 0.25,
    }
    assert {name: float(row[name]) for name in figures} == figures
    assert (row["gamma"], row["nodes"], row["repeat"], row["prompts"]) == ("3", "4", "3", "stdlib")
    assert "2.00×" in capsys.readouterr().out

    folder = tmp_path / "mine" / "cells" / row["key"]
    cell = grid.restored(yaml.safe_load((folder / "config.yaml").read_text()))
    assert grid.key(cell) == folder.name
    env = json.loads((folder / "env.json").read_text())
    assert env["made_by"]["code"] == "this code" and env["device"] == row["device"]
    requests = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [r["request"] for r in requests] == [0, 1]
    assert requests[0]["tokens"] == list(range(16)) and requests[0]["exact"] is True
    assert (requests[0]["rounds"], requests[0]["tau"], requests[0]["histogram"]) == (
        8,
        15 / 8,
        [1, 7],
    )
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["runs"]) == 3 and metrics["acceptance_if_reached"] == [7 / 8]


def test_finished_cells_are_not_measured_again(start, scripted, tmp_path, capsys):
    start()
    first = summary(tmp_path)
    again = scripted()
    assert start(bench=again) == 0
    assert not again.ran and summary(tmp_path) == first
    assert "0 of 0 cells" not in capsys.readouterr().out
    more = scripted()
    start(bench=more, grid={"batch": [1, 2, 4]})
    assert {cell.batch for cell in more.ran} == {4} and len(summary(tmp_path)) == 9
    fresh = scripted()
    start("--fresh", bench=fresh)
    assert len(set(fresh.ran)) == 6


def test_results_of_other_code_are_refused_kept_or_measured_again(
    start, scripted, tmp_path, monkeypatch, capsys
):
    start()
    monkeypatch.setattr(provenance, "code", lambda: "other code")
    before = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    assert start() == 2
    message = capsys.readouterr().err
    assert "4 of 4 cells" in message and "code this code -> other code" in message
    assert "--stale redo" in message and "--stale keep" in message
    assert before == {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    kept, redone = scripted(), scripted()
    assert start("--stale", "keep", bench=kept) == 0 and not kept.ran
    assert start("--stale", "redo", bench=redone) == 0 and len(set(redone.ran)) == 6


def test_a_result_is_stale_after_a_change_of_an_installed_policy(
    start, scripted, tmp_path, monkeypatch
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
    for text, measured in ((code, True), (code, False), (code + "# another\n", True)):
        install(text)
        bench = scripted()
        methods = [{"drafter": "self", "policy": "mine"}]
        assert start("--stale", "redo", bench=bench, grid={}, methods=methods) == 0
        assert ("self" in {cell.draft for cell in bench.ran}) == measured


def test_a_killed_run_keeps_finished_cells_and_resumes(start, scripted, tmp_path):
    def killed(cell):
        if cell.batch == 2 and cell.draft == "small":
            raise KeyboardInterrupt

    assert start(bench=scripted(killed)) == 130
    assert len(folders(tmp_path, "metrics.json")) == 3
    assert not folders(tmp_path, "failure.json")
    resumed = scripted()
    assert start(bench=resumed) == 0
    assert {(cell.batch, cell.draft) for cell in resumed.ran} == {(2, "none"), (2, "small")}
    assert len(summary(tmp_path)) == 6


def test_a_cell_that_fails_is_recorded_and_the_grid_continues(start, scripted, tmp_path, capsys):
    def fails(cell):
        if cell.draft == "self" and cell.batch == 1:
            raise ValueError("budget=8 leaves no ring:\n it must be larger")
        if cell.draft == "small" and cell.batch == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    assert start(bench=scripted(fails)) == 1
    rows = summary(tmp_path)
    assert [r["status"] for r in rows] == ["failed", "memory", "ok", "ok", "ok"]
    assert rows[0]["error"] == "ValueError: budget=8 leaves no ring: it must be larger"
    assert rows[0]["speedup"] == "" and rows[0]["policy"] == "streaming"
    assert capsys.readouterr().out.count("budget=8 leaves no ring") == 2  # run and summary
    failure = tmp_path / "mine" / "cells" / rows[0]["key"] / "failure.json"
    assert "Traceback" in json.loads(failure.read_text())["trace"]

    left = scripted()
    assert start(bench=left) == 1 and not left.ran
    repaired = scripted()
    assert start("--retry-failed", bench=repaired) == 0
    assert {(c.batch, c.draft) for c in repaired.ran} == {(1, "none"), (1, "self"), (1, "small")}
    assert not folders(tmp_path, "failure.json")


def test_a_timed_run_that_compiles_is_a_failure(start, scripted, tmp_path):
    bench = scripted()
    honest = bench.run

    def run(cell):
        out = honest(cell)
        if cell.draft == "small":
            out.stats.__dict__["compile_s"] = 1.0
        return out

    bench.run = run
    assert start(bench=bench) == 1
    assert [r["status"] for r in summary(tmp_path)] == ["ok", "ok", "failed"] * 2
    assert "a timed run compiled" in summary(tmp_path)[2]["error"]


def test_runs_that_differ_are_a_failure(start, scripted, tmp_path):
    bench = scripted()
    honest, count = bench.run, iter(range(100))

    def run(cell):
        out = honest(cell)
        if cell.draft == "self":
            out.tokens[0, -1] += next(count)
        return out

    bench.run = run
    assert start(bench=bench, grid={}) == 1
    assert "two runs on the same prompts differ" in summary(tmp_path)[1]["error"]


def test_one_folder_belongs_to_one_experiment_and_one_version(start, tmp_path, capsys):
    assert start() == 0
    assert start("--new-tokens", "33") == 2
    assert "has the cells of another experiment" in capsys.readouterr().err
    assert start(file="other/mine.yaml") == 0
    path = tmp_path / "mine" / "experiment.yaml"
    path.write_text(path.read_text().replace(f"format: {store.FORMAT}", "format: 1"))
    assert start() == 2
    assert "of another version of magicjax (format 1" in capsys.readouterr().err
    path.unlink()
    assert start() == 2
    assert "no experiment.yaml" in capsys.readouterr().err


def test_two_launchers_do_not_write_to_one_folder(start, capsys):
    status = []

    def again(folder):
        if not status:
            status.append(None)
            status[0] = start()

    assert start(before=again) == 0
    assert status == [2]
    assert "is in use by another launcher" in capsys.readouterr().err


def test_workers_divide_the_cells_and_the_command_without_them_reports(start, tmp_path, capsys):
    partial = tmp_path / "mine" / "cells" / "0123" / ".metrics.json.77.partial"
    counts, status = [], []

    def other(folder):
        if not status:
            partial.parent.mkdir()
            partial.write_text("{")
            status.append(None)
            status[0] = start("--worker", "1/2")
            status.append(start())

    assert start("--worker", "0/2", before=other) == 0
    assert status == [0, 2] and "is in use by another launcher" in capsys.readouterr().err
    assert partial.exists() and not (tmp_path / "mine" / "summary.csv").exists()
    assert len(folders(tmp_path, store.METRICS)) == 4
    assert start(before=counts.append) == 0
    assert not counts and len(summary(tmp_path)) == 6 and not partial.exists()


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_every_cell_has_one_worker(count):
    experiment = config.Experiment(**SETTINGS)
    shares = [
        launch.Grid(experiment.model_copy(update={"worker": f"{i}/{count}"})).share
        for i in range(count)
    ]
    divided = [cell for share in shares for cell in share]
    assert len(divided) == 4 and {*divided} == {*launch.Grid(experiment).cells}
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_half_written_files_of_a_killed_process_are_removed(start, tmp_path):
    folder = tmp_path / "mine" / "cells" / "0123"
    folder.mkdir(parents=True)
    store.write_experiment(tmp_path / "mine", {})
    (folder / ".metrics.json.77.partial").write_text("{")
    assert start() == 0
    assert not list((tmp_path / "mine").rglob("*.partial"))


def test_the_first_interrupt_lets_running_cells_finish_and_the_second_stops_them():
    stop, messages = launchers.Stop(), []
    with stop.on_signals(messages.append):
        assert not stop.no_more
        launchers.signal.raise_signal(launchers.signal.SIGINT)
        assert stop.no_more and not stop.now()
        launchers.signal.raise_signal(launchers.signal.SIGINT)
        assert stop.now()
    assert messages == [
        "no further cells start; interrupt again to stop the running cells",
        "stopping the running cells; finished cells are kept",
    ]


def test_an_interrupted_run_reports_finished_cells_and_resumes(start, tmp_path):
    calls = []

    def interrupt(folder):
        calls.append(folder)
        if len(calls) == 2:
            launchers.signal.raise_signal(launchers.signal.SIGINT)

    assert start(before=interrupt) == 130
    assert [row["draft"] for row in summary(tmp_path)] == ["none", "self", "small"]
    assert start() == 0 and len(summary(tmp_path)) == 6


def test_a_run_that_is_stopped_in_a_cell_of_its_process_reports_finished_cells(
    start, scripted, tmp_path, capsys
):
    stopped = threading.Event()

    def stop(folder):
        if len(folders(tmp_path, store.METRICS)) == 1:
            launchers.signal.raise_signal(launchers.signal.SIGTERM)

    def runs_for_long(cell):
        if cell.draft == "small":
            stopped.wait(60)

    try:
        assert start(bench=scripted(runs_for_long), before=stop) == 130
    finally:
        stopped.set()
    assert [row["draft"] for row in summary(tmp_path)] == ["none", "self"]
    assert not folders(tmp_path, store.FAILURE)
    assert "3 of 4 cells are still to do" in " ".join(capsys.readouterr().out.split())


def test_an_interrupt_during_the_imports_ends_without_a_traceback(tmp_path):
    command = (sys.executable, "-X", "importtime", "-m", "experiments.launch", "none.yaml")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stderr if "numpy" in line)
        process.send_signal(launchers.signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 130


def test_invalid_settings_end_with_status_2_and_a_message(tmp_path, capsys):
    path = tmp_path / "wrong.yaml"
    path.write_text("repeets: 3")
    assert launch.main([str(path)]) == 2
    assert "did you mean 'repeats'?" in capsys.readouterr().err
    assert launch.main([str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err


IMPOSSIBLE = {
    "no such target": ("target: ./none", "target: ./none is not a directory"),
    "a preset": ("target: opt-125m", "target: 'opt-125m' is a preset, which has no tokenizer"),
    "no such draft": ("methods: [{drafter: small:./none}]", "small: ./none is not a directory"),
    "texts too long": (
        "grid: {batch: [1, 2], context: [64, 16300]}\nnew_tokens: 128",
        "context 16300: prompt 0 has 16300 tokens; with new_tokens=128 it needs 16428 "
        "positions, and the target has 16384: shorten the prompt (to at most 16256 tokens) or "
        "reduce new_tokens",
    ),
    "a budget too small": (
        "methods: [{drafter: self, budget: [64, 8], sinks: 4, tree: chain:5}]",
        "self:streaming:8:sinks=4, chain:5: budget=8 is too small: its ring has 4",
    ),
    "a context too short for the question": (
        "prompts: variable_tracking\ngrid: {batch: [1, 2], context: [64, 2048]}",
        "context=64 is too short for variable_tracking: choose at least",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_invalid_cells_are_reported_once_before_the_grid_starts(case, tmp_path, capsys, here):
    settings, message = IMPOSSIBLE[case]
    here(before=lambda folder: pytest.fail("the grid started"))
    path = tmp_path / "mine.yaml"
    methods = "" if "methods:" in settings else "\nmethods: []"
    path.write_text(f"results: {tmp_path / 'results'}\n{settings}{methods}")
    assert launch.main([str(path)]) == 2
    assert capsys.readouterr().err.count(message) == 1
    assert not (tmp_path / "results").exists()


def test_invalid_cells_are_recorded_with_impossible_record(tmp_path, capsys, here, scripted):
    here(scripted())
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"results: {tmp_path}\nimpossible: record\nrepeats: 1\ncontext: 320\n"
        "methods: [{drafter: self, budget: [64, 8], sinks: 4, tree: chain:5}, "
        "{drafter: small:nowhere/draft, tree: [chain:1, chain:2]}]"
    )
    assert launch.main([str(path)]) == 1
    assert [row["status"] for row in summary(tmp_path)] == ["ok", "ok", *["config"] * 3]
    assert "budget=8 is too small: its ring has 4" in summary(tmp_path)[2]["error"]
    assert "nowhere/draft is not a directory" in summary(tmp_path)[3]["error"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "budget=8 is too small: its ring has 4" in printed
    assert printed.count("cannot run: small: nowhere/draft is not a directory") == 1
    path.write_text(f"results: {tmp_path / 'x'}\nimpossible: record\ncontext: 99999\nmethods: []\n")
    assert launch.main([str(path)]) == 2  # all cells are invalid


def test_a_cell_whose_model_was_missing_is_measured_by_the_next_run(
    tmp_path, capsys, here, scripted
):
    here(scripted())
    path, draft = tmp_path / "mine.yaml", tmp_path / "draft"
    path.write_text(
        f"results: {tmp_path}\nimpossible: record\nrepeats: 1\ncontext: 320\n"
        f"methods: [{{drafter: prompt-lookup}}, {{drafter: small:{draft}, tree: chain:1}}]"
    )
    assert launch.main([str(path)]) == 1
    assert [row["status"] for row in summary(tmp_path)] == ["ok", "ok", "config"]
    shutil.copytree("experiments/zoo/draft-1", draft)
    assert launch.main([str(path)]) == 0
    shutil.rmtree(draft)
    preflight.unloaded.cache_clear()  # as in a new process
    preflight._source.cache_clear()
    capsys.readouterr()
    assert launch.main([str(path)]) == 0  # it has a result
    assert "cannot run" not in capsys.readouterr().out
    assert [row["status"] for row in summary(tmp_path)] == ["ok"] * 3


SHIPPED = pathlib.Path(config.__file__).parents[1] / "configs"


QUICK = ("demo", "specinfer_verifiers")
SPAWNED = ("magicdec_tables", "two_nodes")  # need many devices, which only a new process configures


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """Models to download are in the cache folder: the draft model's files with SmolLM2's sizes."""
    monkeypatch.setenv("MAGICJAX_CACHE", str(tmp_path / "cache"))
    draft = SHIPPED.parent / "zoo" / "smollm2" / "draft-1"
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"num_hidden_layers": 30}
    for download in DOWNLOADS.values():
        download.directory.mkdir(parents=True)
        for file in draft.iterdir():
            (download.directory / file.name).symlink_to(file)
        config = download.directory / "config.json"
        config.unlink()
        settings = json.loads((draft / config.name).read_text()) | sizes
        settings.pop("draft_vocab_size", None)  # a config cuts the vocabulary itself
        config.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem not in QUICK))
        for path in sorted(SHIPPED.glob("*.yaml"))
    ],
)
def test_the_shipped_files_can_be_run(path, capsys, tmp_path, downloaded):
    arguments = ["--dry-run", "--results", str(tmp_path)]  # not the results of this checkout
    if path.stem in SPAWNED:
        command = [sys.executable, "-m", "experiments.launch", str(path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        output = done.stdout
    else:
        assert launch.main([str(path), *arguments]) == 0
        output = capsys.readouterr().out
    assert "to run" in output


def test_a_drafter_is_not_printed_as_an_emoji(capsys):
    launch._console().print("eagle:eagle:512", markup=False)
    assert "eagle:eagle:512" in capsys.readouterr().out
