"""Writes the report of a folder of results: python -m experiments.report results/NAME

`report.html` is one file that needs no network: the best method of each batch and context, all
methods ranked, plots, categories of prompts and requests, and, folded, all columns, the experiment
and where it ran. `figures/` has each plot as PDF and SVG in the widths of a paper's columns (3.3
and 6.9 inches). `--latex` writes the ranking as a LaTeX table. `--against OTHER` compares two
folders. To merge folders of several machines, copy their `cells` into one folder.
"""

import collections
import html
import itertools
import json
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import tyro
import yaml

from experiments.report import (
    answer,
    categories,
    comparison,
    export,
    figures,
    heat_maps,
    labels,
    ranking,
)
from experiments.report.export import Figure
from experiments.report.labels import Row, Rows
from experiments.report.results_folder import CellResult, Results, read
from experiments.schema import columns
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError
from experiments.schema.method import Method
from magicjax.files import write_atomically

PAGE, FIGURES, TABLE = "report.html", "figures", "table.tex"
MAX_BARS = 32  # of time_split
MAX_SHAPES = 8  # panels of speedups; lines and heat maps show more
MAX_CURVES = 7

# Columns of the folded table of all columns: (format, meaning).
COLUMNS = {
    "method": ("{}", "drafter, cache and tree; plain: no speculation"),
    "batch": ("{}", "rows decoded in one batch"),
    "context": ("{:,}", "tokens of each prompt"),
} | {name: column for name, column in columns.MEASURED.items() if column.meaning}
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


def write(results: Results, to_do: int = 0) -> list[str]:
    """Writes the report of a folder's cells, and returns the names of its files.

    Args:
      results: the cells.
      to_do: how many other cells of the experiment have not ended.
    """
    directory = results.directory
    rows = answer.with_intervals(results.cells)
    shutil.rmtree(directory / FIGURES, ignore_errors=True)  # of an earlier report
    made = {
        name: (export.write(directory / FIGURES, name, figure), figure.caption)
        for name, figure in make_figures(results.cells, rows).items()
    }
    write_atomically(directory / PAGE, _page(results, rows, export.embedded(made), to_do))
    return [PAGE, *([f"{FIGURES}/"] if made else [])]


def make_figures(cells: Sequence[CellResult], rows: Rows) -> dict[str, Figure]:
    """Returns the figures that the cells, and their rows with intervals, suffice for, by name."""
    styles = labels.styles(rows)
    rows = [row for group in labels.grouped(rows) for row in group]
    finished = [row for row in rows if row["status"] == "ok"]
    timed = [row for row in finished if row["speedup"] is not None]
    drafted = [row for row in finished if row["draft"] != "none"]
    fast = [row for row in drafted if row in timed]
    found: dict[str, Figure] = {}
    if fast:
        if len({labels.shape(row) for row in fast}) <= MAX_SHAPES:
            found["speedup"] = figures.speedups(fast, styles)
        for axis in ("context", "batch", "slots"):
            if lines := figures.by_axis(fast, styles, axis):
                found[f"speedup_by_{axis}"] = lines
    by_shape = labels.group_columns(rows) == ["batch", "context"]
    if fast and by_shape and len({labels.shape(row) for row in fast}) > 1:
        failed = [row for row in rows if row["status"] != "ok" and row["draft"] != "none"]
        found["speedup_map"] = heat_maps.speedups([r for r in rows if r in fast or r in failed])
    if len({row["budget"] for row in drafted} - {None}) > 1:
        label = "τ, tokens per target pass"
        found["tau"] = figures.by_budget(drafted, styles, "tau", label)
        found["acceptance"] = figures.by_budget(
            drafted, styles, "acceptance_rate", "acceptance rate"
        )
    if curves := _curves(cells):
        found["depth"] = figures.acceptance_by_depth(curves, styles)
    if traced := [row for row in finished if row["score_s"] or row["phases_error"]]:
        bars = traced
        if len(traced) > MAX_BARS:
            largest = max(row["context"] for row in traced)
            bars = [row for row in traced if row["context"] == largest][:MAX_BARS]
        found["phases"] = figures.time_split(bars, len(traced))
    served = [row for row in timed if row["slots"]]
    if len({row["rate"] for row in served}) > 1:
        found["goodput"] = figures.by_rate(served, styles, "goodput", "linear")
        found["ttft"] = figures.by_rate(served, styles, "ttft_s_p95", "log")
    if not served and len({row["batch"] for row in timed}) > 1:
        found["throughput"] = figures.throughput(timed, styles)
    return found


