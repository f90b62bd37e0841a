"""Final scores with error bars, against a number of the records or a setting: panels by column, colours by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten, suggest
from fl_dist.config.sweep_file import ExtraColumn, TableSettings
from fl_dist.metrics.costs import COSTS
from fl_dist.plots import surfaces
from fl_dist.results.cells import Measure, summarize
from fl_dist.results.collect import Collection, differing_keys, format_setting
from fl_dist.results.panels import draw_panels, label_panel, line_style, scale_x
from fl_dist.results.run_result import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """A score, in percent if the metric is, with its position; deviations are 0 if unknown."""

    x: float
    y: float
    x_error: float
    y_error: float


@dataclass
class Line:
    """Runs that differ in one setting (and their seeds), by its value; None: they do not have it."""

    title: str
    """Of its panel."""
    label: str
    runs: dict[float | None, list[RunResult]]


def draw_scatter(collection: Collection, file: Path, key: str, table: TableSettings) -> bool:
    """One point per cell; False: no run has both numbers, and no file is written."""
    points = scatter_points(collection, key, table)
    columns = [column for column in collection.columns if any(column == cell[1] for cell in points)]
    if not columns:
        return False
    metric = next(run.primary_metric for run in collection.runs if run.scores)

    def draw(panel: "Axes", column: str) -> None:
        for k, row in enumerate(collection.rows):
            if (row, column) in points:
                _draw_points(panel, [points[row, column]], k, row)
        scale_x(panel, [point.x for (_, c), point in points.items() if c == column])
        label_panel(panel, column, _label_of(key, table), metric)

    draw_panels(file, columns, draw)
    return True


def _label_of(key: str, table: TableSettings) -> str:
    """As the table heads it, if it has such a column."""
    if key in COSTS:
        return COSTS[key].label
    return next((name for name, column in table.extra_columns.items() if column.key == key), key)


def scatter_points(collection: Collection, key: str, table: TableSettings) -> dict[tuple[str, str], Point]:
    """By row and column: the score against a cost of the whole run, or against another number of its records."""
    measure = Measure(key, key, cost=key) if key in COSTS else Measure(key, key, extra=ExtraColumn(key=key))
    points = {}
    for row in collection.rows:
        for column in collection.columns:
            runs = [run for run in collection.cell(row, column) if run.scores]
            x = summarize(runs, measure, table)
            if x.value is not None:
                points[row, column] = _score_point(runs, table, x.value, x.spread or 0.0)
    return points


def draw_over(lines: Sequence[Line], file: Path, key: str, table: TableSettings) -> bool:
    """One line per row, a level for runs without the key; False: no run has a score, and no file is written."""
    points = [(line, line_points(line, table)) for line in lines]
    points = [(line, of_line) for line, of_line in points if of_line]
    if not points:
        return False
    metric = next(run.primary_metric for line, _ in points for runs in line.runs.values() for run in runs if run.scores)
    labels = list(dict.fromkeys(line.label for line in lines))

    def draw(panel: "Axes", title: str) -> None:
        for line, of_line in points:
            k = labels.index(line.label)
            if line.title == title and None in line.runs:
                colour, dash, _ = line_style(k)
                panel.axhline(of_line[0].y, color=colour, linestyle=dash, linewidth=1.0, label=line.label)
            elif line.title == title:
                _draw_points(panel, of_line, k, line.label, line=True)
        scale_x(panel, [point.x for line, of_line in points if None not in line.runs for point in of_line])
        label_panel(panel, title, key, metric)

    draw_panels(file, list(dict.fromkeys(line.title for line, _ in points)), draw)
    return True


def line_points(line: Line, table: TableSettings) -> list[Point]:
    """By increasing value; those without a score are left out."""
    by_value = {value: [run for run in runs if run.scores] for value, runs in line.runs.items()}
    points = [_score_point(runs, table, value or 0.0) for value, runs in by_value.items() if runs]
    return sorted(points, key=lambda point: point.x)


def draw_surfaces(collection: Collection, file: Path) -> bool:
    """The newest surface, plane and profile of each cell, all on one scale; False: there is none, and no file."""
    has_columns = len(collection.columns) > 1
    cells: dict[str, Sequence[Mapping[str, Any]]] = {}
    for run in collection.runs:
        label = f"{run.row}, {run.column}" if has_columns else run.row
        drawable = [values for values in run.diagnostics if surfaces.can_draw(values)]
        if drawable:
            cells.setdefault(label, drawable)
    return surfaces.draw(cells, file)


def lines_over(collection: Collection, key: str) -> list[Line]:
    """The runs by their settings other than the key; ConfigError if none differ in the key alone."""
    values = {_setting(run, key) for run in collection.runs} - {None}
    if key in ("seed", "rounds"):
        raise ConfigError(f"runs are not compared by {key}: a point is the mean over seeds; choose another key")
    if not values:
        known = {name for run in collection.runs for name, value in run.settings.items() if _is_number(value)}
        raise ConfigError(f"no run has {key} in its configuration; {suggest(key, known)}")
    if len(values) == 1:
        raise ConfigError(f"{key} is {values.pop():g} in all runs; choose a key whose values differ")
    groups: dict[str, list[RunResult]] = {}
    for run in collection.runs:
        others = {**run.settings, key: _setting(run, key) is None}
        groups.setdefault(repr(sorted(others.items())), []).append(run)
    lines = [line for runs in groups.values() if (line := _line(runs, key)) is not None]
    if all(None in line.runs for line in lines):
        raise ConfigError(f"no two runs differ in {key} alone: their other settings differ too")
    return _with_distinct_labels(lines, key)


def _line(runs: Sequence[RunResult], key: str) -> Line | None:
    """None: all runs have the same value."""
    by_value: dict[float | None, list[RunResult]] = {}
    for run in runs:
        by_value.setdefault(_setting(run, key), []).append(run)
    if len(by_value) == 1 and None not in by_value:
        return None
    label = _common_words([run.row for run in runs], " ") or str(runs[0].settings.get("algorithm.name") or "parts")
    return Line(_common_words([run.column for run in runs], ", "), label, by_value)


def _with_distinct_labels(lines: Sequence[Line], over: str) -> list[Line]:
    """Lines of one panel and label also name the settings in which they differ."""
    distinct = []
    for line in lines:
        same = [other for other in lines if (other.title, other.label) == (line.title, line.label)]
        settings = [next(iter(other.runs.values()))[0].settings for other in same]
        own = next(iter(line.runs.values()))[0].settings
        keys = [key for key in differing_keys(settings, "") if key != over or None in line.runs]
        names = [format_setting(own, key) for key in keys]
        distinct.append(replace(line, label=" ".join([line.label, *names])))
    return distinct


def _common_words(labels: Sequence[str], separator: str) -> str:
    """What all labels share, such as FedSAM of `FedSAM rho=0.1` and `FedSAM rho=0.2`."""
    words = [label.split(separator) for label in labels]
    return separator.join(word for word in words[0] if all(word in others for others in words))


def _setting(run: RunResult, key: str) -> float | None:
    value: float | None = run.settings.get(key)
    if value is not None and not _is_number(value):
        raise ConfigError(f"{key} of {run.name} is {shorten(repr(value))}, not a number")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _score_point(runs: Sequence[RunResult], table: TableSettings, x: float, x_error: float = 0.0) -> Point:
    score = summarize(runs, Measure(table.measure, table.measure), table)
    assert score.value is not None
    scale = 100 if runs[0].primary_metric.percent else 1
    return Point(x, scale * score.value, x_error, scale * (score.spread or 0.0))


def _draw_points(panel: "Axes", points: Sequence[Point], k: int, label: str, line: bool = False) -> None:
    colour, dash, marker = line_style(k)
    panel.errorbar(
        [point.x for point in points],
        [point.y for point in points],
        xerr=[point.x_error for point in points] if any(point.x_error for point in points) else None,
        yerr=[point.y_error for point in points] if any(point.y_error for point in points) else None,
        color=colour,
        linestyle=dash if line else "none",
        marker=marker,
        markersize=5,
        linewidth=1.6,
        elinewidth=1.0,
        capsize=2,
        label=label,
    )
