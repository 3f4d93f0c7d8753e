"""Speedups over batch and context as heat maps, with the cells that did not run."""

import math
from typing import Any

import altair as alt

from experiments.report import labels
from experiments.report.export import Figure
from experiments.report.figures import in_panels
from experiments.report.labels import Row, Rows

MAX_PANELS = 9
# Orange is slower, violet is faster; colour-blind readers can distinguish them.
COLOURS = ("#B35806", "#F7F7F7", "#542788")
ABSENT = "#C8C8C8"
NOT_RUN = "not run"
BORDER: Any = {"stroke": "white", "strokeWidth": 2}


def speedups(rows: Rows, value: str = "speedup", unit: str = "×") -> Figure:
    """Returns a column by batch and context, a panel per method, on a log scale centred at 1.

    A cell without a value is grey and has the reason as text: that of its failure, or that it was
    not run. At most `MAX_PANELS` methods are shown, the fastest.
    """
    methods = _fastest(rows, value)
    shown = [_cell(cell, value, unit) for cell in _filled(rows, methods)]
    logs = [abs(cell["log"]) for cell in shown if cell["log"] is not None]
    span = max(0.3, *logs) if logs else 1.0
    num_batches = len({cell["batch"] for cell in shown})
    colour: Any = alt.Color(
        "log:Q",
        scale=alt.Scale(domain=[-span, 0, span], range=COLOURS),
        title=None,
        legend=alt.Legend(
            labelExpr=f"format(pow(2, datum.value), '.2~f') + '{unit}'",
            values=[t for t in range(-3, 4) if abs(t) <= span] if span >= 1 else [-span, 0, span],
            orient="bottom",
            gradientThickness=7,
        ),
    )
    dark = f"isValid(datum.log) && abs(datum.log) > {0.75 * span}"

    def draw(width: float, columns: int) -> Any:
        base = alt.Chart().encode(
            x=alt.X("context:O", axis=alt.Axis(format=",", labelAngle=0)),
            y=alt.Y("batch:O"),
        )
        tips = ["method:N", "batch:O", "context:O", "text:N"]
        absent = base.mark_rect(fill=ABSENT, **BORDER).encode(tooltip=tips)
        cells = base.mark_rect(**BORDER).encode(color=colour, tooltip=tips)
        texts = base.mark_text(fontSize=7, lineBreak="\n").encode(
            text="text:N",
            color=alt.when(dark).then(alt.value("white")).otherwise(alt.value("black")),
        )
        layers = alt.layer(absent, cells, texts, data=alt.Data(values=shown))
        sized = layers.properties(width=width, height=24 * num_batches)
        return in_panels(sized, methods, columns, "method")

    return Figure(
        draw,
        len(methods),
        f"{value} by batch and context, a panel per method: violet above 1, orange below, grey "
        "without a result.",
    )


def _fastest(rows: Rows, value: str) -> list[str]:
    """Returns the methods to show, in the order of the rows."""
    best: dict[str, float] = {}
    for row in rows:
        best[row["method"]] = max(best.get(row["method"], 0.0), row[value] or 0.0)
    shown = sorted(best, key=lambda name: -best[name])[:MAX_PANELS]
    return [name for name in best if name in shown]


def _filled(rows: Rows, methods: list[str]) -> list[Row]:
    """Returns a row for each method, batch and context; one without `status` was not run."""
    found = {(row["method"], row["batch"], row["context"]): row for row in rows}
    batches, contexts = sorted({r["batch"] for r in rows}), sorted({r["context"] for r in rows})
    return [
        found.get((name, batch, context), {"method": name, "batch": batch, "context": context})
        for name in methods
        for batch in batches
        for context in contexts
    ]


def _cell(row: Row, value: str, unit: str) -> Row:
    """Returns the data of one cell: the logarithm of its value, and its text."""
    number = row.get(value)
    if number:
        text = f"{number:.2f}{unit}"
    else:
        text = labels.failure(row).replace(" of ", " of\n") if "status" in row else NOT_RUN
    log = math.log2(number) if number else None
    return {name: row[name] for name in ("method", "batch", "context")} | {"log": log, "text": text}
