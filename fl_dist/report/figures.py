"""Charts as plain data for plotly.js; the page sets fonts, margins, and the colours of text and grid."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from fl_dist.common.formatting import shorten
from fl_dist.plots.base import COLOURS
from fl_dist.report.series import Line

Figure = dict[str, Any]
Trace = dict[str, Any]
DASHES = ("solid", "dash", "dot", "dashdot")
BLACK, GREY = "#000000", "#808080"
BAND_OPACITY, SEED_OPACITY = 0.16, 0.55
MAX_LABEL = 30
"""Characters of a label beside an axis; the whole name appears under the pointer."""


def with_opacity(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


DARK_COLOURS = {BLACK: "#e4e7ea"} | {
    with_opacity(BLACK, opacity): with_opacity("#e4e7ea", opacity) for opacity in (BAND_OPACITY, SEED_OPACITY)
}
"""Colours that a dark background would hide, and their replacements."""


class Style(NamedTuple):
    """How a row of the table is drawn in all charts."""

    name: str
    colour: str
    dash: str


def make_style(name: str, k: int) -> Style:
    return Style(name, COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)])


def escape_label(text: object, limit: int = 200) -> str:
    """Text for plotly.js, without markup."""
    return escape(shorten(text, limit), quote=False)


def make_trace(kind: str, x: Sequence[object], y: Sequence[object], name: object, hover: str, **more: Any) -> Trace:
    position = {"type": kind, "x": [*x], "y": [*y], "name": escape_label(name)}
    return position | {"hovertemplate": f"{hover}<extra></extra>"} | more


def make_axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": escape_label(title)}} | more


def make_category_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis of names, the last on top."""
    labels = [escape_label(name) for name in names]
    order = {"type": "category", "categoryorder": "array", "categoryarray": labels, "range": [-0.6, len(names) - 0.4]}
    return order | {"tickvals": labels, "ticktext": [escape_label(name, MAX_LABEL) for name in names]}


class Curve(NamedTuple):
    style: Style
    axes: str
    """Key of the costs at its rounds, for other axes than rounds."""
    line: Line


def line_chart(title: str, unit: str, curves: Sequence[Curve], markers: bool = False) -> Figure:
    """Curves over rounds, with a band where there are several seeds."""
    data: list[Trace] = []
    for curve in curves:
        data += [_band(curve)] if curve.line.seeds > 1 else []
        data.append(_mean_curve(curve, markers))
    return {"title": title, "data": data, "layout": {"yaxis": make_axis(unit)}, "overRounds": True}


def _mean_curve(curve: Curve, markers: bool) -> Trace:
    style, axes, line = curve
    mode = "lines+markers" if markers or len(line.rounds) < 3 else "lines"
    stroke = {"color": style.colour, "dash": style.dash, "width": 1.8}
    more = {"mode": mode, "line": stroke, "marker": {"size": 5}, "legendgroup": style.name, "meta": {"axes": axes}}
    hover = "%{fullData.name}<br>%{x:.5~g}: <b>%{y:.5~g}</b>"
    return make_trace("scatter", line.rounds, line.mean, style.name, hover, **more)


def _band(curve: Curve) -> Trace:
    style, axes, line = curve
    outline = {"x": line.rounds + line.rounds[::-1], "y": line.high + line.low[::-1]}
    fill = {"line": {"width": 0}, "fill": "toself", "fillcolor": with_opacity(style.colour, BAND_OPACITY)}
    group = {"legendgroup": style.name, "meta": {"axes": axes}, "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines"} | outline | fill | group
