"""Numbers of a table: over the last rounds of a run, over the seeds of a cell, and until a target."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_dist.common.reading import ConfigError
from fl_dist.common.words import counted, shortened
from fl_dist.config.sweeps import Table
from fl_dist.results.collect import Collection, Outcome
from fl_dist.tasks import Headline

PUBLISHED = ("sweep", "row", "column", "measure", "value", "std")
NOT_REACHED, NO_RUN = "×", "–"
MOST_NAMED = 5
"""Unfinished runs that are named below a table."""


@dataclass(frozen=True)
class Measure:
    """What a column of numbers is."""

    name: str
    """As in a file of published numbers: mean, last, best, or rounds@0.8."""
    head: str
    cost: str | None = None
    target: float = 0.0


@dataclass(frozen=True)
class Number:
    """One cell: over how many runs of how many, and what was published."""

    value: float | None
    spread: float | None
    runs: int
    of: int
    counted: int
    """Runs that the value is of: the finished ones, or all that have begun if none is."""
    begun: bool
    published: tuple[str, str] | None = None


@dataclass(frozen=True)
class Figures:
    """A whole table before it is written."""

    name: str
    headline: Headline
    columns: list[tuple[str, Measure]]
    rows: list[tuple[str, list[Number]]]
    notes: list[str]

    def best(self, column: int) -> set[int]:
        """The rows whose number is the best of a column, if there are several to compare."""
        _, measure = self.columns[column]
        values = {k: row[column].value for k, (_, row) in enumerate(self.rows)}
        known = {k: value for k, value in values.items() if value is not None}
        if not known or sum(row[column].begun for _, row in self.rows) < 2:
            return set()
        best = (min if measure.cost or self.headline.best == "min" else max)(known.values())
        return {k for k, value in known.items() if value == best}


def figures(found: Collection, table: Table, costs: Sequence[str], published: Path | None) -> Figures:
    """Every row and column of the runs, by the sweep's table."""
    headline = next((o.headline for o in found.outcomes if o.history), found.outcomes[0].headline)
    if headline.percent and (high := [t for column in found.columns for t in table.targets_of(column) if t > 1]):
        raise ConfigError(f"a target of {high[0]:g} is beyond all: write 0.8 for 80 %")
    numbers = _read_published(published, found.name) if published else {}
    columns = [(c, m) for c in found.columns for m in _measures(table, c, costs, headline)]
    rows = [
        (row, [_number(found.at(row, c), m, table, numbers.get((row, c, m.name))) for c, m in columns])
        for row in found.rows
    ]
    return Figures(found.name, headline, columns, rows, _notes(found, table, headline, rows))


def _measures(table: Table, column: str, costs: Sequence[str], headline: Headline) -> list[Measure]:
    reached = [
        Measure(f"{cost}@{target:g}", f"{cost} to {_target(target, headline)}", cost, target)
        for target in table.targets_of(column)
        for cost in costs
    ]
    return [Measure(table.measure, headline.name), *reached]


def _target(target: float, headline: Headline) -> str:
    return f"{100 * target:g} %" if headline.percent else f"{target:g}"


def _number(runs: Sequence[Outcome], measure: Measure, table: Table, published: tuple[str, str] | None) -> Number:
    finished = [run for run in runs if run.finished]
    begun = [run for run in runs if run.scores]
    counted_runs = finished or begun
    if measure.cost is not None:
        reached = [first_at(run, measure.target) for run in counted_runs]
        values = [run.spent(measure.cost, r) for run, r in zip(counted_runs, reached, strict=True) if r is not None]
        whole = len(values) == len(counted_runs) and bool(values)
        spread = statistics.stdev(values) if whole and len(values) > 1 else None
        value = statistics.fmean(values) if whole else None
    else:
        values = [score for run in counted_runs if (score := final(run, table)) is not None]
        value = statistics.fmean(values) if values else None
        spread = statistics.stdev(values) if len(values) > 1 else _own_spread(counted_runs, table)
    return Number(value, spread, len(finished), len(runs), len(counted_runs), bool(begun), published)


