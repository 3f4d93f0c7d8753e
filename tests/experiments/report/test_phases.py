"""The figure of a round's phases, and cells without them."""

import json

from experiments.report import answer, export, page, results_folder, terminal
from tests.experiments.report.test_report import change, fill

REASON = "XLA compiled the loop to one operation"


def test_a_cell_without_phases_has_the_reason_in_place_of_its_bar(tmp_path):
    folder = fill(tmp_path / "mine", batches=[1], contexts=[64], failed={})
    times = dict.fromkeys(f"{name}_s" for name in ("draft", "score", "verify", "commit"))
    change(folder, {"budget": 64}, **times, phases_error=REASON)
    cells = results_folder.read(folder).cells
    rows = answer.with_intervals(cells)
    figure = page.make_figures(cells, rows)["phases"]
    values = json.loads(json.dumps(export.spec(figure, "double")["data"]))["values"]
    assert [row["method"] for row in values if row.get("reason") == REASON] == [
        "self:streaming:64, chain:3"
    ]
    assert len({row["method"] for row in values if "share" in row}) == 3
    assert REASON in figure._repr_svg_()
    (line,) = (line for line in terminal.notes(rows) if REASON in line)
    assert line.startswith("batch 1, context 64, self:streaming:64, chain:3: no bar in the figure")
    speedups = page.make_figures(cells, rows)["speedup"].draw(100.0, 1).to_dict()
    assert REASON not in json.dumps(speedups)
