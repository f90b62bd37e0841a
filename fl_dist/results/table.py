"""Numbers of a table: over the last rounds of a run, over the seeds of a cell, and until a target."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import pluralize, shorten
from fl_dist.config.sweep_file import ExtraColumn, TableSettings
from fl_dist.metrics.summary import last_scores
from fl_dist.results.collect import Collection, RunResult, common_metric
from fl_dist.tasks import PrimaryMetric

PUBLISHED = ("sweep", "row", "column", "measure", "value", "std")
NOT_REACHED, NO_RUN, FAILED = "×", "–", "failed"
Published = dict[tuple[str, str, str], tuple[str, str]]
MAX_NAMES = 5
"""Unfinished runs that are named below a table."""


@dataclass(frozen=True)
class Measure:
    """What the numbers of a column are."""

    name: str
    """As in a file of published numbers: mean, last, best, rounds@0.8, or what the sweep's table also shows."""
    head: str
    cost: str | None = None
    target: float | None = None
    """The cost is that of reaching it; None: of the whole run."""
    also: ExtraColumn | None = None


@dataclass(frozen=True)
class Number:
    """One cell: the mean over its finished runs or, if none is finished, over those that have a score."""

    value: float | None
    spread: float | None
    finished: int
    runs: int
    has_scores: bool
    published: tuple[str, str] | None = None
    spread_over: str = "seeds"
    """Or rounds."""

    @property
    def is_partial(self) -> bool:
        """Whether it is not yet over all runs of its cell."""
        return self.has_scores and self.finished < self.runs


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
        minimize = measure.also.best == "min" if measure.also else measure.cost or self.primary_metric.best == "min"
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
    numbers = _read_published(published, collection.name) if published else {}
    columns = [(c, m) for c in collection.columns for m in _measures(table, c, costs, metric)]
    columns = [(c, m) for c, m in columns if not m.also or _has_numbers(collection, c, m.also, m.name, numbers)]
    rows = [
        (row, [summarize(collection.cell(row, c), m, table, numbers.get((row, c, m.name))) for c, m in columns])
        for row in collection.rows
    ]
    means = _columns_of_means(collection, table)
    scores = {column: k for k, (column, m) in enumerate(columns) if not (m.cost or m.also)}
    for name, averaged in means.items():
        for row, cells in rows:
            cells.append(_mean([cells[scores[c]] for c in averaged], numbers.get((row, name, table.measure))))
        columns.append((name, Measure(table.measure, metric.name)))
    notes = _notes(collection, table, metric, columns, rows)
    notes += [f"{name}: mean of {', '.join(averaged)}" for name, averaged in means.items()]
    return ResultsTable(collection.name, metric, columns, rows, notes)


def _columns_of_means(collection: Collection, table: TableSettings) -> dict[str, list[str]]:
    """By the name of each mean, the columns that it is over."""
    if clash := [name for name in table.means if name in collection.columns]:
        raise ConfigError(f"the mean {clash[0]} has the name of a column; choose another name")
    means = {name: columns_of_mean(collection, patterns) for name, patterns in table.means.items()}
    return {name: averaged for name, averaged in means.items() if averaged}


def columns_of_mean(collection: Collection, patterns: Sequence[str]) -> list[str]:
    """The columns that a mean is over; none if a pattern fits no column, such as one that `--only` leaves out."""
    has_all = all(any(_fits(column, pattern) for column in collection.columns) for pattern in patterns)
    return [c for c in collection.columns if any(_fits(c, p) for p in patterns)] if has_all else []


def is_whole_mean(collection: Collection, patterns: Sequence[str]) -> bool:
    """Whether `--only` leaves out no column of the mean; the published one is over all of them."""
    averaged = [c for c in collection.sweep.columns if any(_fits(c, p) for p in patterns)]
    return set(averaged) <= set(collection.columns)


def _fits(column: str, pattern: str) -> bool:
    return column == pattern or fnmatchcase(column, pattern)


