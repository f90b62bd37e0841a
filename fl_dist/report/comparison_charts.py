"""Final scores beside each other and beside published ones, and what it took to reach targets."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fl_dist.metrics.costs import COSTS
from fl_dist.report import tables
from fl_dist.report.builder import Panel, Part, ReportBuilder, Section, charts, heading, html, section
from fl_dist.report.figures import (
    GREY,
    SEED_OPACITY,
    Figure,
    Style,
    Trace,
    escape_label,
    make_axis,
    make_category_axis,
    make_trace,
    with_opacity,
)
from fl_dist.report.run_source import RunGroup
from fl_dist.results.cells import NOT_REACHED, final_score
from fl_dist.results.table import ResultsTable, build_table

UNFINISHED = "*"
"""Start of the note that explains the mark of unfinished cells."""


class RowScores(NamedTuple):
    """A row of the comparison: the scores of its seeds, and the published one."""

    style: Style
    finished: list[float]
    unfinished: list[float]
    published: tuple[float, float | None] | None

    @property
    def counted(self) -> list[float]:
        """As in the table: the finished ones, or all if none is."""
        return self.finished or self.unfinished

    @property
    def mean(self) -> float:
        return sum(self.counted) / len(self.counted)


def comparison(builder: ReportBuilder) -> Section | None:
    names: list[str] = []
    for panel, table in ((panel, builder.tables[[*builder.groups].index(panel.group)]) for panel in builder.panels):
        if rows := _row_scores(builder, panel, table):
            metric = panel.primary_metric
            unit = f"{metric.name}{' (%)' if metric.percent else ''}"
            figure = comparison_chart(panel.title, unit, rows, metric.best == "min")
            names += builder.add_figure(f"compared/{panel.key}", figure)
    parts = charts(names) + [part for group in builder.groups for part in _costs_to_targets(builder, group)]
    note = "The large dot is the mean over seeds, with their range; a diamond is the published number."
    note += " Hollow dots are not finished, or not with all seeds."
    return section("compared", "Comparison", parts, note)


def _row_scores(builder: ReportBuilder, panel: Panel, table: ResultsTable) -> list[RowScores]:
    published, rows = _published_scores(table, panel.column), []
    scale = 100 if panel.primary_metric.percent else 1
    for row, runs in panel.cells():
        finished: list[float] = []
        unfinished: list[float] = []
        for run in runs:
            score = final_score(run.result, panel.group.collection.sweep.table)
            if score is not None:
                (finished if run.result.finished else unfinished).append(round(scale * score, 6))
        if finished or unfinished:
            rows.append(RowScores(builder.styles[row], finished, unfinished, published.get(row)))
    return rows


def _published_scores(table: ResultsTable, column: str) -> dict[str, tuple[float, float | None]]:
    index = next(k for k, (name, measure) in enumerate(table.columns) if name == column and not measure.cost)
    published = {row: cells[index].published for row, cells in table.rows}
    numbers = {row: pair for row, pair in published.items() if pair and pair[0] != "x"}
    return {row: (float(value), float(std) if std else None) for row, (value, std) in numbers.items()}


def _costs_to_targets(builder: ReportBuilder, group: RunGroup) -> list[Part]:
    """What it took to reach the sweep's targets or, if it has none, one that half of the runs reached."""
    settings = group.collection.sweep.table
    if not settings.targets:
        settings = settings.model_copy(update={"targets": _default_targets(group)})
    costs = [cost for cost in COSTS if all(cost in builder.cost_axes([run]) for run in group.runs if run.records)]
    table = build_table(group.collection, settings, costs, None)
    if not any(measure.cost for _, measure in table.columns) or not any(run.records for run in group.runs):
        return []
    notes = [note for note in table.notes if note.startswith((NOT_REACHED, UNFINISHED))]
    return [*heading("Cost to targets"), *html(tables.results_table(table, only_costs=True) + tables.notes(notes))]


def _default_targets(group: RunGroup) -> list[float]:
    best = [max(score for _, score in run.result.scores) for run in group.runs if run.result.scores]
    if not best or not all(run.result.primary_metric.percent for run in group.runs):
        return []
    target = math.floor(20 * statistics.median_high(best)) / 20
    return [target] if target > 0 else []


def comparison_chart(title: str, unit: str, rows: Sequence[RowScores], minimize: bool) -> Figure:
    """Sorted, the best on top; a dot per seed, a larger one for their mean, a diamond for the published score."""
    ordered = sorted(rows, key=lambda row: row.mean, reverse=minimize)
    data = [_mean_dot(row) for row in ordered]
    data += [_seed_dots(row) for row in ordered if len(row.finished) + len(row.unfinished) > 1]
    if published := [(row.style.name, *row.published) for row in ordered if row.published]:
        data.append(_published_dots(published))
    names = [row.style.name for row in ordered]
    layout = {"xaxis": make_axis(unit), "yaxis": make_category_axis(names), "hovermode": "closest"}
    return {"title": title, "data": data, "layout": layout, "height": 90 + 26 * len(rows)}


def _mean_dot(row: RowScores) -> Trace:
    name, colour, mean = row.style.name, row.style.colour, row.mean
    spread = {"array": [max(row.counted) - mean], "arrayminus": [mean - min(row.counted)], "symmetric": False}
    error = {"type": "data", "thickness": 1.5, "width": 0, "color": colour} | spread
    hollow = {"symbol": _symbol(not row.unfinished), "line": {"width": 2}} if row.unfinished else {}
    more = {"mode": "markers", "legendgroup": name, "marker": {"size": 11, "color": colour} | hollow, "error_x": error}
    text = ", not finished" if row.unfinished else ""
    hover = "%{fullData.name}%{text}<br><b>%{x:.5~g}</b>"
    return make_trace("scatter", [mean], [escape_label(name)], name, hover, text=text, **more)


def _seed_dots(row: RowScores) -> Trace:
    name, values = row.style.name, [*row.finished, *row.unfinished]
    finished = [k < len(row.finished) for k in range(len(values))]
    marker = {"size": 5, "color": with_opacity(row.style.colour, SEED_OPACITY), "symbol": [*map(_symbol, finished)]}
    text = ["" if done else ", not finished" for done in finished]
    more = {"mode": "markers", "legendgroup": name, "marker": marker, "text": text}
    hover = "%{fullData.name}, one seed%{text}<br>%{x:.5~g}"
    return make_trace("scatter", values, [escape_label(name)] * len(values), name, hover, **more)


def _symbol(finished: bool) -> str:
    return "circle" if finished else "circle-open"


def _published_dots(scores: Sequence[tuple[str, float, float | None]]) -> Trace:
    names, values, spreads = zip(*scores, strict=True)
    error = {"type": "data", "array": [spread or 0 for spread in spreads], "thickness": 1, "width": 3, "color": GREY}
    marker = {"symbol": "diamond-open", "size": 10, "line": {"width": 1.5}, "color": GREY}
    more = {"mode": "markers", "marker": marker, "error_x": error}
    return make_trace(
        "scatter", values, [escape_label(name) for name in names], "published", "published<br>%{x:.5~g}", **more
    )
