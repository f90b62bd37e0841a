"""A table of results: its columns, its cells, and means over columns."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fl_dist.common.errors import ConfigError
from fl_dist.config.sweep_file import ExtraColumn, TableSettings
from fl_dist.results.cells import Measure, Number, summarize
from fl_dist.results.collect import Collection
from fl_dist.results.notes import table_notes
from fl_dist.results.published import Published, read_published
from fl_dist.results.run_result import common_metric
from fl_dist.tasks import PrimaryMetric


@dataclass(frozen=True)
class ResultsTable:
    """A whole table before it is written."""

    name: str
    primary_metric: PrimaryMetric
    columns: list[tuple[str, Measure]]
    rows: list[tuple[str, list[Number]]]
    notes: list[str]

    def best(self, column: int) -> set[int]:
        """The rows whose number is the best of a column, if there are several to compare."""
        _, measure = self.columns[column]
        values = {k: row[column].value for k, (_, row) in enumerate(self.rows)}
        known = {k: value for k, value in values.items() if value is not None}
        if not known or sum(row[column].has_scores for _, row in self.rows) < 2:
            return set()
        minimize = measure.extra.best == "min" if measure.extra else measure.cost or self.primary_metric.best == "min"
        best = (min if minimize else max)(known.values())
        return {k for k, value in known.items() if value == best}


def build_table(
    collection: Collection, table: TableSettings, costs: Sequence[str], published: Path | None
) -> ResultsTable:
    """Every row and column of the runs, by the sweep's table."""
    metric = common_metric(collection.runs)
    targets = [target for column in collection.columns for target in table.targets_of(column)]
    if metric.percent and (high := [target for target in targets if target > 1]):
        raise ConfigError(f"a target of {high[0]:g} is beyond all: write 0.8 for 80 %")
    numbers = read_published(published, collection.name) if published else {}
    columns = [(c, m) for c in collection.columns for m in _measures(table, c, costs, metric)]
    columns = [(c, m) for c, m in columns if not m.extra or _has_numbers(collection, c, m.extra, m.name, numbers)]
    rows = [
        (row, [summarize(collection.cell(row, c), m, table, numbers.get((row, c, m.name))) for c, m in columns])
        for row in collection.rows
    ]
    means = _columns_of_means(collection, table)
    scores = {column: k for k, (column, m) in enumerate(columns) if m.is_score}
    for name, averaged in means.items():
        for row, cells in rows:
            cells.append(_mean([cells[scores[c]] for c in averaged], numbers.get((row, name, table.measure))))
        columns.append((name, Measure(table.measure, metric.name)))
    notes = table_notes(collection, table, metric, columns, rows)
    notes += [f"{name}: mean of {', '.join(averaged)}" for name, averaged in means.items()]
    return ResultsTable(collection.name, metric, columns, rows, notes)


def _measures(table: TableSettings, column: str, costs: Sequence[str], metric: PrimaryMetric) -> list[Measure]:
    to_targets = [
        Measure(f"{cost}@{target:g}", f"{cost.replace('_', ' ')} to {_format_target(target, metric)}", cost, target)
        for target in table.targets_of(column)
        for cost in costs
    ]
    extra_columns = [Measure(name, name.replace("_", " "), extra=extra) for name, extra in table.extra_columns.items()]
    return [Measure(table.measure, metric.name), *to_targets, *extra_columns]


def _has_numbers(collection: Collection, column: str, extra: ExtraColumn, name: str, published: Published) -> bool:
    if extra.columns is not None:
        return column in extra.columns
    runs = [run for run in collection.runs if run.column == column]
    return any((row, column, name) in published for row in collection.rows) or any(r.numbers(extra.key) for r in runs)


def _format_target(target: float, metric: PrimaryMetric) -> str:
    return f"{100 * target:g} %" if metric.percent else f"{target:g}"


def _columns_of_means(collection: Collection, table: TableSettings) -> dict[str, list[str]]:
    """By the name of each mean, the columns that it is over."""
    if clash := [name for name in table.means if name in collection.columns]:
        raise ConfigError(f"the mean {clash[0]} has the name of a column; choose another name")
    means = {name: columns_of_mean(collection, patterns) for name, patterns in table.means.items()}
    return {name: averaged for name, averaged in means.items() if averaged}


def columns_of_mean(collection: Collection, patterns: Sequence[str]) -> list[str]:
    """The columns that a mean is over; none if a pattern fits no column, such as one that `--only` leaves out."""
    has_all = all(_matching_columns(collection.columns, [pattern]) for pattern in patterns)
    return _matching_columns(collection.columns, patterns) if has_all else []


def is_whole_mean(collection: Collection, patterns: Sequence[str]) -> bool:
    """Whether `--only` leaves out no column of the mean; the published one is over all of them."""
    return set(_matching_columns(collection.sweep.columns, patterns)) <= set(collection.columns)


def _matching_columns(columns: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [column for column in columns if any(column == p or fnmatchcase(column, p) for p in patterns)]


def _mean(numbers: Sequence[Number], published: tuple[str, str] | None) -> Number:
    """The mean of a row's cells; no value if one has none."""
    values = [number.value for number in numbers if number.value is not None]
    value = statistics.fmean(values) if len(values) == len(numbers) else None
    finished, runs = sum(number.finished for number in numbers), sum(number.runs for number in numbers)
    return Number(value, None, finished, runs, any(number.has_scores for number in numbers), published)
