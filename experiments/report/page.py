"""Makes a page of a folder of results: python -m experiments.report results/NAME

One HTML file that needs nothing else, and its pictures as PNG beside it: speed-ups by batch and
context, τ and acceptance by budget and depth, where the time goes, throughput against latency, a
table of all cells, what the columns mean, what was asked for and where it ran. Folders of several
machines are merged by copying their `cells` together. `--against OTHER` compares two folders.
"""

import base64
import collections
import html
import io
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import tyro
import yaml
from matplotlib.figure import Figure

from experiments.report import comparison, figures, heat_maps, terminal
from experiments.report.results_folder import CellResult, Results, read
from experiments.schema import store
from experiments.schema.fields import ConfigError

PAGE = "report.html"
MOST_BARS = 32

COLUMNS = {
    "batch": ("{}", "rows decoded together"),
    "context": ("{:,}", "tokens of each prompt"),
    "method": ("{}", "who drafts, on which cache, which tree; plain: no speculation"),
    "decode_tok_s": ("{:.0f}", "tokens a second of the whole batch, prefill aside (median run)"),
    "decode_tok_s_user": ("{:.1f}", "the same for one row"),
    "decode_tok_s_device": ("{:.0f}", "the same for one device"),
    "speedup": (
        "{:.2f}",
        "decode_tok_s over that of plain decoding at the same batch, context and dtype, whose runs "
        "took turns with this method's in one process",
    ),
    "speedup_low": ("{:.2f}", "the least of the runs, each against the plain one beside it"),
    "speedup_high": ("{:.2f}", "the most of them"),
    "tau": (
        "{:.2f}",
        "τ, mean acceptance length: tokens emitted for each pass of the target, its own included; "
        "every pass counts the same",
    ),
    "tau_by_request": ("{:.2f}", "τ of each row, averaged: every request counts the same"),
    "block_efficiency": (
        "{:.2f}",
        "tokens a pass decided, 1 + accepted drafts: τ without the cut that a row's end makes",
    ),
    "acceptance_rate": ("{:.3f}", "accepted tokens over depth times rounds"),
    "exact_match": (
        "{:.3f}",
        "share of rows with plain decoding's tokens; a tie decided by rounding counts as equal",
    ),
    "noise_match": ("{:.3f}", "share of rows that all runs of plain decoding agree on"),
    "ties": ("{}", "rows that part from plain decoding at such a tie"),
    "first_divergence": ("{}", "the first new token at which a row parts from it"),
    "top2_margin": ("{:.1e}", "how far its two tokens' logits are apart there, over the largest"),
    "ttft_s": ("{:.3f}", "time to first token: seconds of prefill"),
    "tpot_ms_p50": (
        "{:.2f}",
        "time per output token after the first, ms, median over requests and runs: a row that "
        "needs fewer rounds is done earlier",
    ),
    "tpot_ms_p99": ("{:.2f}", "the same, 99th percentile"),
    "memory_mb": (
        "{:.0f}",
        "most memory that the cell's process held, of a GPU, or on a CPU in all; plain decoding, "
        "which runs beside the method, and the comparison of texts have their share in it",
    ),
    "score": ("{:.2f}", "share of the right answers that stand in the text"),
}


def write(directory: pathlib.Path, keys: list[str] | None = None) -> list[str]:
    """Returns the names of the files of a report on a folder of results, having written them.

    Args:
      directory: of the results.
      keys: of the cells; None: all that are there.

    Raises:
      ConfigError: the folder cannot be read (`results_folder.read`).
    """
    results = read(directory, keys)
    drawn = pictures(results)
    for name in PICTURES:
        (directory / name).unlink(missing_ok=True)  # of an earlier report
    images = {name: _png(figure) for name, figure in drawn.items()}
    for name, image in images.items():
        store.write_bytes(directory / name, image)
    store.write_text(directory / PAGE, _page(results, images))
    return [PAGE, *images]


