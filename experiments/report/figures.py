"""Results as interactive plots: speedups, acceptance, τ, phases, throughput against latency.

A figure draws itself for a number of columns of panels and a width of each; `export` writes it in
the widths of a paper's columns. A method has one colour and one marker in all figures of a report.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
TOOLTIPS = {
    "method": alt.Tooltip("method:N"),
    "batch": alt.Tooltip("batch:Q"),
    "context": alt.Tooltip("context:Q", format=","),
    "speedup": alt.Tooltip("speedup:Q", format=".2f"),
    "low": alt.Tooltip("low:Q", format=".2f", title="interval from"),
    "high": alt.Tooltip("high:Q", format=".2f", title="to"),
    "evidence": alt.Tooltip("evidence:N", title="measured"),
    "tau": alt.Tooltip("tau:Q", format=".2f", title="τ"),
    "acceptance_rate": alt.Tooltip("acceptance_rate:Q", format=".3f", title="acceptance rate"),
    "decode_tok_s": alt.Tooltip("decode_tok_s:Q", format=",.1f", title="tokens/s"),
    "ar_decode_tok_s": alt.Tooltip("ar_decode_tok_s:Q", format=",.1f", title="plain tokens/s"),
    "tpot_ms_p50": alt.Tooltip("tpot_ms_p50:Q", format=".2f", title="ms/token"),
}
# Long names in two lines.
LINES = "length(datum.label) > 36 ? split(datum.label, ', ') : datum.label"
STEP = 19  # height of a line of text for each method
PANEL_HEIGHT = 130
NARROW = 240  # all panels of a single column

Chart = Any  # of Altair, whose classes have no common base with `facet`
Styles = Mapping[str, tuple[str, str]]


def data(rows: Rows, *columns: str) -> alt.Data:
    """Returns the rows as data of a chart, restricted to the columns of tooltips and `columns`."""
    names = (*TOOLTIPS, *columns)
    return alt.Data(values=[{name: row.get(name) for name in names} for row in rows])


def tooltips(rows: Rows) -> list[alt.Tooltip]:
    """Returns the tooltips for which a row has a value."""
    known = {name for row in rows for name, value in row.items() if value not in (None, "")}
    return [tooltip for name, tooltip in TOOLTIPS.items() if name in known]


def encoded(
    names: Sequence[str], styles: Styles, width: float, field: str = "method"
) -> dict[str, Any]:
    """Returns the colour and the marker by method, or family, with one legend below the panels.

    `width` is that of all panels.
    """
    colours, marks = zip(*(styles[name] for name in names), strict=True)
    legend = alt.Legend(
        orient="bottom", direction="vertical", columns=2 if width > NARROW else 1, symbolOpacity=1
    )
    domain = list(names)
    return {
        "color": alt.Color(
            f"{field}:N", scale=alt.Scale(domain=domain, range=colours), title=None, legend=legend
        ),
        "shape": alt.Shape(
            f"{field}:N", scale=alt.Scale(domain=domain, range=marks), title=None, legend=legend
        ),
    }


def in_panels(chart: Chart, names: Sequence[str], columns: int, field: str = "panel") -> Chart:
    """Returns a panel for each value of a field, in this order; no title if there is one."""
    header = alt.Header(title=None, labelExpr=LINES, labels=len(names) > 1)
    facet = alt.Facet(f"{field}:N", sort=list(names), header=header)
    # With shared axes, an incomplete line of panels has an axis below nothing.
    resolved = "independent" if len(names) % columns else "shared"
    return chart.facet(facet=facet, columns=columns).resolve_axis(x=resolved)


def highlighted(field: str = "method") -> tuple[alt.Parameter, Any]:
    """Returns (a selection by clicking the legend, the opacity that shows it)."""
    chosen = alt.selection_point(name="chosen", fields=[field], bind="legend")
    return chosen, alt.condition(chosen, alt.value(1.0), alt.value(0.12))


def plain_rule(axis: str) -> Chart:
    """Returns the line at a speedup of 1."""
    encoding: Any = {axis: alt.datum(1)}
    return alt.Chart().mark_rule(strokeDash=[4, 3], color="black").encode(**encoding)


def _panels(rows: Rows, columns: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Returns the rows with the column `panel`, which describes `columns`, and its values."""
    named = [r | {"panel": labels.describe({c: r.get(c) for c in columns})} for r in rows]
    return named, list(dict.fromkeys(row["panel"] for row in named))


