"""Results as interactive plots: speedups, acceptance, τ, phases, throughput against latency.

A method has one colour and one marker in all figures of a report.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import altair as alt

from experiments.report import labels
from experiments.report.export import Figure
from experiments.report.labels import Row, Rows

PARTS = {
    "draft_s": ("draft", "#EE8866"),
    "score_s": ("target pass", "#77AADD"),
    "verify_s": ("verification", "#FFAABB"),
    "commit_s": ("commit", "#BBCC33"),
    "rest_s": ("other", "#AAAAAA"),
    "host_s": ("host", "#DDDDDD"),
}
SPEEDUP = "speedup over plain decoding"
# What hovering shows: (title, format) of columns.
TOOLTIPS = {
    "method": ("method", ""),
    "family": ("method", ""),
    "folder": ("folder", ""),
    "phase": ("phase", ""),
    "batch": ("batch", ""),
    "context": ("context", ","),
    "rate": ("requests/s", ""),
    "budget": ("budget", ","),
    "depth": ("depth", ""),
    "speedup": (SPEEDUP, ".2f"),
    "low": ("interval from", ".2f"),
    "high": ("to", ".2f"),
    "evidence": ("measured", ""),
    "tau": ("τ", ".2f"),
    "acceptance_rate": ("acceptance rate", ".3f"),
    "decode_tok_s": ("tokens/s", ",.1f"),
    "ar_decode_tok_s": ("plain tokens/s", ",.1f"),
    "tpot_ms_p50": ("ms/token", ".2f"),
    "goodput": ("goodput, requests/s", ".2f"),
    "ttft_s_p95": ("TTFT p95, s", ".3f"),
    "share": ("share", ".1%"),
    "reason": ("not traced", ""),
}
# Long names in two lines.
LINES = "length(datum.label) > 36 ? split(datum.label, ', ') : datum.label"
STEP = 19  # height of a line of text for each method
PANEL_HEIGHT = 130
REASON_WIDTH = 108  # points, as a narrow panel; hovering shows all of a longer text
NARROW = 240  # all panels of a single column

Chart = Any  # of Altair, whose classes have no common base with `facet`
Styles = Mapping[str, tuple[str, str]]


def shown(rows: Rows) -> dict[str, Any]:
    """Returns the rows as data of a chart: panels and the columns of tooltips, rounded."""

    def short(value: Any) -> Any:
        return float(f"{value:.5g}") if isinstance(value, float) else value

    names = ("panel", *TOOLTIPS)
    values = [{n: short(row[n]) for n in names if row.get(n) is not None} for row in rows]
    return {"data": alt.Data(values=values)}


def tooltips(rows: Rows) -> list[alt.Tooltip]:
    """Returns the tooltips for which a row has a value."""
    known = {name for row in rows for name, value in row.items() if value not in (None, "")}
    return [
        alt.Tooltip(
            f"{name}:{'Q' if pattern else 'N'}", title=title, format=pattern or alt.Undefined
        )
        for name, (title, pattern) in TOOLTIPS.items()
        if name in known
    ]


def in_panels(chart: Chart, names: Sequence[str], columns: int, field: str = "panel") -> Chart:
    """Returns a panel for each value of a field, in this order."""
    header = alt.Header(title=None, labelExpr=LINES)
    facet = alt.Facet(f"{field}:N", sort=list(names), header=header)
    # With shared axes, an incomplete line of panels has an axis below nothing.
    resolved = "independent" if len(names) % columns else "shared"
    return chart.facet(facet=facet, columns=columns).resolve_axis(x=resolved)


def _described(rows: Rows, columns: Sequence[str]) -> list[Row]:
    """Returns the rows with the column `panel`, which describes `columns`."""
    return [r | {"panel": labels.describe({c: r.get(c) for c in columns})} for r in rows]


def _values(rows: Rows, column: str) -> list[Any]:
    """Returns the values of a column, in the order of the rows."""
    return list(dict.fromkeys(row[column] for row in rows))


def _styled(names: Sequence[str], styles: Styles, field: str, width: float) -> dict[str, Any]:
    """Returns colour and marker by a field, with one legend below panels of this total width."""
    columns = 2 if width > NARROW else 1
    legend = alt.Legend(orient="bottom", direction="vertical", columns=columns, symbolOpacity=1)
    colours, marks = (
        alt.Scale(domain=list(names), range=list(values))
        for values in zip(*(styles[name] for name in names), strict=True)
    )
    return {
        "color": alt.Color(f"{field}:N", scale=colours, title=None, legend=legend),
        "shape": alt.Shape(f"{field}:N", scale=marks, title=None, legend=legend),
    }


def _rule(axis: str) -> Chart:
    """Returns the dashed line at a speedup of 1."""
    encoding: Any = {axis: alt.datum(1)}
    return alt.Chart().mark_rule(strokeDash=[4, 3], color="black").encode(**encoding)


def _lines(
    rows: Rows,
    styles: Styles,
    x: alt.X,
    y: alt.Y,
    caption: str,
    others: Callable[[Chart], Sequence[Chart]] = lambda base: (),
    field: str = "method",
    order: Any = alt.Undefined,
    size: Any = alt.Undefined,
) -> Figure:
    """Returns a line with markers for each value of a field; clicking the legend shows only it.

    `others` returns more layers, of a chart with the lines' colours. By default a line is in the
    order of x.
    """
    panels, names = _values(rows, "panel"), _values(rows, field)
    chosen = alt.selection_point(name="chosen", fields=[field], bind="legend")
    opacity = alt.condition(chosen, alt.value(1.0), alt.value(0.12))

    def draw(width: float, columns: int) -> Chart:
        marks = _styled(names, styles, field, width * columns)
        base = alt.Chart().encode(color=marks["color"], opacity=opacity)
        points = base.mark_point(filled=True, size=40).encode(
            x=x, y=y, shape=marks["shape"], tooltip=tooltips(rows), size=size
        )
        line = base.mark_line(strokeWidth=1.2).encode(x=x, y=y, order=order)
        layers = alt.layer(*others(base), line, points.add_params(chosen), **shown(rows))
        return in_panels(layers.properties(width=width, height=PANEL_HEIGHT), panels, columns)

    return Figure(draw, len(panels), f"{caption} Click a name in the legend.")


def _log_axis(rows: Rows, column: str, title: str) -> alt.X:
    """Returns a logarithmic axis with a tick at each value."""
    ticks = alt.Axis(values=sorted(set(_values(rows, column)) - {None}), format=",", grid=False)
    scale = alt.Scale(type="log", base=2, nice=False, padding=8)
    return alt.X(f"{column}:Q", scale=scale, axis=ticks, title=title)


def by_axis(rows: Rows, styles: Styles, axis: str) -> Figure | None:
    """Returns speedups with intervals by batch or context; None if no panel has two values."""
    named = _described(rows, [name for name in labels.group_columns(rows) if name != axis])
    found: dict[str, set[int]] = {}
    for row in named:
        found.setdefault(row["panel"], set()).add(row[axis])
    named = [row for row in named if len(found[row["panel"]]) > 1]
    if not named:
        return None
    x = _log_axis(named, axis, axis)
    low = alt.Y("low:Q", title=SPEEDUP)

    def intervals(base: Chart) -> Sequence[Chart]:
        return _rule("y"), base.mark_rule().encode(x=x, y=low, y2="high")

    y = alt.Y("speedup:Q", title=SPEEDUP, scale=alt.Scale(zero=False))
    return _lines(named, styles, x, y, f"{SPEEDUP.capitalize()} by {axis}.", intervals)


def by_rate(rows: Rows, styles: Styles, column: str, scale: Literal["linear", "log"]) -> Figure:
    """Returns a column by arrival rate: a panel for each other setting, a line per method."""
    label = TOOLTIPS[column][0]
    named = _described(rows, [name for name in labels.group_columns(rows) if name != "rate"])
    rates = sorted(_values(rows, "rate"), key=float)
    x = alt.X("rate:O", sort=rates, title="requests/s", axis=alt.Axis(labelAngle=0))
    y = alt.Y(f"{column}:Q", title=label, scale=alt.Scale(type=scale))
    return _lines(named, styles, x, y, f"By arrival rate: {label}.")


def by_budget(rows: Rows, styles: Styles, column: str, label: str) -> Figure:
    """Returns a column by budget: a panel per group, a line per family of methods.

    A method without a budget is a horizontal line.
    """
    families = labels.families(rows)
    named = [
        row | {"family": families[row["method"]]}
        for row in _described(rows, labels.group_columns(rows))
    ]
    x, y = _log_axis(named, "budget", "budget B (slots)"), alt.Y(f"{column}:Q", title=label)
    y = y.scale(zero=False)

    def unlimited(base: Chart) -> Sequence[Chart]:
        return (base.transform_filter("!isValid(datum.budget)").mark_rule().encode(y=y),)

    caption = f"By budget of the draft's cache: {label}."
    return _lines(named, styles, x, y, caption, unlimited, "family")


def acceptance_by_depth(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], styles: Styles
) -> Figure:
    """Returns the share of rounds by depth, a line per method.

    `curves` are (acceptance if the depth before was reached, acceptance by depth).
    """
    panels = "of the rounds that reached the previous depth", "of all rounds"
    rows: list[Row] = [
        {"method": name, "panel": panel, "depth": depth, "share": share}
        for panel, which in zip(panels, (0, 1), strict=True)
        for name, pair in curves.items()
        for depth, share in enumerate(pair[which], 1)
    ]
    deepest = max((row["depth"] for row in rows), default=1)
    x = alt.X("depth:Q", axis=alt.Axis(values=list(range(1, deepest + 1)), format="d"))
    y = alt.Y("share:Q", title="accepted", scale=alt.Scale(domain=[0, 1]))
    caption = "Acceptance by depth of the tree, averaged over the cells of a method."
    return _lines(rows, styles, x.scale(domain=[1, max(2, deepest)]), y, caption)


def throughput(rows: Rows, styles: Styles) -> Figure:
    """Returns tokens/s of a batch against ms/token of one user, a line over the batches."""
    named = _described(rows, [name for name in labels.group_columns(rows) if name != "batch"])
    sizes = alt.Scale(domain=sorted(_values(rows, "batch")), range=[20, 120])
    legend = alt.Legend(orient="bottom", direction="horizontal")
    return _lines(
        named,
        styles,
        alt.X("tpot_ms_p50:Q", title="ms/token of one user, median"),
        alt.Y("decode_tok_s:Q", title="tokens/s of the batch"),
        "Throughput of the batch against latency of one user. Every cell is timed in its own "
        "process.",
        order="batch:Q",
        size=alt.Size("batch:O", scale=sizes, legend=legend),
    )


def _by_method(
    rows: Rows, layers: Callable[[alt.Y], Chart], order: Sequence[str], caption: str
) -> Figure:
    """Returns a line of each panel for each method; `layers` has the rows as data."""
    panels = _values(rows, "panel")
    y = alt.Y("method:N", sort=list(order), title=None, axis=alt.Axis(labelExpr=LINES))

    def draw(width: float, columns: int) -> Chart:
        sized = layers(y).properties(width=width, height=alt.Step(STEP))
        return in_panels(sized, panels, columns)

    return Figure(draw, len(panels), caption)


def speedups(rows: Rows, styles: Styles) -> Figure:
    """Returns speedups with intervals: a panel per group, a line per method, the fastest first."""
    named = _described(rows, labels.group_columns(rows))
    order = _values(sorted(rows, key=lambda row: -row["speedup"]), "method")
    marks = {name: mark.legend(None) for name, mark in _styled(order, styles, "method", 0).items()}
    x = alt.X("speedup:Q", title=SPEEDUP, scale=alt.Scale(zero=False))
    low = alt.X("low:Q", title=SPEEDUP)

    def layers(y: alt.Y) -> Chart:
        base = alt.Chart().encode(y=y, color=marks["color"])
        points = base.mark_point(filled=True, size=45, opacity=1)
        points = points.encode(x=x, shape=marks["shape"], tooltip=tooltips(named))
        interval = base.mark_rule(strokeWidth=1.5).encode(x=low, x2="high")
        return alt.layer(_rule("x"), interval, points, **shown(named))

    caption = f"{SPEEDUP.capitalize()}, with the interval. Dashed: plain decoding."
    return _by_method(named, layers, order, caption)


def time_split(rows: Rows, traced: int) -> Figure:
    """Returns the phases of a round, a bar per cell, as shares of the traced rounds.

    A cell without them has the reason, `phases_error`, in place of the bar. `traced` is the number
    of all traced cells, of which `rows` may be a part.
    """
    parts: list[Row] = []
    for row in _described(rows, labels.group_columns(rows)):
        named = {"method": row["method"], "panel": row["panel"]}
        if row["score_s"]:
            parts += [named | {"phase": n, "share": share} for n, share in _shares(row).items()]
        else:
            parts.append(named | {"reason": row["phases_error"]})
    names, colours = zip(*PARTS.values(), strict=True)
    colour = alt.Color(
        "phase:N",
        scale=alt.Scale(domain=list(names), range=list(colours)),
        legend=alt.Legend(orient="bottom", columns=3),
        title=None,
    )
    x = alt.X("share:Q", axis=alt.Axis(format="%"), title="time of a round")
    x = x.scale(domain=[0, 1], clamp=True)  # sums of rounded shares can exceed 1

    def bars(y: alt.Y) -> Chart:
        base = alt.Chart().encode(y=y, tooltip=tooltips(parts))
        bar = base.transform_filter("isValid(datum.share)").mark_bar().encode(x=x, color=colour)
        reason = base.mark_text(align="left", fontSize=6, limit=REASON_WIDTH)
        reason = reason.encode(x=alt.value(2), text="reason:N")
        reason = reason.transform_filter("isValid(datum.reason)")
        return alt.layer(bar, reason, **shown(parts))

    caption = "Phases of a round, in one traced run of each cell."
    if len(rows) < traced:
        caption += f" {len(rows)} of {traced} cells are shown, those of the longest context."
    return _by_method(parts, bars, _values(rows, "method"), caption)


def _shares(row: Row) -> dict[str, float]:
    """Returns the share of each phase in a round of a cell."""
    seconds = {name: row[column] or 0.0 for column, (name, _) in PARTS.items()}
    return {name: value / sum(seconds.values()) for name, value in seconds.items()}


def side_by_side(rows: Rows, names: Sequence[str]) -> Figure:
    """Returns the speedups of two folders, given as the columns `names`: a line for each cell."""
    points = [
        {"method": row["method"], "panel": row["panel"], "folder": name, "speedup": row[name]}
        for row in _described(rows, labels.group_columns(rows))
        for name in names
    ]
    styles = dict(zip(names, (("#000000", "circle"), ("#888888", "diamond")), strict=True))
    marks = _styled(names, styles, "folder", 0)
    x = alt.X("speedup:Q", title=SPEEDUP, scale=alt.Scale(zero=False))

    def layers(y: alt.Y) -> Chart:
        base = alt.Chart().encode(x=x, y=y)
        dots = base.mark_point(filled=True, size=40, opacity=1)
        dots = dots.encode(tooltip=tooltips(points), **marks)
        line = base.mark_line(color="#BBBBBB").encode(detail="method:N")
        return alt.layer(_rule("x"), line, dots, **shown(points))

    return _by_method(points, layers, _values(rows, "method"), "Speedups of two folders.")