PICTURES = {
    "speedup_map.png": "Speed-up over plain decoding by batch and context, a panel a method; "
    "violet is faster, orange slower, hatched did not run.",
    "speedup.png": "Speed-up over plain decoding; whiskers span the single runs.",
    "tau.png": "Tokens for each pass of the target, by the slots of a draft's cache.",
    "acceptance.png": "Share of drafted tokens accepted, by the slots of a draft's cache.",
    "depth.png": "How far rounds go down the tree, averaged over the cells of a method.",
    "phases.png": "Where the time of a round goes, in one traced run of each cell.",
    "throughput.png": "Throughput of the batch against latency of one user, of each cell's own "
    "runs (a speed-up is against plain runs in the same process); numbers are batches.",
}
MOST_SHAPES = 6  # of bars; more are a map's


def pictures(results: Results) -> dict[str, Figure]:
    """Returns the pictures that a folder of results is worth, by file name."""
    rows, title = results.rows, results.directory.name
    good = [row for row in rows if row["status"] == "ok"]
    drafted = [row for row in rows if row["draft"] != "none"]
    drawn = [row for row in drafted if row["status"] == "ok"]
    timed = [row for row in good if row["speedup"] is not None]
    found: dict[str, Figure] = {}
    shapes = {(row["batch"], row["context"]) for row in rows}
    plane = not terminal.varying(rows)  # batch and context are all that differs
    fast = [row for row in drawn if row["speedup"] is not None]
    if plane and fast and len(shapes) > 1:
        shown = [row for row in drafted if row["status"] != "ok" or row["speedup"] is not None]
        found["speedup_map.png"] = heat_maps.speedups(shown)
    if plane and fast and len(shapes) <= MOST_SHAPES:
        found["speedup.png"] = figures.speedups(timed, fast, title)
    if len({row["kv_budget"] for row in drawn} - {None}) > 1:
        found["tau.png"] = figures.by_budget(drawn, title, "tau", "τ, tokens a pass of the target")
        label = "drafted tokens accepted"
        found["acceptance.png"] = figures.by_budget(drawn, title, "acceptance_rate", label)
    if curves := _curves(results.cells):
        found["depth.png"] = figures.acceptance_by_depth(curves)
    if traced := [row for row in good if row["score_s"]]:
        largest = max(row["context"] for row in traced)
        if len(traced) > MOST_BARS:
            traced = [row for row in traced if row["context"] == largest]
        found["phases.png"] = figures.time_split(traced[:MOST_BARS])
    if plane and len({row["batch"] for row in timed}) > 1:
        found["throughput.png"] = figures.throughput(timed)
    return {name: found[name] for name in PICTURES if name in found}


MOST_CURVES = 7