def speedups(rows: Rows, styles: Styles) -> Figure:
    """Returns speedups with intervals: a panel per group, a line per method, the fastest first."""
    shown, panels = _panels(rows, labels.group_columns(rows))
    best: dict[str, float] = {}
    for row in rows:
        best[row["method"]] = max(row["speedup"], best.get(row["method"], 0.0))
    order = sorted(best, key=lambda name: -best[name])
    marks = {name: mark.legend(None) for name, mark in encoded(order, styles, 0).items()}
    y = alt.Y("method:N", sort=order, title=None, axis=alt.Axis(labelExpr=LINES, labelLimit=0))
    x = alt.X("speedup:Q", title=SPEEDUP, scale=alt.Scale(zero=False))
    base = alt.Chart().encode(y=y, color=marks["color"])

    def draw(width: float, columns: int) -> Chart:
        interval = base.mark_rule(strokeWidth=1.5).encode(
            x=alt.X("low:Q", title=SPEEDUP), x2="high"
        )
        points = base.mark_point(filled=True, size=45).encode(
            x=x, shape=marks["shape"], tooltip=tooltips(shown), opacity=alt.value(1)
        )
        layers = alt.layer(plain_rule("x"), interval, points, data=data(shown, "panel"))
        return in_panels(layers.properties(width=width, height=alt.Step(STEP)), panels, columns)

    return Figure(
        draw, len(panels), f"{SPEEDUP.capitalize()}, with the interval. Dashed: plain decoding."
    )


def by_axis(rows: Rows, styles: Styles, axis: str) -> Figure:
    """Returns speedups with intervals by batch or context: a line per method.

    No panels: in every panel the axis would have one value.
    """
    rest = [name for name in labels.group_columns(rows) if name != axis]
    shown, panels = _panels(rows, rest)
    panels = [p for p in panels if len({r[axis] for r in shown if r["panel"] == p}) > 1]
    shown = [row for row in shown if row["panel"] in panels]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    values = sorted({row[axis] for row in rows})
    x = alt.X(
        f"{axis}:Q",
        scale=alt.Scale(type="log", base=2, nice=False, padding=8),
        axis=alt.Axis(values=values, format=",", grid=False),
        title=axis,
    )
    chosen, opacity = highlighted()

    def draw(width: float, columns: int) -> Chart:
        marks = encoded(methods, styles, width * columns)
        base = alt.Chart().encode(x=x, color=marks["color"], opacity=opacity)
        y = alt.Y("speedup:Q", title=SPEEDUP, scale=alt.Scale(zero=False))
        layers = alt.layer(
            plain_rule("y"),
            base.mark_rule().encode(y=alt.Y("low:Q", title=SPEEDUP), y2="high"),
            base.mark_line(strokeWidth=1.2).encode(y=y),
            base.mark_point(filled=True, size=40)
            .encode(y=y, shape=marks["shape"], tooltip=tooltips(shown))
            .add_params(chosen),
            data=data(shown, "panel"),
        )
        return in_panels(layers.properties(width=width, height=PANEL_HEIGHT), panels, columns)

    return Figure(
        draw, len(panels), f"{SPEEDUP.capitalize()} by {axis}. Click a method in the legend."
    )


