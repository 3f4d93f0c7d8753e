"""The report of a folder of results: finished cells, and failed ones."""

import itertools
import re
import shutil

import pytest

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
        speed = 1.0 if cell.draft == "none" else speed
        row = dict.fromkeys(COLUMNS) | grid.columns(cell)
        row |= dict.fromkeys(TIMES, 1.0) | {"status": "ok", "error": "", "tau": 2.0, "ties": 0}
        row |= {"speedup": speed}
        row |= {"decode_tok_s": 100 * speed, "exact_match": 1.0, "acceptance_rate": 0.5}
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
        store.write_result(folder, env, {"row": row} | both | curves, requests)
    return directory


FIGURES = ["acceptance", "depth", "phases", "speedup", "speedup_by_batch", "speedup_by_context"]
FIGURES += ["speedup_map", "tau", "throughput"]


def figures_of(folder):
    return sorted({path.stem.split("-")[0] for path in (folder / "figures").glob("*.*")})


def page_size(pdf):
    """Returns (width, height) in points."""
    return [float(x) for x in re.search(rb"/MediaBox ?\[([^]]*)\]", pdf)[1].split()[2:]]


def check_sizes(folder, names):
    """Checks that the figures have a paper's column widths."""
    for name, (kind, inches) in itertools.product(names, (("single", 3.3), ("double", 6.9))):
        file = folder / "figures" / f"{name}-{kind}"
        assert page_size(file.with_suffix(".pdf").read_bytes())[0] == pytest.approx(72 * inches)
        assert f'width="{72 * inches:g}pt"' in file.with_suffix(".svg").read_text()


def test_the_terminal_notes_the_bandwidth_once_a_group_also_without_plain_rows(tmp_path):
    cells = results_folder.read(fill(tmp_path, failed={})).cells
    methods = [row for row in answer.with_intervals(cells) if row["draft"] != "none"]
    notes = [line for line in terminal.notes(methods) if "plain decoding reads 1.0 GB/s" in line]
    assert len(methods) == 12
    assert sorted(line.partition(":")[0] for line in notes) == [
        f"batch {batch}, context {context}" for batch in (1, 4) for context in (64, 96)
    ]


def test_a_page_holds_all_cells_figures_and_the_experiment(tmp_path, monkeypatch):
    folder = fill(tmp_path / "mine")
    make = page.make_figures
    monkeypatch.setattr(page, "make_figures", lambda *a: {"speedup": make(*a)["speedup"]})
    assert page.write(results_folder.read(folder)) == ["report.html", "figures/"]
    check_sizes(folder, ["speedup"])
    html = (folder / "report.html").read_text()
    assert html.count('class="chart"') == 1 and len(html) < 1e6
    outside = re.sub("<script.*?</script>", "", html, flags=re.DOTALL)
    assert "<script src" not in html and not re.search("src=|href=", outside)  # no network
    # Four groups; 16 cells, twice; two categories of the drafted cells of batch 4; requests of the
    # drafted cells.
    rows = (1 + 4) + 2 * (1 + 16) + (1 + 5 * 2) + (1 + 6 + 5 * 4)
    assert outside.count("<tr") == rows
    assert "15 of 16 cells have a result" in html
    assert "out of memory: the process held 3 GB" in html
    assert "a machine" in html and "budget" in html and "mean acceptance length" in html
    assert "<title>mine: report</title>" in html and "<h1>mine</h1>" in html


@pytest.mark.slow
def test_all_figures_are_written_in_the_widths_of_a_paper(tmp_path):
    folder = fill(tmp_path / "mine")
    page.write(results_folder.read(folder))
    assert figures_of(folder) == FIGURES
    check_sizes(folder, FIGURES)


