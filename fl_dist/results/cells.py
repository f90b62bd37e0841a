"""One number of a table: over the last rounds of a run, over the seeds of a cell, or until a target."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fl_dist.config.sweep_file import ExtraColumn, TableSettings
from fl_dist.metrics.summary import last_scores
from fl_dist.results.run_result import RunResult

NOT_REACHED, NO_RUN, FAILED = "×", "–", "failed"


@dataclass(frozen=True)
class Measure:
    """What the numbers of a column are."""

    name: str
    """As in a file of published numbers: mean, last, best, rounds@0.8, or what the sweep's table also shows."""
    head: str
    cost: str | None = None
    target: float | None = None
    """The cost is that of reaching it; None: of the whole run."""
    extra: ExtraColumn | None = None

    @property
    def is_score(self) -> bool:
        return self.cost is None and self.extra is None


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
    if over == "rounds" and measure.is_score:
        spread = _spread_over_rounds(counted, table)
    value = statistics.fmean(values) if values else None
    return Number(value, spread, len(finished), len(runs), bool(with_scores), published, over)


def _value(run: RunResult, measure: Measure, table: TableSettings) -> float | None:
    if measure.cost is not None:
        last = run.last_round if measure.target is None else first_round_reaching(run, measure.target)
        return None if last is None else run.costs_until([last], measure.cost)[0]
    if measure.extra is None:
        return final_score(run, table)
    numbers, over = run.numbers(measure.extra.key), measure.extra.over
    if over == "final_window":
        numbers = run.numbers(measure.extra.key, after=run.start_of_window(table.final_window))
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
