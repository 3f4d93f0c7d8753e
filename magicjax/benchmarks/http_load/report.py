"""A table for the terminal, CSV files, and a page of HTML with plots."""

import csv
import dataclasses
import html
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from magicjax.benchmarks.http_load.load import Run
from magicjax.benchmarks.tables import markdown_table

FILES = ("levels.csv", "requests.csv", "report.html")
COLORS = ("#2a9d6f", "#c2572b", "#4a6fd0", "#a03c9c", "#8a7a1f", "#5f6b73")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 260, 52, 16, 14, 44  # of a plot
TICKS = 4
STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 0 0 .3rem; }
div { overflow-x: auto; } section { display: flex; flex-wrap: wrap; gap: 1.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { border-bottom: 1px solid #8884; padding: .3rem .6rem; text-align: right; }
th { color: gray; font-weight: 500; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
td { white-space: nowrap; }
svg { width: 27.5rem; max-width: 100%; } svg text { fill: currentColor; font-size: 12px; }
p, dl { font-size: .85rem; } dt { color: gray; float: left; margin-right: .5rem; }
"""


def header_and_cells(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[str], list[list[str | None]]]:
    """Returns the columns that the terminal and the page show; those without values are omitted."""
    base = list(dict.fromkeys(row["server"] for row in rows))[-1] if rows else ""
    columns: dict[str, list[str | None]] = {
        "level": [row["level"] for row in rows],
        "server": [row["server"] for row in rows],
        "tokens/s": [_number(row["tokens_per_s"]) for row in rows],
        f"vs {base}": [_number(row["speedup"], "×") for row in rows],
        "TTFT ms p50 / p95": [_pair(row, "ttft_ms") for row in rows],
        "TPOT ms p50 / p95": [_pair(row, "tpot_ms") for row in rows],
        "end to end s p50 / p95": [_pair(row, "e2e_s") for row in rows],
        "requests/s": [_number(row["requests_per_s"]) for row in rows],
        "goodput/s": [_number(row["goodput_per_s"]) for row in rows],
        "τ": [_number(row["tau"]) for row in rows],
        "prompt tokens": [_number(row["prompt_tokens"]) for row in rows],
        "cached prompt": [_percent(row["cached"]) for row in rows],
        "requests": [str(row["requests"]) for row in rows],
        "errors": [row["errors"] or None for row in rows],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    return [*filled], [list(cells) for cells in zip(*filled.values(), strict=True)]


CATEGORY_HEADER = (
    *("category", "server", "requests", "prompt tokens", "TPOT ms p50"),
    *("tokens/s of a user", "τ"),
)


def category_cells(categories: Sequence[Mapping[str, Any]]) -> list[list[str | None]]:
    """Returns the cells of `CATEGORY_HEADER`, of the rows of `by_category`."""
    numbers = ("requests", "prompt_tokens", "tpot_ms_p50", "user_tokens_per_s", "tau")
    return [
        [row["category"] or "none", row["server"], *(_number(row[name]) for name in numbers)]
        for row in categories
    ]


def terminal_table(
    rows: Sequence[Mapping[str, Any]], categories: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Returns the table of levels and servers, and one of categories if there are any."""
    table = markdown_table(*header_and_cells(rows))
    if not categories:
        return table
    return f"{table}\n\n{markdown_table(CATEGORY_HEADER, category_cells(categories))}"


def write(
    folder: pathlib.Path,
    runs: Sequence[Run],
    rows: Sequence[Mapping[str, Any]],
    categories: Sequence[Mapping[str, Any]],
    settings: Mapping[str, str],
) -> None:
    """Writes `FILES` into a folder.

    Args:
      folder: which exists.
      runs: for requests.csv.
      rows: of `summarize`.
      categories: of `by_category`.
      settings: what the page says about the load, by name.
    """
    requests = [
        {"level": run.level.label, "server": run.server.label} | dataclasses.asdict(sample)
        for run in runs
        for sample in run.samples
    ]
    for name, records in zip(FILES, (rows, requests)):
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, records[0] if records else [])
            writer.writeheader()
            writer.writerows(records)
    (folder / FILES[2]).write_text(page(rows, categories, settings), "utf-8")


def page(
    rows: Sequence[Mapping[str, Any]],
    categories: Sequence[Mapping[str, Any]],
    settings: Mapping[str, str],
) -> str:
    """Returns the page, which needs no other file; arguments are those of `write`."""
    tables = _html_table(*header_and_cells(rows))
    if categories:
        tables += "<h2>By category</h2>\n"
        tables += _html_table(CATEGORY_HEADER, category_cells(categories))
    terms = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        for name, value in settings.items()
    )
    plots = _plot("Tokens per second", "tokens_per_s", rows)
    plots += _plot("Time per output token, ms, median", "tpot_ms_p50", rows)
    interactivity = "Tokens per second against tokens per second of a user"
    plots += _plot(interactivity, "tokens_per_s", rows, "user_tokens_per_s")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>magicjax bench-serve</title><style>{STYLE}</style></head>\n<body>"
        f"<h1>magicjax bench-serve</h1>\n<section>{plots}</section>\n"
        f"{tables}"
        "<p>TTFT: time to first token. TPOT: time per output token after the first text. Goodput: "
        "requests that met the limits. τ: tokens per pass of the target. Cached: prompt tokens "
        f"that the server had in its cache.</p>\n<dl>{terms}</dl></body></html>\n"
    )


