"""Charts of diagnostics: numbers over rounds, the last lists, and the last surfaces."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fl_dist.report import figures
from fl_dist.report.builder import Panel, Part, ReportBuilder, Section, charts, choice, heading, section
from fl_dist.report.figures import RunList
from fl_dist.report.run_reader import RunSnapshot, number_grid, number_list, rounded_number
from fl_dist.report.series import MAX_POINTS_SMALL, Points

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
        figure = figures.line_chart(name, "", curves, markers=True)
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
            figure = figures.list_chart(f"{name}, last", lists, axis, joined=axis != CLASS)
            names += builder.add_figure(f"diagnostics/{panel.key}/{label}/{name}/{axis}", figure)
    return charts(names)


def _list_axis(name: str, values: Mapping[str, Any], count: int) -> tuple[str, Sequence[float | None]]:
    """The axis of a list, and the positions of its numbers."""
    radii = number_list(values.get("radii"))
    if len(radii) == count:
        return "radius", radii
    return (CLASS if name == "classes" else "position in the list"), range(count)


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
            names += builder.add_figure(key, figures.contour(title, values, name, span))
            surface = builder.add_figure(f"{key}/3d", figures.surface(title, values, name, span))
            in_space.append((run.name, charts(surface)))
        parts += charts(names)
        parts += choice(f"diagnostics/{panel.key}/{label}/{name}", "in 3d", in_space)
    return parts
