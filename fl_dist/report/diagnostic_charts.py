"""Charts of diagnostics: numbers over rounds, the last lists, and the last surfaces."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fl_dist.common.formatting import shorten
from fl_dist.plots.base import MAX_ASPECT, line_widths
from fl_dist.report.builder import Panel, Part, ReportBuilder, Section, charts, choice, heading, section
from fl_dist.report.figures import Figure, Style, Trace, escape_label, line_chart, make_axis, make_trace
from fl_dist.report.numbers import mapping_or_empty, number_grid, number_list, rounded_number
from fl_dist.report.run_reader import RunSnapshot
from fl_dist.report.series import MAX_POINTS_SMALL, Points

Numbers = Sequence[float | None]
PATH_COLOURS = ("#E4572E", "#F28EC0", "#B0B0B0", "#FF9F1C")
"""Visible on the colours of a surface, and on light and dark backgrounds."""
CLASS = "class"
"""Axis of lists with a number per class."""


def diagnostics(builder: ReportBuilder) -> Section | None:
    parts = builder.per_panel("diagnostics/panel", lambda panel: _panel_parts(builder, panel))
    return section("diagnostics", "Diagnostics", parts, over_rounds=True)


def _panel_parts(builder: ReportBuilder, panel: Panel) -> list[Part]:
    labels = dict.fromkeys(label for _, runs in panel.cells() for run in runs for label in run.diagnostics)
    parts: list[Part] = []
    for label in labels:
        own = [part for build in (_numbers, _lists, _surfaces) for part in build(builder, panel, label)]
        parts += [*heading(label), *own] if own else []
    return parts


def _value_names(panel: Panel, label: str, fits: Callable[[Any], object]) -> list[str]:
    """The names of a diagnostic's values of one kind, in any run and round."""
    rounds = (values for _, runs in panel.cells() for run in runs for values in run.diagnostics.get(label, {}).values())
    return [*dict.fromkeys(name for values in rounds for name, value in values.items() if fits(value))]


def _numbers(builder: ReportBuilder, panel: Panel, label: str) -> list[Part]:
    names = []
    for name in _value_names(panel, label, lambda value: rounded_number(value) is not None):
        series = partial(_series, label, name)
        curves = builder.curves(panel, f"diagnostics/{label}/{name}", series, MAX_POINTS_SMALL)
        figure = line_chart(name, "", curves, markers=True)
        names += builder.add_figure(f"diagnostics/{panel.key}/{label}/{name}", figure)
    return charts(names, "small")


def _series(label: str, name: str, run: RunSnapshot) -> Points:
    numbers = {index: rounded_number(values.get(name)) for index, values in run.diagnostics.get(label, {}).items()}
    return {index: number for index, number in numbers.items() if number is not None}


def _last_values(panel: Panel, label: str, name: str) -> Iterator[tuple[str, RunSnapshot, int, Mapping[str, Any]]]:
    """Of each run the last values that include this one."""
    for row, runs in panel.cells():
        for run in runs:
            rounds = {index: values for index, values in run.diagnostics.get(label, {}).items() if values.get(name)}
            if rounds:
                yield row, run, max(rounds), rounds[max(rounds)]


def _lists(builder: ReportBuilder, panel: Panel, label: str) -> list[Part]:
    """The last list of each run, over its radii or over the positions in the list."""
    names = []
    for name in _value_names(panel, label, number_list):
        if name in ("radii", "x", "y"):
            continue
        by_axis: dict[str, list[RunList]] = {}
        for row, run, index, values in _last_values(panel, label, name):
            y = number_list(values[name])
            axis, x = _list_axis(name, values, len(y))
            by_axis.setdefault(axis, []).append(RunList(builder.styles[row], run.name, index, x, y))
        for axis, lists in by_axis.items():
            figure = list_chart(f"{name}, last", lists, axis, joined=axis != CLASS)
            names += builder.add_figure(f"diagnostics/{panel.key}/{label}/{name}/{axis}", figure)
    return charts(names)


def _list_axis(name: str, values: Mapping[str, Any], count: int) -> tuple[str, Sequence[float | None]]:
    """The axis of a list, and the positions of its numbers."""
    radii = number_list(values.get("radii"))
    if len(radii) == count:
        return "radius", radii
    return (CLASS if name == "classes" else "position in the list"), range(count)


class RunList(NamedTuple):
    """A list that a run measured, and the positions of its numbers."""

    style: Style
    run: str
    round: int
    x: Numbers
    y: Numbers