def by_budget(rows: Rows, styles: Styles, column: str, label: str) -> Figure:
    """Returns a column by budget: a panel per group, a line per family of methods.

    A method without a budget is a horizontal line.
    """
    families = labels.families(rows)
    shown, panels = _panels(rows, labels.group_columns(rows))
    shown = [row | {"family": families[row["method"]]} for row in shown]
    names = list(dict.fromkeys(row["family"] for row in shown))
    budgets = sorted({row["budget"] for row in rows} - {None})
    x = alt.X(
        "budget:Q",
        scale=alt.Scale(type="log", base=2, nice=False, padding=8),
        axis=alt.Axis(values=budgets, grid=False),
        title="budget B (slots)",
    )
    y = alt.Y(f"{column}:Q", title=label, scale=alt.Scale(zero=False))
    chosen, opacity = highlighted("family")

    def draw(width: float, columns: int) -> Chart:
        marks = encoded(names, styles, width * columns, "family")
        base = alt.Chart().encode(color=marks["color"], y=y, opacity=opacity)
        limited = base.transform_filter("isValid(datum.budget)").encode(x=x)
        tips = [alt.Tooltip("budget:Q"), *tooltips(shown)]
        layers = alt.layer(
            base.transform_filter("!isValid(datum.budget)").mark_rule(),
            limited.mark_line(strokeWidth=1.2),
            limited.mark_point(filled=True, size=40)
            .encode(shape=marks["shape"], tooltip=tips)
            .add_params(chosen),
            data=data(shown, "panel", "family", "budget"),
        )
        return in_panels(layers.properties(width=width, height=PANEL_HEIGHT), panels, columns)

    caption = f"By budget of the draft's cache: {label}. Click a method in the legend."
    return Figure(draw, len(panels), caption)


def acceptance_by_depth(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], styles: Styles
) -> Figure:
    """Returns the share of rounds by depth, a line per method.

    `curves` are (acceptance if the depth before was reached, acceptance by depth).
    """
    panels = ["of the rounds that reached the previous depth", "of all rounds"]
    shown = [
        {"method": name, "panel": panel, "depth": depth, "share": share}
        for name, pair in curves.items()
        for panel, curve in zip(panels, pair, strict=True)
        for depth, share in enumerate(curve, 1)
    ]
    deepest = max((row["depth"] for row in shown), default=1)
    chosen, opacity = highlighted()
    tips = ["method:N", "depth:Q", alt.Tooltip("share:Q", format=".3f")]

    def draw(width: float, columns: int) -> Chart:
        marks = encoded(list(curves), styles, width * columns)
        axis = alt.Axis(values=list(range(1, deepest + 1)), format="d", grid=False)
        base = alt.Chart().encode(
            x=alt.X("depth:Q", axis=axis, scale=alt.Scale(domain=[1, max(2, deepest)])),
            y=alt.Y("share:Q", title="accepted", scale=alt.Scale(domain=[0, 1])),
            color=marks["color"],
            opacity=opacity,
        )
        points = base.mark_point(filled=True, size=40).encode(shape=marks["shape"], tooltip=tips)
        layers = alt.layer(
            base.mark_line(strokeWidth=1.2), points.add_params(chosen), data=alt.Data(values=shown)
        )
        return in_panels(layers.properties(width=width, height=PANEL_HEIGHT), panels, columns)

    return Figure(draw, 2, "Acceptance by depth of the tree, averaged over the cells of a method.")


def time_split(rows: Rows) -> Figure:
    """Returns the phases of a round, a bar per cell, as shares of the traced rounds."""
    shown, panels = _panels(rows, labels.group_columns(rows))
    order = list(dict.fromkeys(row["method"] for row in rows))
    parts = [
        {"method": row["method"], "panel": row["panel"], "phase": name, "share": share, "i": i}
        for row in shown
        for i, (name, share) in enumerate(_shares(row).items())
    ]
    names, colours = zip(*PARTS.values(), strict=True)
    tips = ["method:N", "phase:N", alt.Tooltip("share:Q", format=".1%")]

    def draw(width: float, columns: int) -> Chart:
        chart = (
            alt.Chart(alt.Data(values=parts))
            .mark_bar()
            .encode(
                x=alt.X("share:Q", axis=alt.Axis(format="%"), title="time of a round"),
                y=alt.Y("method:N", sort=order, title=None, axis=alt.Axis(labelExpr=LINES)),
                color=alt.Color(
                    "phase:N",
                    scale=alt.Scale(domain=list(names), range=list(colours)),
                    legend=alt.Legend(orient="bottom", columns=3),
                    title=None,
                ),
                order="i:Q",
                tooltip=tips,
            )
        )
        return in_panels(chart.properties(width=width, height=alt.Step(STEP)), panels, columns)

    return Figure(draw, len(panels), "Phases of a round, in one traced run of each cell.")