def _mean(numbers: Sequence[Number], published: tuple[str, str] | None) -> Number:
    """The mean of a row's cells; no value if one has none."""
    values = [number.value for number in numbers if number.value is not None]
    value = statistics.fmean(values) if len(values) == len(numbers) else None
    finished, runs = sum(number.finished for number in numbers), sum(number.runs for number in numbers)
    return Number(value, None, finished, runs, any(number.has_scores for number in numbers), published)


def _measures(table: TableSettings, column: str, costs: Sequence[str], metric: PrimaryMetric) -> list[Measure]:
    to_targets = [
        Measure(f"{cost}@{target:g}", f"{cost.replace('_', ' ')} to {_format_target(target, metric)}", cost, target)
        for target in table.targets_of(column)
        for cost in costs
    ]
    extra = [Measure(name, name.replace("_", " "), also=also) for name, also in table.extra_columns.items()]
    return [Measure(table.measure, metric.name), *to_targets, *extra]


def _has_numbers(collection: Collection, column: str, also: ExtraColumn, name: str, published: Published) -> bool:
    if also.columns is not None:
        return column in also.columns
    runs = [run for run in collection.runs if run.column == column]
    return any((row, column, name) in published for row in collection.rows) or any(r.numbers(also.key) for r in runs)


def _format_target(target: float, metric: PrimaryMetric) -> str:
    return f"{100 * target:g} %" if metric.percent else f"{target:g}"


def summarize(
    runs: Sequence[RunResult], measure: Measure, table: TableSettings, published: tuple[str, str] | None = None
) -> Number:
    """The number of a cell."""
    finished = [run for run in runs if run.finished]
    with_scores = [run for run in runs if run.scores]
    counted = finished or with_scores
    per_run = [_value(run, measure, table) for run in counted]
    values = [value for value in per_run if value is not None]
    if measure.cost and len(values) < len(per_run):
        values = []  # a mean over only the runs that reached the target would flatter
    over = table.spread or ("rounds" if len(values) == 1 else "seeds")
    spread = statistics.stdev(values) if over == "seeds" and len(values) > 1 else None
    if over == "rounds" and measure.cost is None and measure.also is None:
        spread = _spread_over_rounds(counted, table)
    value = statistics.fmean(values) if values else None
    return Number(value, spread, len(finished), len(runs), bool(with_scores), published, over)


def _value(run: RunResult, measure: Measure, table: TableSettings) -> float | None:
    if measure.cost is not None:
        last = run.last_round if measure.target is None else first_round_reaching(run, measure.target)
        return None if last is None else run.costs_until([last], measure.cost)[0]
    if measure.also is None:
        return final_score(run, table)
    numbers, over = run.numbers(measure.also.key), measure.also.over
    if over == "final_window":
        numbers = run.numbers(measure.also.key, after=run.start_of_window(table.final_window))
    values = [value for value in (numbers[-1:] if over == "last" else numbers) if value is not None]
    return statistics.fmean(values) if values else None


def final_score(run: RunResult, table: TableSettings) -> float | None:
    """The score of one run."""
    if not run.scores:
        return None
    if table.measure == "best":
        return (max if run.primary_metric.best == "max" else min)(score for _, score in run.scores)
    return run.scores[-1][1] if table.measure == "last" else statistics.fmean(_final_scores(run, table))


def _final_scores(run: RunResult, table: TableSettings) -> list[float]:
    return last_scores(run.scores, after=run.start_of_window(table.final_window))


def _spread_over_rounds(runs: Sequence[RunResult], table: TableSettings) -> float | None:
    """The deviation over the last rounds that a run is averaged over, as papers with one seed print it."""
    final = [_final_scores(run, table) for run in runs if run.scores]
    if table.measure != "mean" or not final or min(map(len, final)) < 2:
        return None
    return statistics.fmean(map(statistics.stdev, final))


def first_round_reaching(run: RunResult, target: float) -> int | None:
    """The first evaluated round that reaches the target."""
    sign = 1 if run.primary_metric.best == "max" else -1
    return next((index for index, score in run.scores if sign * score >= sign * target), None)


