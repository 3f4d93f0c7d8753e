"""The report of a folder of results: finished cells, and failed ones."""

import re
import shutil

import numpy as np
import pytest
import yaml

from experiments.report import categories, page, results_folder, terminal
from experiments.schema import config, grid, store
from experiments.schema.columns import COLUMNS, TIMES

METHODS = [
    {"drafter": "self", "budget": [64, 256], "tree": "chain:3"},
    {"drafter": "small:somewhere/draft-1", "tree": "expansion:2,1"},
]
FAILED = {(4, 96, "small"): ("memory", "out of memory: the process held 3 GB")}


def fill(directory, batches=(1, 4), contexts=(64, 96), faster=1.0, failed=FAILED):
    """Writes a folder of results: a cell is faster the larger its batch and context are."""
    axes = {"batch": list(batches), "context": list(contexts)}
    experiment = config.Experiment(grid=axes, methods=METHODS)
    settings = experiment.model_dump(mode="json", exclude_unset=True)
    store.write_experiment(directory, settings, "mine.yaml")
    for cell in (cell for group in grid.groups(experiment) for cell in group):
        folder = store.cell_folder(directory, grid.key(cell))
        store.write_cell(folder, grid.resolved(cell))
        if (why := failed.get((cell.batch, cell.context, cell.draft))) is not None:
            store.write_failure(folder, *why)
            continue
        speed = 1.0 if cell.draft == "none" else faster * cell.batch * cell.context / 128
        row = dict.fromkeys(COLUMNS) | grid.columns(cell)
        row |= dict.fromkeys(TIMES, 1.0) | {
            "status": "ok",
            "error": "",
            "tau": 2.0,
            "ties": 0,
        }
        row |= {"speedup": speed, "speedup_low": speed * 0.9, "speedup_high": speed * 1.1}
        row |= {"decode_tok_s": 100 * speed, "exact_match": 1.0, "acceptance_rate": 0.5}
        row |= {f"{name}_s": 0.1 for name in ("draft", "score", "verify", "commit", "rest", "host")}
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
        store.write_result(folder, env, {"row": row} | curves, requests)
    return directory


