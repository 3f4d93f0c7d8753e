"""The report of a folder of results: finished cells, and failed ones."""

import io
import json
import re
import shutil

import pytest
from rich.console import Console

from experiments.report import answer, page, ranking, results_folder, terminal
from experiments.schema import config, grid, store
from experiments.schema.columns import COLUMNS, TIMES

METHODS = [
    {"drafter": "self", "budget": [64, 256], "tree": "chain:3"},
    {"drafter": "small:somewhere/draft-1", "tree": "expansion:2,1"},
]
FAILED = {(4, 96, "small"): ("memory", "out of memory: the process held 3 GB")}


def fill(directory, batches=(1, 4), contexts=(64, 96), faster=1.0, failed=FAILED):
    """Writes a folder of results: speedups grow with batch, context and budget."""
    axes = {"batch": list(batches), "context": list(contexts)}
    experiment = config.Experiment(grid=axes, methods=METHODS)
    settings = experiment.model_dump(mode="json", exclude_unset=True)
    store.write_experiment(directory, settings)
    for cell in (cell for group in grid.groups(experiment) for cell in group):
        folder = store.cell_folder(directory, grid.key(cell))
        store.write_cell(folder, grid.resolved(cell))
        if (why := failed.get((cell.batch, cell.context, cell.draft))) is not None:
            store.write_failure(folder, *why)
            continue
        speed = (
            faster
            * cell.batch
            * cell.context
            / 128
            * {64: 1.0, 256: 1.1}.get(cell.options.get("budget"), 1.25)
        )
        row = dict.fromkeys(COLUMNS) | grid.columns(cell)
        row |= dict.fromkeys(TIMES, 1.0) | {"status": "ok", "error": "", "tau": 2.0, "ties": 0}
        row |= {"speedup": speed}
        row |= {"decode_tok_s": 100 * speed, "exact_match": 1.0, "acceptance_rate": 0.5}
        plain = row | grid.columns(grid.plain_of(cell)) | {"speedup": 1.0, "decode_tok_s": 100.0}
        row |= {f"{name}_s": 0.1 for name in ("draft", "score", "verify", "commit", "rest", "host")}
        both = {"runs": [{"decode_s": 1 / speed}] * 2, "plain_runs": [{"decode_s": 1.0}] * 2}
        curves = {"acceptance_by_depth": [0.7, 0.4], "acceptance_if_reached": [0.7, 0.6]}
        env = {"device": "a machine", "date": "today", "made_by": {"jax": "0", "target": "hash"}}
        requests = [
            {
                "request": i,
                "category": ("math", "writing")[i % 2],
                "source": f"chat.jsonl:{i}",
                "tokens": [cell.batch, i],
                "score": 0.5 if i % 2 else None,
                "rounds": 2 + 4 * i,
                "tau": 3.0 - i / 2,
                "histogram": [1 + i, 0, 3 * i, 1],
                "tpot_ms": 1.5,
            }
            for i in range(cell.batch)
        ]
        store.write_result(folder, env, {"row": row, "plain_row": plain} | both | curves, requests)
    return directory


def test_the_terminal_notes_the_bandwidth_once_a_group_also_without_plain_rows(tmp_path):
    cells = results_folder.read(fill(tmp_path, failed={})).cells
    methods = [row for row in answer.with_intervals(cells) if row["draft"] != "none"]
    notes = [line for line in terminal.notes(methods) if "plain decoding reads 1.0 GB/s" in line]
    assert len(methods) == 12
    assert sorted(line.partition(":")[0] for line in notes) == [
        f"batch {batch}, context {context}" for batch in (1, 4) for context in (64, 96)
    ]


def test_the_row_of_plain_decoding_has_the_medians_of_its_runs_beside_the_methods(tmp_path):
    folder = fill(tmp_path, batches=(1,), contexts=(64,), failed={})
    cells = results_folder.read(folder).cells[1:]
    for cell, rate in zip(cells, (200.0, 90.0, 120.0), strict=True):
        plain = cell.metrics["plain_row"] | {"decode_tok_s": rate}
        store.write_json(cell.folder / store.METRICS, cell.metrics | {"plain_row": plain})
    plain, *methods = results_folder.read(folder).rows
    assert (plain["method"], plain["decode_tok_s"], plain["ties"]) == ("plain", 120.0, 0)
    assert [row["draft"] for row in methods] == ["self", "self", "small"]


def page_of(folder):
    """Returns (the HTML of a folder's page, its charts in Vega-Lite by name)."""
    page.write(results_folder.read(folder))
    html = (folder / "report.html").read_text()
    charts = re.search("const charts = (.*);\n", html)
    return html, json.loads(charts[1]) if charts else {}


def test_a_page_holds_the_table_three_charts_and_the_experiment(tmp_path):
    html, charts = page_of(fill(tmp_path / "mine"))
    assert list(charts) == ["speedup", "rounds", "phases"]
    own = html.replace(page._vega_embed(), "")
    assert own != html and not re.search("(src|href)=", own)  # it needs no network
    assert own.count('class="chart"') == 3 and own.count("<tr") == 1 + 16
    assert html.count('class="best"') == 2  # plain decoding wins at batch 1
    assert "11 of 12 cells have a result" in html
    assert "out of memory: the process held 3 GB" in html
    assert "a machine" in html and "budget" in html and "mean acceptance length" in html
    assert "<title>mine: report</title>" in html and "<h1>mine</h1>" in html