def _notes(
    collection: Collection,
    table: TableSettings,
    metric: PrimaryMetric,
    columns: Sequence[tuple[str, Measure]],
    rows: Sequence[tuple[str, list[Number]]],
) -> list[str]:
    cells = [(number, measure) for _, row in rows for number, (_, measure) in zip(row, columns, strict=True)]
    numbers = [number for number, _ in cells]
    notes = [_describe_metric(collection, table, metric, numbers), *_published_notes(table, cells)]
    if any(_is_missed(number, measure) for number, measure in cells):
        notes.append(f"{NOT_REACHED} not reached")
    unfinished = [run for run in collection.runs if not run.finished]
    if unfinished:
        if any(number.is_partial for number in numbers):
            notes.append("* not all runs of this cell are finished")
        names = [f"{run.name} ({run.last_round} of {run.rounds} rounds)" for run in unfinished[:MAX_NAMES]]
        more = [f"{len(unfinished) - MAX_NAMES:,} more"] if len(unfinished) > MAX_NAMES else []
        count = f"{len(unfinished):,} of {pluralize(len(collection.runs), 'run')}"
        notes.append(f"not finished: {count}: {', '.join([*names, *more])}")
    return notes


def _describe_metric(
    collection: Collection, table: TableSettings, metric: PrimaryMetric, numbers: Sequence[Number]
) -> str:
    """What the metric is, and what ± is over."""
    seeds = max(len(collection.cell(row, column)) for row in collection.rows for column in collection.columns)
    windows = sorted({min(table.final_window or run.final_window, run.rounds) for run in collection.runs})
    span = f"the last {pluralize(windows[0], 'round')}" if len(windows) == 1 else "the last rounds"
    over = {"mean": f"mean of {span}", "last": "last round", "best": "best round"}[table.measure]
    description = f"{metric.name}{' in %' if metric.percent else ''}: {over}"
    spread = {number.spread_over for number in numbers if number.spread is not None}
    if not spread:
        return description
    kinds = {"seeds": f"{seeds} seeds", "rounds": span}
    mean = ", the mean of those of the seeds" if table.spread == "rounds" and seeds > 1 else ""
    deviation = " or, of one run, over ".join(kinds[kind] for kind in kinds if kind in spread)
    return f"{description}; ± standard deviation over {deviation}{mean}"


def _published_notes(table: TableSettings, cells: Sequence[tuple[Number, Measure]]) -> list[str]:
    published = [(*number.published, measure) for number, measure in cells if number.published]
    if not published:
        return []
    spread = table.published_spread if any(std for _, std, _ in published) else None
    notes = [f"in brackets: as published{f' (± {spread})' if spread else ''}"]
    if any(value == "x" and measure.cost is None for value, _, measure in published):
        notes.append(f"{FAILED}: training failed there")
    return notes


def _is_missed(number: Number, measure: Measure) -> bool:
    """Whether its cell has the sign of a target that was not reached."""
    published = number.published is not None and number.published[0] == "x"
    return measure.cost is not None and (number.has_scores and number.value is None or published)


def _read_published(file: Path, sweep: str) -> Published:
    """Value and deviation by row, column and measure."""
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            rows, head = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(f"cannot read the published numbers in {file}: {e}") from None
    if set(head) != set(PUBLISHED):
        raise ConfigError(f"{file} has another header: its first line has to be {','.join(PUBLISHED)}")
    for number, row in enumerate(rows, 2):
        if set(row) != set(PUBLISHED) or None in row.values():
            raise ConfigError(f"{file}, line {number} has to have the fields {', '.join(PUBLISHED)}")
        for key in ("value", "std"):
            if not _is_number(row[key], key):
                raise ConfigError(f"{file}, line {number}: {key} is {shorten(repr(row[key]))}, not a number")
    own = [row for row in rows if row["sweep"] == sweep]
    return {(row["row"], row["column"], row["measure"]): (row["value"], row["std"]) for row in own}


def _is_number(text: str, key: str) -> bool:
    """Or x for a target that was not reached or training that failed; a deviation may be empty."""
    if text == ("x" if key == "value" else ""):
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
