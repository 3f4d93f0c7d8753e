"""The charts of a report: speedups, acceptance against the cost of a round, phases of a round.

A method has one colour and marker in all charts; clicking the legend shows only one method.
"""

from collections.abc import Sequence
from typing import Any

import altair as alt

from experiments.report import labels
from experiments.report.labels import Row, Rows
from experiments.schema.columns import interval_columns

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
PARTS = {
    "draft_s": ("draft", "#EE8866"),
    "score_s": ("target pass", "#77AADD"),
    "verify_s": ("verification", "#FFAABB"),
    "commit_s": ("commit", "#BBCC33"),
    "rest_s": ("other", "#AAAAAA"),
    "host_s": ("host", "#DDDDDD"),
}
AXES = ("context", "batch", "slots", "rate")
SPEEDUP = "speedup over plain decoding"
INTERVAL = interval_columns("speedup")
WIDTH, HEIGHT = 230, 180  # of a panel, in pixels
LONG_NAME = 40  # characters of a method's name, with which two panels do not fit side by side
LEGEND = alt.Legend(orient="bottom", direction="vertical", columns=2, labelLimit=0)
CHOSEN = alt.selection_point(name="chosen", fields=["method"], bind="legend")

Chart = Any  # of Altair, whose classes have no common base with `facet`


def charts(rows: Rows) -> dict[str, Chart]:
    """Returns the charts that rows with intervals suffice for, by name."""
    rows = [row for group in labels.grouped(rows) for row in group if row["status"] == "ok"]
    timed = [row for row in rows if row["draft"] != "none" and row["speedup"]]
    by_name = {}
    if timed:
        by_name["speedup"] = speedups(timed)
    if looped := [row for row in timed if not row["slots"]]:
        by_name["rounds"] = rounds(looped)
    if traced := [row for row in rows if row["score_s"]]:
        by_name["phases"] = phases(traced)
    return by_name


def speedups(rows: Rows) -> Chart:
    """Returns speedups with intervals by context, batch or rate, a panel for each other setting."""
    columns = labels.group_columns(rows)
    axis = max(AXES, key=lambda name: (name in columns) * len({row[name] for row in rows}))
    panels = _described(rows, [name for name in columns if name != axis])
    shown = [
        {name: row[name] for name in (axis, "method", "speedup", *INTERVAL, "evidence")}
        | {"panel": panel}
        for row, panel in zip(rows, panels, strict=True)
    ]
    order = sorted({row[axis] for row in rows} - {None}, key=float)
    x = alt.X(f"{axis}:O", sort=order, axis=alt.Axis(labelAngle=0))
    y = alt.Y("speedup:Q", title=SPEEDUP, scale=alt.Scale(zero=False))
    offset = alt.XOffset("method:N", sort=_methods(rows))
    base = alt.Chart().encode(x=x, xOffset=offset, **_marks(rows))
    line = base.mark_line(strokeWidth=1).encode(y=y)
    low, high = INTERVAL
    interval = base.mark_rule().encode(y=alt.Y(f"{low}:Q", title=SPEEDUP), y2=high)
    tooltip = _tooltip(axis, "method", "speedup", *INTERVAL, "evidence")
    points = base.mark_point(filled=True, size=40).encode(y=y, shape=_shape(rows), tooltip=tooltip)
    plain = alt.Chart().mark_rule(strokeDash=[4, 3]).encode(y=alt.datum(1))
    layers = alt.layer(plain, line, interval, points.add_params(CHOSEN))
    title = f"{SPEEDUP.capitalize()} by {axis}, with the interval"
    return _in_panels(
        layers.properties(width=WIDTH, height=HEIGHT), shown, title, 3, "x", "xOffset"
    )


