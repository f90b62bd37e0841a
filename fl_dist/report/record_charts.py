"""A small chart of every number of the round records, as the fields of the record declare it."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from fl_dist.metrics.record import Display, RecordModel, RoundRecord, WorkerRecord, display_of
from fl_dist.report import tables
from fl_dist.report.builder import Panel, Part, ReportBuilder, Section, charts, heading, html, section
from fl_dist.report.figures import Curve, line_chart
from fl_dist.report.numbers import finite_or_none
from fl_dist.report.run_reader import RunSnapshot
from fl_dist.report.series import MAX_POINTS_SMALL, Line, Points, combine_seeds

ROUND = "Round"
"""Heading above charts whose field has no other."""
COMBINE: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "max": max}


class ChartField(NamedTuple):
    """A field that the report shows."""

    name: str
    display: Display
    of_workers: bool

    def values(self, record: RoundRecord) -> Iterator[tuple[str, float]]:
        """Title and value of each of its charts."""
        value = self._combine_workers(record) if self.of_workers else getattr(record, self.name)
        value = value.to_json() if isinstance(value, RecordModel) else len(value) if isinstance(value, list) else value
        inner = value if isinstance(value, Mapping) else {self.display.title: value}
        for title, number in inner.items():
            if (known := finite_or_none(number)) is not None:
                yield title, self.display.scale * known

    def _combine_workers(self, record: RoundRecord) -> float | None:
        values = [finite_or_none(getattr(worker, self.name)) for worker in record.workers.values()]
        known = [value for value in values if value is not None]
        return COMBINE[self.display.over_workers](known) if known else None


class Chart(NamedTuple):
    order: int
    heading: str
    title: str


@cache
def chart_fields(record: type[RoundRecord]) -> list[ChartField]:
    """Those with a heading of their own first; then as W&B and TensorBoard sort their sections."""
    own = [ChartField(name, display_of(info), False) for name, info in record.model_fields.items()]
    section = display_of(record.model_fields["workers"]).section
    workers = [
        ChartField(name, display_of(info)._replace(section=section), True)
        for name, info in WorkerRecord.model_fields.items()
    ]
    fields = [field for field in own + workers if field.display.title or field.display.heading]
    return sorted(fields, key=lambda field: (not field.display.heading, field.display.section))


def values(builder: ReportBuilder) -> Section | None:
    parts = builder.per_panel("values/panel", lambda panel: _panel_parts(builder, panel))
    return section("values", "Norms and methods", parts, over_rounds=True)


def _panel_parts(builder: ReportBuilder, panel: Panel) -> list[Part]:
    curves: dict[Chart, list[Curve]] = {}
    for row, runs in panel.cells():
        for chart, line in builder.cache.get(runs, "records", partial(_lines, runs)).items():
            curves.setdefault(chart, []).append(builder.curve(row, runs, line))
    by_heading: dict[str, dict[str, list[Curve]]] = {}
    for chart in sorted(curves, key=lambda chart: chart.order):
        by_heading.setdefault(chart.heading, {})[chart.title] = curves[chart]
    return [part for name, group in by_heading.items() for part in _small_charts(builder, panel, name, group)]


def _lines(runs: Sequence[RunSnapshot]) -> dict[Chart, Line]:
    """The line of every chart, over the seeds of a cell."""
    seeds = [_series(run) for run in runs]
    lines = {
        chart: combine_seeds([seed.get(chart, {}) for seed in seeds], MAX_POINTS_SMALL)
        for chart in dict.fromkeys(chart for seed in seeds for chart in seed)
    }
    return {chart: line for chart, line in lines.items() if line is not None}


def _series(run: RunSnapshot) -> dict[Chart, Points]:
    series: dict[Chart, Points] = {}
    for record in run.records:
        for order, field in enumerate(chart_fields(type(record))):
            for title, value in field.values(record):
                series.setdefault(Chart(order, field.display.heading or ROUND, title), {})[record.round] = value
    return series


def _small_charts(builder: ReportBuilder, panel: Panel, title: str, group: Mapping[str, list[Curve]]) -> list[Part]:
    """Values that never change are named in words instead."""
    names, constants = list[str](), list[str]()
    for name, curves in group.items():
        values = {y for curve in curves for y in (*curve.line.low, *curve.line.high)}
        if len(values) > 1:
            names += builder.add_figure(f"values/{panel.key}/{title}/{name}", line_chart(name, "", curves))
        else:
            constants += [f"{name} {y:,.0f}" if y == int(y) else f"{name} {y:.6g}" for y in values]
    note = html(tables.notes([f"Always the same: {', '.join(constants)}"] if constants else []))
    return [*heading(title), *charts(names, "small"), *note]