def final(run: Outcome, table: Table) -> float | None:
    """The score of one run."""
    if not run.scores:
        return None
    if table.measure == "best":
        return (max if run.headline.best == "max" else min)(score for _, score in run.scores)
    return run.scores[-1][1] if table.measure == "last" else statistics.fmean(_tail(run, table))


def _tail(run: Outcome, table: Table) -> list[float]:
    since = run.done - (table.last or run.last)
    return [score for index, score in run.scores if index > since] or [run.scores[-1][1]]


def _own_spread(runs: Sequence[Outcome], table: Table) -> float | None:
    """Of a single run that is averaged over its last rounds: their deviation, as papers with one seed print it."""
    scored = [run for run in runs if run.scores]
    if len(scored) != 1 or table.measure != "mean" or len(tail := _tail(scored[0], table)) < 2:
        return None
    return statistics.stdev(tail)


def first_at(run: Outcome, target: float) -> int | None:
    """The first evaluated round that reaches the target."""
    better = (lambda score: score >= target) if run.headline.best == "max" else (lambda score: score <= target)
    return next((index for index, score in run.scores if better(score)), None)


def _notes(found: Collection, table: Table, headline: Headline, rows: Sequence[tuple[str, list[Number]]]) -> list[str]:
    numbers = [number for _, row in rows for number in row]
    seeds = max(len(found.at(row, column)) for row in found.rows for column in found.columns)
    last = sorted({min(table.last or run.last, run.rounds) for run in found.outcomes})
    span = f"the last {counted(last[0], 'round')}" if len(last) == 1 else "the last rounds"
    over = {"mean": f"mean of {span}", "last": "last round", "best": "best round"}[table.measure]
    notes = [f"{headline.name}{' in %' if headline.percent else ''}: {over}"]
    spread = {number.of > 1 and number.counted > 1 for number in numbers if number.spread is not None}
    if spread:
        kinds = {True: f"{seeds} seeds", False: span}
        notes[0] += (
            f"; ± deviation over {' or, of one run, over '.join(kinds[k] for k in sorted(spread, reverse=True))}"
        )
    if any(number.published for number in numbers):
        notes.append("in brackets: as published")
    if any(number.value is None and number.begun for number in numbers):
        notes.append(f"{NOT_REACHED} not reached")
    unfinished = [run for run in found.outcomes if not run.finished]
    if unfinished:
        if any(number.begun and number.runs < number.of for number in numbers):
            notes.append("* not all runs of this cell are finished")
        named = [f"{run.name} ({run.done} of {run.rounds} rounds)" for run in unfinished[:MOST_NAMED]]
        more = [f"{len(unfinished) - MOST_NAMED:,} more"] if len(unfinished) > MOST_NAMED else []
        of = f"{len(unfinished):,} of {counted(len(found.outcomes), 'run')}"
        notes.append(f"not finished: {of}: {', '.join([*named, *more])}")
    return notes


def _read_published(file: Path, sweep: str) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Value and deviation by row, column and measure."""
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            rows, head = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(f"cannot read the published numbers in {file}: {e}") from None
    if set(head) != set(PUBLISHED):
        raise ConfigError(f"{file} is no table of {', '.join(PUBLISHED)}: that has to be its first line")
    for number, row in enumerate(rows, 2):
        if set(row) != set(PUBLISHED) or None in row.values():
            raise ConfigError(f"{file}, line {number}: a line has {', '.join(PUBLISHED)}")
        for key in ("value", "std"):
            if not _is_number(row[key], key):
                raise ConfigError(f"{file}, line {number}: {key} is {shortened(repr(row[key]))}, not a number")
    own = [row for row in rows if row["sweep"] == sweep]
    return {(row["row"], row["column"], row["measure"]): (row["value"], row["std"]) for row in own}


def _is_number(text: str, key: str) -> bool:
    """x: a target that was not reached; a deviation may be absent."""
    if text == ("x" if key == "value" else ""):
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
