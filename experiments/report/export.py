"""Charts as files in the widths of a paper's columns, and as HTML.

A chart is drawn twice: first with guessed panels, then with panels that fill the width. The file
has that width exactly.
"""

import dataclasses
import functools
import html
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import vl_convert

from magicjax.files import write_atomically

WIDTHS = {"single": 3.3 * 72, "double": 6.9 * 72}  # in points
MIN_PANEL = 70.0  # points
CONFIG: dict[str, Any] = {
    "font": "Arial, Liberation Sans, Helvetica, sans-serif",
    "axis": {
        "labelLineHeight": 8,
        "labelFontSize": 7,
        "titleFontSize": 8,
        "titleFontWeight": "normal",
        "labelLimit": 0,
    }
    | {"labelOverlap": True, "gridOpacity": 0.5, "tickCount": 5},
    "header": {"labelFontSize": 8, "labelPadding": 3, "labelLimit": 0},
    "legend": {"labelFontSize": 7, "labelLimit": 0, "symbolSize": 40, "rowPadding": 1}
    | {"titleFontSize": 7, "titleFontWeight": "normal"}
    | {"layout": {"bottom": {"direction": "vertical", "anchor": "start", "margin": 4}}},
    "facet": {"spacing": 10},
    "view": {"stroke": "#DDDDDD"},
}
_SIZE = re.compile(r'<svg ([^>]*?)width="([\d.]+)" height="([\d.]+)"')


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of the report; a notebook shows it.

    Attributes:
      draw: returns an Altair chart, of (width of a panel in points, panels in a line).
      panels: the number of panels.
      caption: what it shows.
    """

    draw: Callable[[float, int], Any] = dataclasses.field(repr=False)
    panels: int
    caption: str

    def _repr_svg_(self) -> str:
        return _resized(_svg(spec(self, "double")), WIDTHS["double"], "pt")


def spec(figure: Figure, kind: str) -> dict[str, Any]:
    """Returns the figure in Vega-Lite, in a width of `WIDTHS` unless its labels need more."""
    columns = _columns(figure.panels, kind)
    guess = 0.6 * WIDTHS[kind] / columns
    natural = _size(_svg(_drawn(figure, guess, columns)))[0]
    panel = guess + (WIDTHS[kind] - natural) / columns
    return _drawn(figure, max(MIN_PANEL, panel), columns)


def _columns(panels: int, kind: str) -> int:
    """Returns the panels in a line: 1 or 2 in a single column of a paper, up to 3 in both."""
    if kind == "single":
        return 2 if panels > 4 else 1
    return 2 if panels == 4 else min(panels, 3)


def _drawn(figure: Figure, panel: float, columns: int) -> dict[str, Any]:
    return {**figure.draw(panel, columns).to_dict(), "config": CONFIG}


def _svg(chart: dict[str, Any]) -> str:
    return vl_convert.vegalite_to_svg(chart, vl_version=_version())


@functools.cache
def _version() -> str:
    return vl_convert.get_vegalite_versions()[-1]


def _size(svg: str) -> tuple[float, float]:
    """Returns (width, height) of an SVG."""
    found = _SIZE.search(svg)
    assert found is not None
    return float(found[2]), float(found[3])


def _resized(svg: str, width: float, unit: str) -> str:
    """Returns the SVG with another width, and a height in proportion."""
    natural, height = _size(svg)
    size = f'width="{width:g}{unit}" height="{height * width / natural:g}{unit}"'
    return _SIZE.sub(lambda found: f"<svg {found[1]}{size}", svg, count=1)


def write(folder: pathlib.Path, name: str, figure: Figure) -> dict[str, Any]:
    """Writes a figure as NAME-single and NAME-double, PDF and SVG, and NAME.png.

    Returns the charts of both widths in Vega-Lite, for `embedded`.
    """
    charts = {kind: spec(figure, kind) for kind in WIDTHS}
    for kind, width in WIDTHS.items():
        svg = _svg(charts[kind])
        # A pixel of a PDF is a point.
        pdf = vl_convert.svg_to_pdf(_resized(svg, width, ""))
        write_atomically(folder / f"{name}-{kind}.pdf", pdf)
        write_atomically(folder / f"{name}-{kind}.svg", _resized(svg, width, "pt"))
    write_atomically(folder / f"{name}.png", vl_convert.svg_to_png(svg, scale=3))
    return charts


@functools.cache
def _bundle() -> str:
    """Returns the JavaScript that draws charts: Vega, Vega-Lite and Vega-Embed."""
    return vl_convert.javascript_bundle(None, _version()).replace("</script", "<\\/script")


def embedded(figures: Mapping[str, tuple[dict[str, Any], str]]) -> str:
    """Returns the HTML of figures, given as {name: (charts of `write`, caption)}.

    A narrow window shows the charts of a single column. Nothing is loaded from a network.
    """
    if not figures:
        return ""
    shown = "".join(
        f'<figure><div class="chart" id="{name}"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for name, (_, caption) in figures.items()
    )
    charts = {name: charts for name, (charts, _) in figures.items()}
    encoded = json.dumps(charts, ensure_ascii=False).replace("</", "<\\/")
    return (
        f'{shown}<script type="module">{_bundle()}\nconst charts = {encoded};\n'
        'const width = window.innerWidth < 640 ? "single" : "double";\n'
        "for (const name in charts) vegaEmbed(document.getElementById(name), charts[name][width], "
        '{renderer: "svg", actions: false});</script>'
    )
