"""The sections of the page; one that has nothing to show is left out."""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

from fl_dist.common.formatting import pluralize
from fl_dist.metrics.costs import COSTS
from fl_dist.metrics.record import TEST, RoundRecord
from fl_dist.report import figures, tables
from fl_dist.report.builder import Panel, Part, ReportBuilder, Section, charts, choice, heading, html, section
from fl_dist.report.diagnostic_charts import diagnostics
from fl_dist.report.figures import RowScores
from fl_dist.report.record_charts import values
from fl_dist.report.run_reader import RunGroup, RunSnapshot
from fl_dist.report.series import MAX_POINTS, MAX_POINTS_SMALL, Line, Points, downsample, points
from fl_dist.results.table import NOT_REACHED, ResultsTable, build_table, final_score

UNFINISHED = "*"
"""Start of the note that explains the mark of unfinished cells."""


def build_sections(builder: ReportBuilder) -> list[Section]:
    return [built for build in SECTIONS if (built := build(builder)) is not None]


def summary(builder: ReportBuilder) -> Section | None:
    unreadable = {path: why for group in builder.groups for path, why in group.collection.unreadable.items()}
    parts = html(tables.problem_list(builder.runs, unreadable))
    for group, table in zip(builder.groups, builder.tables, strict=True):
        parts += heading(group.collection.name) if len(builder.groups) > 1 else []
        parts += html(tables.run_table(group.runs))
        if len(group.runs) > 1:
            parts += html(tables.results_table(table) + tables.notes(table.notes))
    return section("summary", "Summary", parts)


def curves(builder: ReportBuilder) -> Section | None:
    parts: list[Part] = []
    for panel in builder.panels:
        names = []
        for key, title, unit, scale in _scores(panel):
            series = partial(points, value=partial(_score, key), scale=scale)
            if lines := builder.curves(panel, f"{key}*{scale:g}", series, MAX_POINTS):
                names += builder.add_figure(f"curves/{panel.key}/{key}", figures.line_chart(title, unit, lines))
        parts += [*heading(panel.title), *charts(names)] if names else []
    note = "A line is the mean over seeds, a band their range."
    return section("curves", "Learning curves", parts, note, over_rounds=True)


def _score(key: str, record: RoundRecord) -> float | None:
    return record.test.get(key.removeprefix(TEST)) if key.startswith(TEST) else record.train_loss


def _scores(panel: Panel) -> list[tuple[str, str, str, float]]:
    """Key, title, unit and scale of the metrics of a round, the most important first."""
    metric = panel.primary_metric
    primary = f"{TEST}{metric.name}"
    last = [run.records[-1] for _, runs in panel.cells() for run in runs if run.records]
    keys = dict.fromkeys([f"{TEST}loss", "train_loss", *(f"{TEST}{name}" for record in last for name in record.test)])
    first = (
        (primary, f"test {metric.name}", "%", 100.0) if metric.percent else (primary, f"test {metric.name}", "", 1.0)
    )
    return [first] + [(key, key.replace("_", " "), "", 1.0) for key in keys if key != primary]


def comparison(builder: ReportBuilder) -> Section | None:
    names: list[str] = []
    for panel, table in ((panel, builder.tables[[*builder.groups].index(panel.group)]) for panel in builder.panels):
        if rows := _row_scores(builder, panel, table):
            metric = panel.primary_metric
            unit = f"{metric.name}{' (%)' if metric.percent else ''}"
            figure = figures.comparison(panel.title, unit, rows, metric.best == "min")
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


def times(builder: ReportBuilder) -> Section | None:
    parts = charts(builder.add_figure("times/phases", figures.phase_seconds(builder.runs)), "wide")
    parts += charts(builder.add_figure("times/diagnostics", figures.diagnostics_seconds(builder.runs)), "wide")
    if parts:
        note = (
            "Bars are means over rounds. What the server does while workers train (evaluation, checkpoints) may reach"
        )
        parts = html(f'<p class="note">{note} beyond the mark, which is the length of a round.</p>') + parts
    timelines = builder.per_run(
        "times/run",
        lambda run: charts(builder.add_figure(f"times/{builder.number(run)}", figures.timeline(run)), "wide"),
    )
    parts += [*heading("Workers"), *timelines] if timelines else []
    return section("times", "Time", parts)


def clients(builder: ReportBuilder) -> Section | None:
    data = choice("clients/data", "run", _partitions(builder))
    spread = builder.per_run("clients/run", lambda run: _client_spread(builder, run))
    parts = [*(heading("Data of each client") + data if data else [])]
    parts += [*(heading("Over rounds") + spread if spread else [])]
    return section("clients", "Clients", parts)


def _partitions(builder: ReportBuilder) -> Iterator[tuple[str, list[Part]]]:
    """Each partition of the data once, with the runs that have it."""
    by_partition: dict[str, list[RunSnapshot]] = {}
    for run in builder.runs:
        if run.clients:
            by_partition.setdefault(repr(run.clients), []).append(run)
    for k, runs in enumerate(by_partition.values()):
        sizes, known = runs[0].clients["sizes"], [size for size in runs[0].clients["sizes"] if size is not None]
        note = f"{pluralize(len(sizes), 'client')} with {min(known):,} to {max(known):,} rows"
        note += f"; the first {figures.MAX_CLIENTS} are drawn" if len(sizes) > figures.MAX_CLIENTS else ""
        names = builder.add_figure(f"clients/{k}", figures.client_data(runs[0].clients))
        others = f" and {pluralize(len(runs) - 1, 'other')}" if len(runs) > 1 else ""
        yield f"{runs[0].name}{others}", [*html(tables.notes([note])), *charts(names, "wide")]


def _client_spread(builder: ReportBuilder, run: RunSnapshot) -> list[Part]:
    """How far the clients of a round differ in loss and in the norm of their updates."""

    def spread(name: str) -> Points:
        return points(run, lambda record: getattr(record.spread, name, None))

    loss, number = points(run, lambda record: record.train_loss), builder.number(run)
    names = _range_chart(
        builder,
        run,
        f"clients/loss/{number}",
        "loss: mean, minimum and maximum",
        loss,
        spread("loss_min"),
        spread("loss_max"),
    )
    mean, std = spread("norm_mean"), spread("norm_std")
    low, high = ({k: mean[k] + sign * std[k] for k in mean if k in std} for sign in (-1, 1))
    title = "norm of updates: mean ± standard deviation"
    names += _range_chart(builder, run, f"clients/norm/{number}", title, mean, low, high)
    return charts(names)


def _range_chart(
    builder: ReportBuilder, run: RunSnapshot, name: str, title: str, mean: Points, low: Points, high: Points
) -> list[str]:
    common = sorted(mean.keys() & low.keys() & high.keys())
    if not common:
        return []
    line = Line(common, [mean[k] for k in common], [low[k] for k in common], [high[k] for k in common], 2)
    curve = builder.curve(run.result.row, [run], downsample(line, MAX_POINTS_SMALL))
    return builder.add_figure(name, figures.line_chart(title, "", [curve]))


def settings(builder: ReportBuilder) -> Section | None:
    configs = tables.config_list(builder.runs)
    return section("settings", "Configurations", html(tables.settings_table(builder.runs) + configs if configs else ""))


def attempts(builder: ReportBuilder) -> Section | None:
    return section("attempts", "Attempts", html(tables.attempts_table(builder.runs)))


SECTIONS: tuple[Callable[[ReportBuilder], Section | None], ...] = (
    *(summary, curves, comparison, times, clients, values, diagnostics, settings, attempts),
)