def _curves(cells: Sequence[CellResult]) -> dict[str, tuple[list[float], list[float]]]:
    """Returns acceptance by depth of each method, averaged over its cells: (if reached, of all)."""
    kept = collections.defaultdict(list)
    for cell in cells:
        if cell.metrics and cell.row["draft"] != "none":
            kept[cell.row["method"]].append(cell.metrics)
    names = ("acceptance_if_reached", "acceptance_by_depth")
    return {
        method: (_mean([one[names[0]] for one in found]), _mean([one[names[1]] for one in found]))
        for method, found in list(kept.items())[:MOST_CURVES]
    }


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    """Returns the mean of curves at each depth, over those that are so deep ("auto" chooses)."""
    deepest = max(map(len, curves))
    return [
        float(np.mean([curve[depth] for curve in curves if depth < len(curve)]))
        for depth in range(deepest)
    ]


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    return buffer.getvalue()


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
img { max-width: 100%; } figcaption, .small { color: #555; font-size: 13px; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
td, th { padding: 2px 8px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
td.text, th.text { text-align: left; } pre { background: #f5f5f5; padding: 1em; overflow-x: auto; }
dt { font-family: monospace; } dd { margin: 0 0 .4em 2em; }
"""


def _page(results: Results, images: dict[str, bytes]) -> str:
    """Returns the whole page."""
    rows = results.rows
    good = sum(row["status"] == "ok" for row in rows)
    said = f"{good} of {len(rows)} cells gave a result."
    if failed := [row for row in rows if row["status"] != "ok"]:
        said += f" {len(failed)} did not, see the table."
    if others := terminal.varying(rows):
        said += f" Cells differ in {', '.join(others)} too: no pictures by batch and context alone."
    wrong = [row for row in rows if row["status"] == "ok" and not terminal.is_exact(row)]
    if wrong:
        said += f" <b>{len(wrong)} are NOT equal to plain decoding.</b>"
    shown = "".join(
        f'<figure><img alt="{html.escape(PICTURES[name])}" src="data:image/png;base64,'
        f'{base64.b64encode(image).decode()}"><figcaption>{html.escape(PICTURES[name])}'
        "</figcaption></figure>"
        for name, image in images.items()
    )
    meanings = "".join(
        f"<dt>{name}</dt><dd>{html.escape(meaning)}</dd>" for name, (_, meaning) in COLUMNS.items()
    )
    asked = yaml.safe_dump(results.experiment["config"], sort_keys=False, allow_unicode=True)
    title = html.escape(results.directory.name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><p>{said}</p>{shown}"
        f"<h2>All cells</h2>{_table(rows)}<h2>What the columns mean</h2><dl>{meanings}</dl>"
        f"<h2>What was asked for</h2><pre>{html.escape(asked)}</pre>"
        f"<h2>Where it ran</h2>{_environments(results)}</body></html>\n"
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of all cells; columns that no cell has are left out."""
    others = terminal.varying(list(rows))
    names = [n for n in COLUMNS if any(row.get(n) is not None for row in rows)]
    names = [*names[:2], *others, *(name for name in names[2:] if name not in others)]
    head = "".join(f'<th class="{_kind(name)}">{name}</th>' for name in names)
    body = "".join(f"<tr>{_line(row, names)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _kind(name: str) -> str:
    return "text" if name == "method" else "number"


def _line(row: dict[str, Any], names: Sequence[str]) -> str:
    cells, start = [], names.index("method") + 1
    for name in names if row["status"] == "ok" else names[:start]:
        value, how = row.get(name), COLUMNS.get(name, ("{}", ""))[0]
        text = "–" if value is None else how.format(value)
        cells.append(f'<td class="{_kind(name)}">{html.escape(text)}</td>')
    if row["status"] != "ok":
        said = f"{terminal.FAILED.get(row['status'], 'failed')}: {row['error']}"
        span = len(names) - start
        cells.append(f'<td class="text" colspan="{span}">{html.escape(said)}</td>')
    return "".join(cells)


def _environments(results: Results) -> str:
    """Returns each environment that cells ran in, and how many did; dates are left out."""
    counted: collections.Counter[str] = collections.Counter()
    for cell in results.cells:
        if cell.env:
            own = {name: value for name, value in cell.env.items() if name != "date"}
            own["made_by"] = {
                name: value
                for name, value in own["made_by"].items()
                if name in ("jax", "python", "code")
            }
            counted[json.dumps(own, indent=1, ensure_ascii=False)] += 1
    return "".join(
        f"<p>{count} cells</p><pre>{html.escape(env)}</pre>" for env, count in counted.items()
    )


def main(
    folder: tyro.conf.Positional[pathlib.Path],
    against: pathlib.Path | None = None,
) -> int:
    """Makes a page of a folder of results.

    Args:
      folder: of the results, such as results/demo.
      against: another one, to compare with: a table and a picture.

    Returns:
      The exit status: 0, or 2 if a folder cannot be read.
    """
    try:
        written = write(folder)
        if against is not None:
            table, figure = comparison.compare(read(folder), read(against))
            store.write_bytes(folder / "comparison.png", _png(figure))
            store.write_text(folder / "comparison.csv", table.to_csv(index=False))
            with pd.option_context("display.width", 200, "display.max_columns", None):
                print(table.round(3).to_string(index=False))
            written += ["comparison.png", "comparison.csv"]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"written to {folder}: {', '.join(written)}")
    return 0
