"""The command on tiny models from disk: tables, report, and resuming after a kill."""

import csv

import pytest

from experiments.studies.specinfer import __main__ as command
from experiments.studies.specinfer import report, runs, settings


@pytest.fixture
def file(zoo):
    """Settings of tables 1 and 4 on two tiny drafts (one under two names)."""
    path = zoo / "mine.yaml"
    path.write_text(
        f"name: mine\nresults: {zoo / 'results'}\ntables: [1, 4]\n"
        f"target: {zoo / 'target'}\ndrafts: [{zoo / 'draft'}, {zoo / 'target'}]\n"
        "context: 32\nnew_tokens: 8\nrequests: 2\nseeds: 2\nprobes: 1\nwindows: 2\nwindow: 64\n"
        "widths: [1, 2]\nwidth_tree: 'expansion:1,{k}'\n"
        "merging: {single: 'expansion:4,1', member: 'expansion:2,1'}\n"
        "sizes: [{nodes: 6, expansion: 'expansion:2,1', dynamic: 'dynamic:6,2,3'}]\n"
        "probe_tree: 'expansion:3,3'\noptimal_depth: 3\n"
    )
    return path


def read(path):
    with path.open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.slow
def test_the_command_writes_tables_and_report_and_a_second_run_finds_all_done(
    file, capsys, monkeypatch
):
    assert command.main([str(file)]) == 0
    folder = file.parent / "results" / "mine"
    rows = read(folder / "table1_success_rate.csv")
    itself = [r for r in rows if (r["draft"], r["decoding"]) == ("target", "greedy")]
    assert [float(row["top1"]) for row in itself] == [1.0]
    rows = read(folder / "table4_ensembles.csv")
    assert [(r["decoding"], r["kind"], r["nodes"]) for r in rows] == [
        (decoding, kind, "9")
        for decoding in ("greedy", "sampled")
        for kind in ("single", "single", "merged")
    ]
    assert all(float(row["exact"]) == 1.0 for row in rows if row["decoding"] == "greedy")
    # the target as draft is always accepted at the first level: two levels and the bonus token
    assert all(float(row["tau"]) > 2 for row in rows if row["draft"] == "target")
    text = (folder / "report.md").read_text()
    assert "## Table 1" in text and "## Table 4" in text and "## Table 2" not in text

    finished = {path.name for path in (folder / "cells").iterdir()}
    monkeypatch.setattr(runs.Runner, "_measure", lambda self, cell: pytest.fail("measured again"))
    assert command.main([str(file)]) == 0
    assert {path.name for path in (folder / "cells").iterdir()} == finished


def test_every_table_and_its_report_are_made_in_a_dry_run(file):
    tables = settings.read(file)
    dry_run = runs.DryRun(tables)
    made = {number: maker(tables, dry_run) for number, maker in command.MAKERS.items()}
    assert [row["width"] for row in made[2]] == [1, 2] * 2
    assert [row["verifier"] for row in made[3]] == ["naive", "mss"] * 2
    assert [row["kind"] for row in made[5]] == ["expansion", "optimal", "dynamic"] + [
        "expansion",
        "optimal",
    ]
    assert all(row["nodes"] <= 6 for row in made[5])
    text = report.write(tables, made)
    assert all(f"## Table {number}" in text for number in made)
    # all methods of a dry run emit equally many tokens, so no claim of the papers holds
    assert "| follows" not in text
    assert text.count("| undecided |") + text.count("| does not follow |") == 2 + 2 + 2 + 3