def _html_table(header: Sequence[str], cells: Sequence[Sequence[str | None]]) -> str:
    body = "".join(_html_row("td", [cell or "–" for cell in line]) for line in cells)
    head = _html_row("th", header)
    return f"<div><table><thead>{head}</thead><tbody>{body}</tbody></table></div>\n"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>\n"


def _plot(title: str, column: str, rows: Sequence[Mapping[str, Any]], against: str = "") -> str:
    """Returns a line per server over the levels, with a legend; "" without values.

    Args:
      title: of the plot.
      column: of the vertical axis.
      rows: of `summarize`.
      against: the column of the horizontal axis, whose points are labelled by level; "": levels.
    """
    rows = [row for row in rows if row[column] is not None and row.get(against, 0) is not None]
    if not rows:
        return ""
    levels = list(dict.fromkeys(row["level"] for row in rows))
    servers = list(dict.fromkeys(row["server"] for row in rows))
    step = _tick(max(row[column] for row in rows))
    x_step = _tick(max(row[against] for row in rows)) if against else 0.0

    def x(row: Mapping[str, Any]) -> float:
        if against:
            share = row[against] / (TICKS * x_step)
        else:
            share = (levels.index(row["level"]) + 0.5) / len(levels)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / (TICKS * step) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in (step * n for n in range(TICKS + 1)):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#8884"/>{_text(LEFT - 6, y(value) + 4, f"{value:g}", "end")}'
        )
    if against:
        ticks = [(x({against: x_step * n}), f"{x_step * n:g}") for n in range(TICKS + 1)]
    else:
        ticks = [(x({"level": level}), level) for level in levels]
    parts += [_text(at, HEIGHT - BOTTOM + 16, label, "middle") for at, label in ticks]
    for n, server in enumerate(servers):
        color = COLORS[n % len(COLORS)]
        points = [(x(row), y(row[column]), row) for row in rows if row["server"] == server]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for a, b, row in points:
            name = f"{server}, {row['level']}: {row[column]:.4g}"
            parts.append(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{color}">'
                f"<title>{html.escape(name)}</title></circle>"
            )
            if against:
                parts.append(_text(a + 6, b - 6, row["level"], "start"))
        left = LEFT + n * (WIDTH - LEFT) / len(servers)
        parts.append(
            f'<circle cx="{left + 5:.1f}" cy="{HEIGHT - 10}" r="4" fill="{color}"/>'
            f"{_text(left + 14, HEIGHT - 6, server, 'start')}"
        )
    return (
        f'<figure style="margin:0"><h2>{title}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}">{"".join(parts)}</svg></figure>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _tick(most: float) -> float:
    """Returns the distance of ticks of which `TICKS` reach a number."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most / TICKS))
    return next(
        n * power
        for n in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
        if n * power * TICKS >= most * (1 - 1e-9)
    )


def _number(value: float | None, unit: str = "") -> str | None:
    """Returns three significant digits, all of those before the point."""
    if value is None:
        return None
    return (f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}") + unit


def _pair(row: Mapping[str, Any], name: str) -> str | None:
    pair = [_number(row[f"{name}_p{p}"]) for p in (50, 95)]
    return None if None in pair else " / ".join(map(str, pair))


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"