def _curves(cells: Sequence[CellResult]) -> dict[str, tuple[list[float], list[float]]]:
    """Returns each method's (acceptance if reached, acceptance) by depth, means over its cells."""
    by_method = collections.defaultdict(list)
    for cell in cells:
        # "auto" has no depths where it chooses plain decoding.
        if cell.metrics and cell.metrics["acceptance_by_depth"] and cell.row["draft"] != "none":
            by_method[cell.row["method"]].append(cell.metrics)
    names = ("acceptance_if_reached", "acceptance_by_depth")
    return {
        method: (_mean([m[names[0]] for m in found]), _mean([m[names[1]] for m in found]))
        for method, found in list(by_method.items())[:MAX_CURVES]
    }


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    """Returns the mean at each depth, over the curves that reach it ("auto" chooses depths)."""
    table = np.array(list(itertools.zip_longest(*curves, fillvalue=np.nan)), float)
    return np.nanmean(table, 1).tolist() if table.size else []


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; }
h1 { margin-bottom: 0; } .lead { font-size: 17px; }
figure { margin: 1.5em 0; } figcaption, .note { color: #555; font-size: 13px; }
.chart { width: 100%; max-width: 56em; } .chart svg { width: 100%; height: auto; }
.wide { overflow: auto; max-height: 85vh; }
table { border-collapse: collapse; font-size: 13px; }
.answers td, .answers th { white-space: normal; text-align: left; }
td, th { padding: 2px 8px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { position: sticky; top: 0; background: white; box-shadow: 0 1px #999; white-space: normal; }
td:first-child, th:first-child { text-align: left; }
.sortable td:first-child { position: sticky; left: 0; background: white; white-space: normal; }
.sortable td:first-child { overflow-wrap: anywhere; min-width: 8em; }
.sortable th { cursor: pointer; } th[aria-sort=ascending]::after { content: " ↑"; }
th[aria-sort=descending]::after { content: " ↓"; } .failures { overflow-wrap: anywhere; }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; } summary { cursor: pointer; }
dt { font-family: monospace; } dd { margin: 0 0 .4em 2em; }
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


def _page(results: Results, rows: Rows, shown: str, to_do: int = 0) -> str:
    """Returns the HTML of the page; `shown` is that of the figures, `to_do` as in `write`."""
    meanings = "".join(
        f"<dt>{name}</dt><dd>{html.escape(meaning)}</dd>" for name, (_, meaning) in COLUMNS.items()
    )
    title = html.escape(results.directory.name)
    config = results.experiment["config"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}: report</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{_answers(rows, to_do)}"
        f"<h2>Methods</h2>{_failures(rows)}"
        f'<div class="wide">{ranking.to_html(rows)}</div><script>{SORT}</script>'
        f"{'<h2>Figures</h2>' if shown else ''}{shown}{_requests(results.cells)}"
        f"<h2>Experiment</h2><p>Settings other than the defaults:</p>{_yaml(changed(config))}"
        f"{_folded('All settings', _yaml(config))}"
        f"{_folded('All columns', _table(rows), f'<dl>{meanings}</dl>')}"
        f"{_folded('Environment', _environments(results))}</body></html>\n"
    )


def _folded(title: str, *parts: str) -> str:
    return f"<details><summary>{title}</summary>{''.join(parts)}</details>"


def _answers(rows: Rows, to_do: int) -> str:
    """Returns the HTML that opens the page: the best method of each group."""
    finished = sum(row["status"] == "ok" for row in rows)
    count = f"{finished} of {len(rows) + to_do} cells have a result."
    first, *others = (html.escape(text, quote=False) for text in (*answer.sentences(rows), count))
    table = pd.DataFrame([_line(one) for one in answer.answers(rows)]).fillna("–")
    table = table.loc[:, (table != "").any()]
    return (
        f'<p class="lead"><b>{first}</b> {" ".join(others)}</p>{_html(table, "answers")}'
        f'<p class="note">{NOTE}{SERVED_NOTE * any(row["slots"] for row in rows)}</p>'
    )


def _html(table: pd.DataFrame, kind: str | None = None) -> str:
    """Returns the HTML of a table, which scrolls if it is wider than the window."""
    with pd.option_context("display.max_colwidth", None):
        shown = table.to_html(
            index=False, border=0, classes=kind, na_rep="–", float_format="{:.2f}".format
        )
    return f'<div class="wide">{shown}</div>'


def _line(one: answer.Answer) -> dict[str, str]:
    """Returns the line of a group, by heading."""
    best = one.best
    line = {labels.heading(n): labels.value_text(n, value) for n, value in one.group.items()}
    line["best method"] = "no exact result" if best is None else best["method"]
    if one.plain_wins and best is not None:
        line["best method"] = f"plain decoding (next: {best['method']})"
    if one.unclear and best is not None:
        line["best method"] = f"undecided (highest: {best['method']})"
    if best is not None:
        line["τ"] = labels.with_interval(best, "tau").replace(" ", "\u00a0")
        if one.timed:
            line["speedup"] = labels.with_interval(best, "speedup").replace(" ", "\u00a0")
            line["tokens/s"] = f"{best['decode_tok_s']:,.1f}"
            line["plain tokens/s"] = f"{best['ar_decode_tok_s']:,.1f}"
            if best["goodput"] is not None:
                line["goodput"] = f"{best['goodput']:.2f}"
                line["plain goodput"] = f"{best['ar_goodput']:.2f}"
        line["measured"] = best["evidence"]
    remarks = ["the interval contains 1"] if one.unclear else []
    if one.inexact:
        remarks.append(f"not equal to plain decoding: {', '.join(one.inexact)}")
    if one.close:
        remarks.append(f"overlapping intervals: {', '.join(one.close)}")
    return line | {"remarks": "; ".join(remarks)}


def _failures(rows: Rows) -> str:
    """Returns the HTML list of the errors, each with the cells that have it."""
    cells = collections.defaultdict(list)
    for row in rows:
        if row["status"] != "ok":
            cells[f"{labels.failure(row)}: {row['error']}"].append(
                f"{row['method']} ({labels.size_name(row)} {row['batch']}, "
                f"context {row['context']:,})"
            )
    lines = "".join(
        f"<li>{html.escape(', '.join(names))}: {html.escape(error)}</li>"
        for error, names in cells.items()
    )
    return _folded("Failures", f'<ul class="failures">{lines}</ul>') if cells else ""


def _table(rows: Rows) -> str:
    """Returns the HTML table of all cells with all columns that are not empty."""
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    names = list(dict.fromkeys([*names[:3], *labels.varying(rows), *names[3:]]))
    return _html(pd.DataFrame([{name: _text(row, name) for name in names} for row in rows]))


def _text(row: Row, name: str) -> str:
    if name not in COLUMNS:
        return labels.value_text(name, row.get(name))
    value = row.get(name)
    return "–" if value is None else COLUMNS[name][0].format(value)


def _requests(cells: Sequence[CellResult]) -> str:
    """Returns the HTML tables of categories and of requests, folded."""
    groups, lines = categories.by_category(cells), categories.by_request(cells)
    shown = ""
    if len(groups):
        shown = _folded("Categories", f"<p>{categories.MEANING}</p>", _html(groups))
    if len(lines):
        shown += _folded("Requests", _html(lines))
    return shown


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


def main(
    folder: tyro.conf.Positional[pathlib.Path],
    against: pathlib.Path | None = None,
    latex: bool = False,
) -> int:
    """Writes the report of a folder of results.

    Args:
      folder: the folder, such as results/demo.
      against: another folder to compare with, in a table and a figure.
      latex: also write the ranking as a LaTeX table, figures/table.tex.

    Returns:
      The exit status: 0, or 2 if a folder cannot be read.
    """
    try:
        results = read(folder)
        written = write(results)
        if latex:
            table = ranking.to_latex(answer.with_intervals(results.cells))
            write_atomically(folder / FIGURES / TABLE, table)
            written.append(f"{FIGURES}/{TABLE}")
        if against is not None:
            compared, figure = comparison.compare(results, read(against))
            if figure is not None:
                export.write(folder / FIGURES, "comparison", figure)
            write_atomically(folder / "comparison.csv", compared.to_csv(index=False))
            with pd.option_context("display.width", 200, "display.max_columns", None):
                print(compared.round(3).to_string(index=False))
            written.append("comparison.csv")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {folder}: {', '.join(written)}")
    return 0
