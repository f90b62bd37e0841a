"""The sections of the page; one that has nothing to show is left out."""

from collections.abc import Callable
from functools import partial

from fl_dist.metrics.record import TEST, RoundRecord
from fl_dist.report import tables
from fl_dist.report.builder import Panel, Part, ReportBuilder, Section, charts, heading, html, section
from fl_dist.report.client_charts import clients
from fl_dist.report.comparison_charts import comparison
from fl_dist.report.diagnostic_charts import diagnostics
from fl_dist.report.figures import line_chart
from fl_dist.report.record_charts import values
from fl_dist.report.series import MAX_POINTS, points
from fl_dist.report.time_charts import times


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
                names += builder.add_figure(f"curves/{panel.key}/{key}", line_chart(title, unit, lines))
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
    unit, scale = ("%", 100.0) if metric.percent else ("", 1.0)
    first = primary, f"test {metric.name}", unit, scale
    return [first] + [(key, key.replace("_", " "), "", 1.0) for key in keys if key != primary]


def settings(builder: ReportBuilder) -> Section | None:
    configs = tables.config_list(builder.runs)
    return section("settings", "Configurations", html(tables.settings_table(builder.runs) + configs if configs else ""))


def attempts(builder: ReportBuilder) -> Section | None:
    return section("attempts", "Attempts", html(tables.attempts_table(builder.runs)))


SECTIONS: tuple[Callable[[ReportBuilder], Section | None], ...] = (
    *(summary, curves, comparison, times, clients, values, diagnostics, settings, attempts),
)
