"""Numbers of a table: over the last rounds of a run, over the seeds of a cell, and until a target."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_dist.common.reading import ConfigError
from fl_dist.common.words import counted, shortened
from fl_dist.config.sweeps import Also, Table
from fl_dist.results.collect import Collection, Outcome
from fl_dist.tasks import Headline

PUBLISHED = ("sweep", "row", "column", "measure", "value", "std")
NOT_REACHED, NO_RUN, FAILED = "×", "–", "failed"
Published = dict[tuple[str, str, str], tuple[str, str]]
MOST_NAMED = 5
"""Unfinished runs that are named below a table."""


@dataclass(frozen=True)
class Measure:
    """What a column of numbers is."""

    name: str
    """As in a file of published numbers: mean, last, best, rounds@0.8, or what the sweep's table also shows."""
    head: str
    cost: str | None = None
    target: float = 0.0
    also: Also | None = None


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
    over: str = "seeds"
    """What the spread is of: seeds or rounds."""


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
        least = measure.also.best == "min" if measure.also else measure.cost or self.headline.best == "min"
        best = (min if least else max)(known.values())
        return {k for k, value in known.items() if value == best}


def figures(found: Collection, table: Table, costs: Sequence[str], published: Path | None) -> Figures:
    """Every row and column of the runs, by the sweep's table."""
    headline = next((o.headline for o in found.outcomes if o.history), found.outcomes[0].headline)
    if headline.percent and (high := [t for column in found.columns for t in table.targets_of(column) if t > 1]):
        raise ConfigError(f"a target of {high[0]:g} is beyond all: write 0.8 for 80 %")
    numbers = _read_published(published, found.name) if published else {}
    columns = [(c, m) for c in found.columns for m in _measures(table, c, costs, headline)]
    columns = [(c, m) for c, m in columns if not m.also or _has(found, c, m.also, m.name, numbers)]
    rows = [
        (row, [_number(found.at(row, c), m, table, numbers.get((row, c, m.name))) for c, m in columns])
        for row in found.rows
    ]
    return Figures(found.name, headline, columns, rows, _notes(found, table, headline, columns, rows))


def _measures(table: Table, column: str, costs: Sequence[str], headline: Headline) -> list[Measure]:
    reached = [
        Measure(f"{cost}@{target:g}", f"{cost.replace('_', ' ')} to {_target(target, headline)}", cost, target)
        for target in table.targets_of(column)
        for cost in costs
    ]
    besides = [Measure(name, name.replace("_", " "), also=also) for name, also in table.also.items()]
    return [Measure(table.measure, headline.name), *reached, *besides]


def _has(found: Collection, column: str, also: Also, name: str, published: Published) -> bool:
    if also.columns is not None:
        return column in also.columns
    runs = [run for row in found.rows for run in found.at(row, column)]
    return any((row, column, name) in published for row in found.rows) or any(run.numbers(also.key) for run in runs)


def _target(target: float, headline: Headline) -> str:
    return f"{100 * target:g} %" if headline.percent else f"{target:g}"


def _number(runs: Sequence[Outcome], measure: Measure, table: Table, published: tuple[str, str] | None) -> Number:
    finished = [run for run in runs if run.finished]
    begun = [run for run in runs if run.scores]
    counted_runs = finished or begun
    known = [_of_run(run, measure, table) for run in counted_runs]
    values = [value for value in known if value is not None]
    if measure.cost and len(values) < len(known):
        values = []  # a mean over those that reached it would flatter
    over = table.spread or ("rounds" if len(values) == 1 else "seeds")
    spread = statistics.stdev(values) if over == "seeds" and len(values) > 1 else None
    if over == "rounds" and measure.cost is None and measure.also is None:
        spread = _own_spread(counted_runs, table)
    value = statistics.fmean(values) if values else None
    return Number(value, spread, len(finished), len(runs), len(counted_runs), bool(begun), published, over)


def _of_run(run: Outcome, measure: Measure, table: Table) -> float | None:
    if measure.cost is not None:
        reached = first_at(run, measure.target)
        return None if reached is None else run.spent(measure.cost, reached)
    if measure.also is None:
        return final(run, table)
    found = run.numbers(measure.also.key)
    values = [value for value in (found if measure.also.over == "mean" else found[-1:]) if value is not None]
    return statistics.fmean(values) if values else None


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
    """Of runs that are averaged over their last rounds: the deviation of those, as papers with one seed print it."""
    tails = [_tail(run, table) for run in runs if run.scores]
    if table.measure != "mean" or not tails or min(map(len, tails)) < 2:
        return None
    return statistics.fmean(map(statistics.stdev, tails))


def first_at(run: Outcome, target: float) -> int | None:
    """The first evaluated round that reaches the target."""
    better = (lambda score: score >= target) if run.headline.best == "max" else (lambda score: score <= target)
    return next((index for index, score in run.scores if better(score)), None)


def _notes(
    found: Collection,
    table: Table,
    headline: Headline,
    columns: Sequence[tuple[str, Measure]],
    rows: Sequence[tuple[str, list[Number]]],
) -> list[str]:
    shown = [(number, measure) for _, row in rows for number, (_, measure) in zip(row, columns, strict=True)]
    numbers = [number for number, _ in shown]
    notes = [_what(found, table, headline, numbers), *_published_notes(table, shown)]
    if any(_is_missed(number, measure) for number, measure in shown):
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


def _what(found: Collection, table: Table, headline: Headline, numbers: Sequence[Number]) -> str:
    """What the metric is, and what ± is over."""
    seeds = max(len(found.at(row, column)) for row in found.rows for column in found.columns)
    last = sorted({min(table.last or run.last, run.rounds) for run in found.outcomes})
    span = f"the last {counted(last[0], 'round')}" if len(last) == 1 else "the last rounds"
    over = {"mean": f"mean of {span}", "last": "last round", "best": "best round"}[table.measure]
    told = f"{headline.name}{' in %' if headline.percent else ''}: {over}"
    spread = {number.over for number in numbers if number.spread is not None}
    if not spread:
        return told
    kinds = {"seeds": f"{seeds} seeds", "rounds": span}
    mean = ", the mean of those of the seeds" if table.spread == "rounds" and seeds > 1 else ""
    return f"{told}; ± deviation over {' or, of one run, over '.join(kinds[k] for k in kinds if k in spread)}{mean}"


def _published_notes(table: Table, shown: Sequence[tuple[Number, Measure]]) -> list[str]:
    known = [(*number.published, measure) for number, measure in shown if number.published]
    if not known:
        return []
    spread = table.published_spread if any(std for _, std, _ in known) else None
    notes = [f"in brackets: as published{f' (± {spread})' if spread else ''}"]
    if any(value == "x" and measure.cost is None for value, _, measure in known):
        notes.append(f"{FAILED}: training failed there")
    return notes


def _is_missed(number: Number, measure: Measure) -> bool:
    """Whether its cell has the sign of a target that was not reached."""
    published = number.published is not None and number.published[0] == "x"
    return measure.cost is not None and (number.begun and number.value is None or published)


def _read_published(file: Path, sweep: str) -> Published:
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
    """x: a target that was not reached, or training that failed; a deviation may be absent."""
    if text == ("x" if key == "value" else ""):
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