def _shares(row: Row) -> dict[str, float]:
    """Returns the share of each phase in a round of a cell."""
    seconds = {name: row[column] or 0.0 for column, (name, _) in PARTS.items()}
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def throughput(rows: Rows, styles: Styles) -> Figure:
    """Returns tokens/s of a batch against ms/token of one user, a line over the batches."""
    rest = [name for name in labels.group_columns(rows) if name != "batch"]
    shown, panels = _panels(rows, rest)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    size = alt.Size(
        "batch:O",
        scale=alt.Scale(domain=batches, range=[20, 120]),
        legend=alt.Legend(orient="bottom", direction="horizontal"),
    )
    chosen, opacity = highlighted()

    def draw(width: float, columns: int) -> Chart:
        marks = encoded(methods, styles, width * columns)
        base = alt.Chart().encode(
            x=alt.X("tpot_ms_p50:Q", title="ms/token of one user, median"),
            y=alt.Y("decode_tok_s:Q", title="tokens/s of the batch"),
            color=marks["color"],
            opacity=opacity,
        )
        points = base.mark_point(filled=True).encode(
            shape=marks["shape"], size=size, tooltip=tooltips(shown)
        )
        layers = alt.layer(
            base.mark_line(strokeWidth=1).encode(order="batch:Q"),
            points.add_params(chosen),
            data=data(shown, "panel"),
        )
        return in_panels(layers.properties(width=width, height=PANEL_HEIGHT), panels, columns)

    return Figure(
        draw,
        len(panels),
        "Throughput of the batch against latency of one user. Every cell, including plain "
        "decoding, is timed in its own process.",
    )


def side_by_side(rows: Rows, names: Sequence[str]) -> Figure:
    """Returns the speedups of two folders, given as the columns `names`: a line for each cell."""
    shown, panels = _panels(rows, labels.group_columns(rows))
    order = list(dict.fromkeys(row["method"] for row in rows))
    points = [
        {"method": row["method"], "panel": row["panel"], "folder": name, "speedup": row[name]}
        for row in shown
        for name in names
    ]
    tips = ["method:N", "folder:N", alt.Tooltip("speedup:Q", format=".2f")]
    colours = alt.Scale(domain=list(names), range=["#000000", "#888888"])
    marks = alt.Scale(domain=list(names), range=["circle", "diamond"])

    def draw(width: float, columns: int) -> Chart:
        legend = alt.Legend(orient="bottom")
        base = alt.Chart().encode(
            x=alt.X("speedup:Q", title=SPEEDUP, scale=alt.Scale(zero=False)),
            y=alt.Y("method:N", sort=order, title=None, axis=alt.Axis(labelExpr=LINES)),
        )
        dots = base.mark_point(filled=True, size=40).encode(
            color=alt.Color("folder:N", scale=colours, title=None, legend=legend),
            shape=alt.Shape("folder:N", scale=marks, title=None, legend=legend),
            tooltip=tips,
        )
        line = base.mark_line(color="#BBBBBB").encode(detail="method:N")
        layers = alt.layer(plain_rule("x"), line, dots, data=alt.Data(values=points))
        return in_panels(layers.properties(width=width, height=alt.Step(STEP)), panels, columns)

    return Figure(draw, len(panels), "Speedups of two folders.")
