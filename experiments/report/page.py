"""Writes the report of a folder of results: python -m experiments.report results/NAME

`report.html` has the answer in words, a table of all methods, which a click on a heading sorts,
charts, and, folded, the experiment and where it ran. The charts are drawn by Vega-Embed, which the
page contains, so it needs no network; their menus save them as SVG and PNG. To merge folders of
several machines, copy their `cells` into one folder.
"""

import collections
import functools
import html
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import altair as alt
import tyro
import vl_convert
import yaml

from experiments.report import answer, charts, ranking
from experiments.report.labels import Rows
from experiments.report.results_folder import Results, read
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError
from experiments.schema.method import Method
from magicjax.files import write_atomically

PAGE = "report.html"
NOTE = (
    "Speedups are over plain decoding of the same prompts, whose runs alternate with the method's "
    f"in one process. Intervals ({answer.LEVEL} %): percentile bootstrap over runs and batches of "
    "prompts, drawn in pairs with the plain runs (τ without times: over requests). With fewer than "
    f"{answer.FEW} measurements (“few”) an interval is too narrow. A method that is not equal to "
    "plain decoding cannot be the best."
)
SERVED_NOTE = (
    " Tokens/s are those from the first arrival to the last end: at a rate that all methods can "
    "serve they are equal, so compare latencies and goodput."
)


def write(results: Results, to_do: int = 0) -> None:
    """Writes the report of a folder's cells.

    Args:
      results: the cells.
      to_do: how many other cells of the experiment have not ended.
    """
    by_category = map(ranking.tau_by_category, results.cells)
    rows = [
        row | {ranking.CATEGORIES: text}
        for row, text in zip(answer.with_intervals(results.cells), by_category, strict=True)
    ]
    write_atomically(results.directory / PAGE, _page(results, rows, to_do))


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; }
h1 { margin-bottom: 0; } .lead { font-size: 17px; } .note { color: #555; font-size: 13px; }
.wide { overflow: auto; max-height: 85vh; } .chart.vega-embed { display: block; margin: 1.5em 0; }
table { border-collapse: collapse; font-size: 13px; }
td, th { padding: 2px 8px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { position: sticky; top: 0; background: white; box-shadow: 0 1px #999; white-space: normal; }
td:first-child, th:first-child { text-align: left; }
.best { font-weight: bold; } .sortable th { cursor: pointer; }
th[aria-sort=ascending]::after { content: " ↑"; }
th[aria-sort=descending]::after { content: " ↓"; }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; } summary { cursor: pointer; }
"""
# A click sorts by the column, a second one in the other direction; cells without a value are last.
SORT = """
for (const th of document.querySelectorAll(".sortable th")) th.onclick = () => {
  const down = th.ariaSort !== "descending", body = th.closest("table").tBodies[0];
  for (const other of th.parentNode.children) other.removeAttribute("aria-sort");
  th.ariaSort = down ? "descending" : "ascending";
  const key = row => row.cells[th.cellIndex].dataset.sort;
  const order = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)], text = Number.isNaN(x) || Number.isNaN(y);
    return (text ? b.localeCompare(a) : y - x) * (down ? 1 : -1);
  };
  body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))));
};
"""


def _page(results: Results, rows: Rows, to_do: int = 0) -> str:
    """Returns the HTML of the page; `to_do` as in `write`."""
    title = html.escape(results.directory.name)
    cells = [cell for cell in results.cells if cell.folder]
    finished = sum(cell.row["status"] == "ok" for cell in cells)
    count = f"{finished} of {len(cells) + to_do} cells have a result."
    first, *others = (html.escape(text, quote=False) for text in (*answer.sentences(rows), count))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}: report</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f'<p class="lead"><b>{first}</b> {" ".join(others)}</p>'
        f'<div class="wide">{ranking.to_html(rows)}</div><script>{SORT}</script>'
        f'<p class="note">{NOTE}{SERVED_NOTE * any(row["slots"] for row in rows)}</p>'
        f"{_charts(charts.charts(rows))}"
        f"{_folded('Experiment', _yaml(changed(results.experiment['config'])))}"
        f"{_folded('Environment', _environments(results))}</body></html>\n"
    )


def _charts(by_name: Mapping[str, charts.Chart]) -> str:
    """Returns the HTML of charts, given by name."""
    if not by_name:
        return ""
    shown = "".join(f'<div class="chart" id="{name}"></div>' for name in by_name)
    specs = {name: chart.to_dict() for name, chart in by_name.items()}
    encoded = json.dumps(specs, ensure_ascii=False).replace("</", "<\\/")
    return (
        f'{shown}<script>{_vega_embed()}</script><script type="module">'
        f"const charts = {encoded};\n"
        'for (const name in charts) vegaEmbed("#" + name, charts[name], {renderer: "svg"});'
        "</script>"
    )


@functools.cache
def _vega_embed() -> str:
    """Returns Vega-Embed, Vega-Lite and Vega as one script, which takes seconds to make."""
    version = ".".join(alt.VEGALITE_VERSION.split(".")[:2])
    return vl_convert.javascript_bundle(None, version)


def _folded(title: str, shown: str) -> str:
    return f"<details><summary>{title}</summary>{shown}</details>"


def changed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an experiment that differ from the defaults."""
    methods = []
    for method in config.get("methods", []):
        shown = _other_than(method, Method())
        methods.append({"drafter": method["drafter"]} | shown.pop("options", {}) | shown)
    return _other_than(config, Experiment()) | ({"methods": methods} if methods else {})


def _other_than(settings: Mapping[str, Any], model: Any) -> dict[str, Any]:
    defaults = model.model_dump(mode="json")
    return {n: v for n, v in settings.items() if v != defaults.get(n)}


def _yaml(settings: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
    return f"<pre>{html.escape(text)}</pre>"


def _environments(results: Results) -> str:
    """Returns each environment of the cells and their number, without dates."""
    counted: collections.Counter[str] = collections.Counter()
    for cell in results.cells:
        if cell.env:
            env = {name: value for name, value in cell.env.items() if name != "date"}
            shown = ("jax", "python", "code")
            env["made_by"] = {name: v for name, v in env["made_by"].items() if name in shown}
            counted[json.dumps(env, indent=1, ensure_ascii=False)] += 1
    return "".join(
        f"<p>{count} cells</p><pre>{html.escape(env)}</pre>" for env, count in counted.items()
    )


def main(folder: tyro.conf.Positional[pathlib.Path]) -> int:
    """Writes the report of a folder of results.

    Args:
      folder: the folder, such as results/demo.

    Returns:
      The exit status: 0, or 2 if the folder cannot be read.
    """
    try:
        write(read(folder))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {folder / PAGE}")
    return 0