def test_charts_hold_the_cells_with_a_result(tmp_path):
    _, charts = page_of(fill(tmp_path / "mine"))
    values = {name: chart["data"]["values"] for name, chart in charts.items()}
    assert len(values["speedup"]) == len(values["rounds"]) == 11
    assert {row["panel"] for row in values["speedup"]} == {"batch 1", "batch 4"}
    assert {row["context"] for row in values["speedup"]} == {64, 96}
    assert all(row["round"] == pytest.approx(2.0 / row["speedup"]) for row in values["rounds"])
    assert len(values["phases"]) == 11 * 6
    shares = [row["ms"] for row in values["phases"] if row["panel"] == "batch 4, context 64"]
    assert shares == [pytest.approx(100.0)] * 3 * 6


def test_methods_without_times_have_no_charts(tmp_path):
    folder = fill(tmp_path / "mine", batches=(1,), contexts=(64,))
    phases = dict.fromkeys(f"{name}_s" for name in ("draft", "score", "verify", "commit", "rest"))
    change(folder, {}, speedup=None, **phases)
    html, charts = page_of(folder)
    assert not charts and "vegaEmbed" not in html and "methods are compared by τ" in html


def test_a_name_cannot_end_the_script_of_the_charts(tmp_path):
    folder = fill(tmp_path / "mine", batches=(4,), contexts=(64,))
    change(folder, {"draft": "small"}, method="</script><b>")
    html, charts = page_of(folder)
    assert "</script><b>" not in html
    assert "</script><b>" in {row["method"] for row in charts["speedup"]["data"]["values"]}


def test_the_page_opens_with_the_best_method_and_where_plain_decoding_wins(tmp_path):
    rows = answer.with_intervals(results_folder.read(fill(tmp_path / "mine")).cells)
    found = {tuple(one.group.values()): one for one in answer.answers(rows)}
    assert [where for where, one in found.items() if one.plain_wins] == [(1, 64), (1, 96)]
    assert found[4, 64].best["draft"] == "small" and found[4, 64].best["speedup"] == 2.5
    assert found[4, 96].best["budget"] == 256  # the small model failed
    page.write(results_folder.read(tmp_path / "mine"), to_do=2)
    html = (tmp_path / "mine" / "report.html").read_text()
    text = " ".join(re.sub("<[^>]*>", "", html.split("</h1>")[1]).split())
    assert text.startswith(
        f"Fastest: {found[4, 96].best['method']}, 3.30 [3.30, 3.30]× plain decoding (batch 4, "
        "context 96; 2 runs of 4 requests in 1 batch: few). All 26 texts equal plain decoding's. "
        "Plain decoding wins at batch 1, context 64; "
        "batch 1, context 96. 11 of 14 cells have a result."
    )


def test_the_ranking_has_its_columns_first_and_values_to_sort_by(tmp_path):
    rows = answer.with_intervals(results_folder.read(fill(tmp_path / "mine")).cells)
    html = ranking.to_html(rows)
    headings = re.findall("<th[^>]*>([^<]*)</th>", html)
    first = ["method", "τ", "exact", "speedup", "tokens/s", "plain tokens/s"]
    assert headings == [*first, "batch", "context", "acceptance rate", "ms/token"]
    assert 'data-sort="3.0"' in html and "3.00 [3.00, 3.00]" in html
    names = [group[0]["method"] for group in ranking.ranked(rows)]
    assert names[0] == "plain" and names[-1] != "plain"  # slower at batch 1, context 64


def test_the_table_has_tau_by_category_of_prompts(tmp_path):
    cells = results_folder.read(fill(tmp_path / "mine", contexts=(64,))).cells
    found = {(c.row["batch"], c.row["draft"]): ranking.tau_by_category(c) for c in cells}
    # τ is 3, 2.5, 2, 1.5 over 2, 6, 10, 14 rounds, of math, writing, math, writing.
    assert found[4, "small"] == "math 2.17, writing 1.80"
    assert found[1, "small"] is None and found[4, "none"] is None


def test_the_best_of_a_group_is_bold_unless_its_interval_contains_1(tmp_path):
    folder = fill(tmp_path / "mine", batches=(4,), contexts=(64,))
    rows = answer.with_intervals(results_folder.read(folder).cells)
    assert 'class="best"' in ranking.to_html(rows)
    assert 'class="best"' not in ranking.to_html([row | {"speedup_low": 0.9} for row in rows])


def broken(tmp_path, how):
    folder = fill(tmp_path / "mine", batches=(1,), contexts=(64,))
    if how == "nothing":
        return tmp_path / "none"
    if how == "old":
        path = folder / "experiment.yaml"
        path.write_text(path.read_text().replace(f"format: {store.FORMAT}", "format: 1"))
    if how == "empty":
        shutil.rmtree(folder / "cells")
    if how == "half":
        next((folder / "cells").glob("*/metrics.json")).write_text('{"row": ')
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nothing", "is not a folder of results"),
        ("old", "of another version of magicjax (format 1; this version uses format"),
        ("empty", "has no finished cell"),
        ("half", "metrics.json is not valid JSON"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(tmp_path, capsys, how, message):
    assert page.main(broken(tmp_path, how)) == 2
    assert message in capsys.readouterr().err


def change(folder, what, **columns):
    """Changes the columns of the cells whose settings have the values in `what`."""
    for cell in results_folder.read(folder).cells:
        if cell.metrics and what.items() <= cell.row.items():
            metrics = cell.metrics | {"row": cell.metrics["row"] | columns}
            metrics |= {name: columns[name] for name in cell.metrics if name in columns}
            store.write_json(cell.folder / store.METRICS, metrics)


def test_a_narrow_terminal_shows_the_method_without_details(tmp_path):
    rows = answer.with_intervals(results_folder.read(fill(tmp_path, failed={})).cells)
    for width, details in ((80, 0), (140, 1)):
        console = Console(width=width, file=io.StringIO())
        console.print(terminal.table(rows, "mine", width))
        text = console.file.getvalue()
        assert text.count("accepted") == details and text.count("self:streaming") >= 8