def rounds(rows: Rows) -> Chart:
    """Returns τ against the time of a round, in steps of plain decoding."""
    groups = _described(rows, labels.group_columns(rows))
    shown = [
        {"method": row["method"], "cell": group, "tau": row["tau"], "speedup": row["speedup"]}
        | {"round": row["tau"] / row["speedup"]}
        for row, group in zip(rows, groups, strict=True)
    ]
    x = alt.X("round:Q", title="time of a round / time of a step of plain decoding")
    y = alt.Y("tau:Q", title="τ, tokens per target pass")
    tooltip = _tooltip("method", "cell", "tau", "round", "speedup")
    points = alt.Chart().mark_point(filled=True, size=60).encode(x=x, y=y, tooltip=tooltip)
    points = points.encode(shape=_shape(rows), **_marks(rows)).add_params(CHOSEN)
    end = min(max(row[name] for row in shown) for name in ("round", "tau"))
    diagonal = alt.Data(values=[{"round": value, "tau": value} for value in (0, end)])
    plain = alt.Chart(diagonal).mark_line(color="black", strokeDash=[4, 3], strokeWidth=1)
    title = "τ against the time of a round: above the dashed line, speculation is faster"
    layers = alt.layer(plain.encode(x=x, y=y), points, data=alt.Data(values=shown))
    return layers.properties(width=2 * WIDTH, height=1.5 * HEIGHT, title=title)


def phases(rows: Rows) -> Chart:
    """Returns the shares of the phases in the traced rounds, a bar for each cell."""
    names, colours = zip(*PARTS.values(), strict=True)
    shown = [
        {"method": row["method"], "panel": panel, "phase": name, "ms": 1e3 * (row[column] or 0)}
        for row, panel in zip(rows, _described(rows, labels.group_columns(rows)), strict=True)
        for column, (name, _) in PARTS.items()
    ]
    scale = alt.Scale(domain=names, range=colours)
    legend = alt.Legend(orient="bottom")
    methods = _methods(rows)
    columns = 2 if max(map(len, methods)) <= LONG_NAME else 1
    bars = (
        alt.Chart()
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", stack="normalize", axis=alt.Axis(format="%"), title="time of a round"),
            y=alt.Y("method:N", sort=methods, title=None, axis=alt.Axis(labelLimit=0)),
            color=alt.Color("phase:N", scale=scale, title=None, legend=legend),
            order=alt.Order("rank:Q"),
            tooltip=_tooltip("method", "phase", "ms"),
        )
        .transform_calculate(rank=f"indexof({list(names)}, datum.phase)")
    )
    bars = bars.properties(width=WIDTH, height=alt.Step(18))
    return _in_panels(
        bars, shown, "Phases of a round, in one traced run of each cell", columns, "y"
    )


def _described(rows: Rows, columns: Sequence[str]) -> list[str]:
    """Returns these settings of each row as text."""
    return [labels.describe({name: row.get(name) for name in columns}) for row in rows]


def _methods(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _marks(rows: Rows) -> dict[str, Any]:
    """Returns the colour of each method, which fades where another one is chosen."""
    scale = alt.Scale(domain=_methods(rows), range=COLOURS)
    colour = alt.Color("method:N", scale=scale, title=None, legend=LEGEND)
    return {"color": colour, "opacity": alt.condition(CHOSEN, alt.value(1), alt.value(0.1))}


def _shape(rows: Rows) -> alt.Shape:
    return alt.Shape("method:N", scale=alt.Scale(domain=_methods(rows)), title=None, legend=LEGEND)


def _tooltip(*names: str) -> list[alt.Tooltip]:
    numbers = ("speedup", *INTERVAL, "tau", "round", "ms")
    return [
        alt.Tooltip(f"{name}:Q", format=".2f") if name in numbers else alt.Tooltip(f"{name}:N")
        for name in names
    ]


def _in_panels(
    chart: Chart, shown: Sequence[Row], title: str, columns: int, *independent: str
) -> Chart:
    """Returns a panel for each value of `panel`, with some scales of its own."""
    order = list(dict.fromkeys(row["panel"] for row in shown))
    facet = alt.Facet("panel:N", sort=order, title=None, header=alt.Header(labelLimit=0))
    facets = chart.facet(facet=facet, columns=columns, data=alt.Data(values=list(shown)))
    return facets.resolve_scale(**dict.fromkeys(independent, "independent")).properties(title=title)