def test_a_page_holds_all_cells_figures_and_the_experiment(tmp_path):
    folder = fill(tmp_path / "mine")
    written = page.write(folder)
    assert written == [
        "report.html",
        "speedup_map.png",
        "speedup.png",
        "tau.png",
        "acceptance.png",
        "depth.png",
        "phases.png",
        "throughput.png",
    ]
    html = (folder / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 7 and 'src="http' not in html
    # All cells; two categories of the drafted cells of batch 4; requests of the drafted cells.
    assert html.count("<tr") == (1 + 16) + (1 + 5 * 2) + (1 + 6 + 5 * 4)
    assert "15 of 16 cells have a result" in html
    assert "out of memory: out of memory: the process held 3 GB" in html
    assert "a machine" in html and "budget" in html and "mean acceptance length" in html
    assert re.search(r"<th>decode_tok_s</th>\s*<th>ar_decode_tok_s</th>", html)
    assert "<title>mine: report</title>" in html and "<h1>mine</h1>" in html
    for name in written[1:]:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_categories_pool_the_rounds_of_their_requests(tmp_path):
    cells = results_folder.read(fill(tmp_path / "mine", contexts=(64,), failed={})).cells
    table = categories.by_category(cells)
    assert list(table["batch"]) == [4] * 6 and list(table["rows"]) == [2] * 6
    math = table[table["category"] == "math"].iloc[0]  # requests 0 and 2
    assert math["tau"] == (2 * 3.0 + 10 * 2.0) / 12
    assert math["accepted"] == (2 * 6 + 3 * 2) / (3 * 12) and np.isnan(math["score"])
    assert math["accepted 0, 1, …"] == "33% 0% 50% 17%"
    assert set(table[table["category"] == "writing"]["score"]) == {0.5}
    assert len(categories.by_request(cells)) == 3 * (1 + 4)
    single = [cell for cell in cells if cell.row["batch"] == 1]
    assert categories.by_category(single).empty  # one request has one category


def test_too_many_requests_are_not_shown(tmp_path, monkeypatch):
    cells = results_folder.read(fill(tmp_path / "mine", contexts=(64,), failed={})).cells
    monkeypatch.setattr(categories, "MAX_ROWS", 14)
    assert categories.by_request(cells).empty


def test_figures_of_an_earlier_report_are_removed(tmp_path):
    folder = fill(tmp_path / "mine")
    page.write(folder)
    one = [cell.key for cell in results_folder.read(folder).cells if cell.row["batch"] == 1][:3]
    assert "throughput.png" not in page.write(folder, one)
    assert not (folder / "throughput.png").exists()


def test_folders_of_two_machines_are_merged_by_copying_their_cells(tmp_path):
    first = fill(tmp_path / "first", batches=(1,))
    second = fill(tmp_path / "second", batches=(4,))
    for path in (second / "cells").iterdir():
        shutil.copytree(path, first / "cells" / path.name)
    found = results_folder.read(first)
    assert len(found.cells) == 16 and {row["batch"] for row in found.rows} == {1, 4}


def test_two_folders_are_compared_cell_by_cell(tmp_path, capsys):
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
    assert (mine / "comparison.png").exists() and "same_tokens" in capsys.readouterr().out


def test_a_share_above_the_measured_bandwidth_is_explained(tmp_path):
    rows = results_folder.read(fill(tmp_path / "mine", batches=(1,), contexts=(64,))).rows
    row = next(row for row in rows if row["draft"] == "none")
    assert terminal.notes([row])[0].endswith("100% of the measured 1.0 GB/s")
    above = terminal.notes([row | {"bandwidth_share": 1.25}])[0]
    assert above.endswith(
        "125% of the measured 1.0 GB/s (more than the measured bandwidth: the cache of the CPU "
        "holds part of the data)"
    )


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


def test_the_config_is_escaped(tmp_path):
    folder = fill(tmp_path / "mine", batches=(1,), contexts=(64,))
    path = folder / "experiment.yaml"
    known = yaml.safe_load(path.read_text())
    known["config"]["target"] = "<script>"
    path.write_text(yaml.safe_dump(known))
    page.write(folder)
    assert "<script>" not in (folder / "report.html").read_text()


def test_columns_of_the_page_are_columns_of_the_summary():
    assert set(page.COLUMNS) <= set(COLUMNS)


def test_a_failed_cell_has_its_status_and_settings(tmp_path):
    folder = fill(tmp_path / "mine")
    (row,) = (row for row in results_folder.read(folder).rows if row["status"] != "ok")
    assert (row["status"], row["method"], row["batch"]) == (
        "memory",
        "small:draft-1:full, expansion:2,1",
        4,
    )


def change(folder, what, **columns):
    """Changes the columns of the cells whose settings have the values in `what`."""
    for cell in results_folder.read(folder).cells:
        if cell.metrics and what.items() <= cell.row.items():
            metrics = cell.metrics | {"row": cell.metrics["row"] | columns}
            metrics |= {name: columns[name] for name in cell.metrics if name in columns}
            store.write_json(cell.folder / store.METRICS, metrics)


def test_cells_without_times_are_not_in_figures_of_speed(tmp_path):
    folder = fill(tmp_path / "mine", failed={})
    change(folder, {"batch": 1}, **dict.fromkeys(TIMES))
    assert "speedup_map.png" in page.write(folder)
    change(folder, {}, **dict.fromkeys(TIMES))
    assert not {"speedup_map.png", "speedup.png", "throughput.png"} & {*page.write(folder)}


def test_curves_of_different_depths_are_averaged_at_each_depth(tmp_path):
    folder = fill(tmp_path / "mine", failed={})
    change(folder, {"batch": 4}, acceptance_by_depth=[0.5], acceptance_if_reached=[])
    curves = page._curves(results_folder.read(folder).cells)["small:draft-1:full, expansion:2,1"]
    assert curves == ([0.7, 0.6], [pytest.approx(0.6), 0.4])
    assert "depth.png" in page.write(folder)


def test_figures_by_batch_and_context_are_omitted_if_more_varies(tmp_path):
    folder = fill(tmp_path / "mine", failed={})
    change(folder, {"batch": 4}, dtype="bfloat16")
    written = page.write(folder)
    assert not {"speedup_map.png", "speedup.png", "throughput.png"} & {*written}
    assert "Cells also differ in dtype" in (folder / "report.html").read_text()


def test_a_report_has_the_order_of_the_summary(tmp_path):
    folder = fill(tmp_path / "mine", failed={})
    cells = results_folder.read(folder).cells[::-1]
    store.write_summary(folder, [cell.row for cell in cells[3:]], COLUMNS)
    again = [cell.key for cell in results_folder.read(folder).cells]
    assert again[:-3] == [cell.key for cell in cells[3:]]
    assert {*again[-3:]} == {cell.key for cell in cells[:3]}