def test_the_page_opens_with_the_best_method_and_where_plain_decoding_wins(tmp_path):
    rows = answer.with_intervals(results_folder.read(fill(tmp_path / "mine")).cells)
    found = {tuple(one.group.values()): one for one in answer.answers(rows)}
    assert [where for where, one in found.items() if one.plain_wins] == [(1, 64), (1, 96)]
    assert found[4, 64].best["draft"] == "small" and found[4, 64].best["speedup"] == 2.5
    assert found[4, 96].best["budget"] == 256  # the small model failed
    html = page._page(results_folder.read(tmp_path / "mine"), rows, "", to_do=2)
    text = " ".join(re.sub("<[^>]*>", "", html.split("</h1>")[1]).split())
    assert text.startswith(
        f"Fastest: {found[4, 96].best['method']}, 3.30 [3.30, 3.30]× plain decoding (batch 4, "
        "context 96; 2 runs of 4 requests in 1 batch: few). All 26 texts equal plain decoding's. "
        "Plain decoding wins at batch 1, context 64; "
        "batch 1, context 96. 15 of 18 cells have a result."
    )
    assert f"plain decoding (next: {found[1, 64].best['method']})" in text


def test_the_ranking_has_its_columns_first_and_values_to_sort_by(tmp_path):
    rows = answer.with_intervals(results_folder.read(fill(tmp_path / "mine")).cells)
    html = ranking.to_html(rows)
    headings = re.findall("<th>([^<]*)</th>", html)
    first = ["method", "τ", "exact", "speedup", "tokens/s", "plain tokens/s"]
    assert headings == [*first, "batch", "context", "acceptance rate", "ms/token"]
    assert 'data-sort="3.0"' in html and "3.00 [3.00, 3.00]" in html
    names = [group[0]["method"] for group in ranking.ranked(rows)]
    assert names[0] == "plain" and names[-1] != "plain"  # slower at batch 1, context 64


def test_a_latex_table_is_escaped(tmp_path):
    assert ranking.escaped("a_b 50% + 2") == "a\\_b 50\\% + 2"
    folder = fill(tmp_path / "mine", batches=(4,), contexts=(64,))
    change(folder, {"draft": "small"}, method="draft_1 + 5%, chain:4")
    rows = answer.with_intervals(results_folder.read(folder).cells)
    table = ranking.to_latex(rows)
    lines = table.splitlines()
    assert lines[0].startswith("% Needs booktabs")
    lines = lines[3:]
    assert lines[:2] == ["\\begin{tabular}{lrrrrr}", "\\toprule"]
    assert lines[2] == "method & $\\tau$ & exact & speedup & tokens/s & plain tokens/s \\\\"
    assert lines[4] == "\\multicolumn{6}{l}{\\emph{batch 4, context 64}} \\\\"
    assert lines[5].startswith("\\textbf{draft\\_1 + 5\\%, chain:4} & 2.00 & yes & 2.50 [")
    assert all(line.count(" & ") == 5 for line in lines if " & " in line)
    undecided = [row | {"low": 0.9} for row in rows]
    assert "textbf" not in ranking.to_latex(undecided)


@pytest.fixture
def no_figures(monkeypatch):
    """A report without figures, which take most of the time."""
    monkeypatch.setattr(page, "make_figures", lambda cells, rows: {})


def test_two_folders_are_compared_cell_by_cell(tmp_path, capsys, no_figures):
    mine = fill(tmp_path / "mine")
    other = fill(tmp_path / "other", batches=(4,), contexts=(64, 96, 128), faster=0.5, failed={})
    cells = results_folder.read(other).cells
    path = next(c.folder for c in cells if c.row["context"] == 64) / "requests.jsonl"
    path.write_text(path.read_text().replace("[4, 1]", "[5, 1]"))
    assert page.main(mine, other) == 0
    lines = (mine / "comparison.csv").read_text().splitlines()
    assert len(lines) == 1 + 16 + 4  # those of a context that only one has, too
    table = page.pd.read_csv(mine / "comparison.csv")
    both = table.dropna(subset=["tok/s ratio"])
    assert len(both) == 7 and set(both["tok/s ratio"]) == {1.0, 2.0}
    assert both["same_tokens"].astype(str).value_counts().to_dict() == {"True": 6, "False": 1}
    assert "comparison" in figures_of(mine) and "same_tokens" in capsys.readouterr().out


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