def list_chart(title: str, lists: Sequence[RunList], axis: str, joined: bool = True) -> Figure:
    data, hover = [], "%{fullData.name}<br>%{text}<br>%{x:.5~g}: <b>%{y:.5~g}</b>"
    for (name, colour, dash), run, index, x, y in lists:
        line, marker = {"color": colour, "dash": dash, "width": 1.6}, {"size": 4 if joined else 8, "color": colour}
        more = {"mode": "lines+markers" if joined else "markers", "line": line, "marker": marker, "legendgroup": name}
        data.append(make_trace("scatter", x, y, name, hover, text=escape_label(f"{run}, round {index}"), **more))
    return {"title": title, "data": data, "layout": {"xaxis": make_axis(axis)}}


def _surfaces(builder: ReportBuilder, panel: Panel, label: str) -> list[Part]:
    """Every run's last surface from above, and one of them in 3d; one scale of colours for all."""
    parts: list[Part] = []
    for name in _value_names(panel, label, number_grid):
        last = [
            entry
            for entry in _last_values(panel, label, name)
            if number_list(entry[3].get("x")) and number_list(entry[3].get("y"))
        ]
        heights = [z for *_, values in last for line in number_grid(values[name]) for z in line if z is not None]
        if not heights:
            continue
        span, names, in_space = (min(heights), max(heights)), list[str](), []
        for k, (_, run, index, values) in enumerate(last):
            title, key = f"{name}: {run.name}, round {index}", f"diagnostics/{panel.key}/{label}/{name}/{k}"
            names += builder.add_figure(key, contour_chart(title, values, name, span))
            surface = builder.add_figure(f"{key}/3d", surface_chart(title, values, name, span))
            in_space.append((run.name, charts(surface)))
        parts += charts(names)
        parts += choice(f"diagnostics/{panel.key}/{label}/{name}", "in 3d", in_space)
    return parts


def contour_chart(title: str, values: Mapping[str, Any], name: str, span: tuple[float, float]) -> Figure:
    """A surface from above, with the paths across it."""
    surface, paths = _surface_trace("contour", values, name), mapping_or_empty(values.get("paths"))
    surface |= {"zmin": span[0], "zmax": span[1], "ncontours": 24, "line": {"width": 0.5}}
    surface["hovertemplate"] = "%{x:.3~g}, %{y:.3~g}<br><b>%{z:.5~g}</b><extra></extra>"
    keys = [(shorten(path), PATH_COLOURS[k % len(PATH_COLOURS)]) for k, path in enumerate(paths)]
    layout = _scaled_layout(surface["x"], surface["y"])
    return {"title": title, "data": [surface, *_paths(paths)], "layout": layout, "height": 340, "keys": keys}


def surface_chart(title: str, values: Mapping[str, Any], name: str, span: tuple[float, float]) -> Figure:
    """A surface in 3d."""
    trace = _surface_trace("surface", values, name) | {"cmin": span[0], "cmax": span[1]}
    layout = {"scene": {"zaxis": make_axis(name, range=list(span))}}
    return {"title": title, "data": [trace], "layout": layout, "height": 360}


def _surface_trace(kind: str, values: Mapping[str, Any], name: str) -> Trace:
    x, y, z = number_list(values.get("x")), number_list(values.get("y")), number_grid(values[name])
    colours = {"colorscale": "Viridis", "colorbar": {"thickness": 10, "outlinewidth": 0}}
    return {"type": kind, "x": x, "y": y, "z": z} | colours


def _scaled_layout(x: Numbers, y: Numbers) -> dict[str, Any]:
    """To scale, unless that would make a strip."""
    width, height = (max(known) - min(known) for known in ([v for v in axis if v is not None] for axis in (x, y)))
    if max(width, height) > MAX_ASPECT * min(width, height):
        return {}
    return {"yaxis": {"scaleanchor": "x", "constrain": "domain"}, "xaxis": {"constrain": "domain"}}


def _paths(paths: Mapping[str, Any]) -> list[Trace]:
    """Each path is thinner than those below it, so that none hides another."""
    traces = []
    for k, ((name, value), width) in enumerate(zip(paths.items(), line_widths(len(paths), 2.0, 9.0), strict=True)):
        path, colour = mapping_or_empty(value), PATH_COLOURS[k % len(PATH_COLOURS)]
        rest, x, y = rounded_number(path.get("rest")), number_list(path.get("x")), number_list(path.get("y"))
        text = "" if rest is None else f", {rest:.3g} off the plane"
        line, marker = {"color": colour, "width": width}, {"size": 2 + width, "color": colour}
        more = {"mode": "lines+markers", "line": line, "marker": marker, "text": text}
        traces.append(make_trace("scatter", x, y, name, "%{fullData.name}%{text}", **more))
    return traces
