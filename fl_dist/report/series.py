"""Numbers over rounds: of one run, of several seeds together, and with no more points than a screen shows."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from fl_dist.metrics.costs import COSTS, cumulative_costs
from fl_dist.metrics.record import RoundRecord
from fl_dist.report.numbers import finite_or_none
from fl_dist.report.run_reader import RunSnapshot

T = TypeVar("T")
Points = dict[int, float]
"""By round."""
MAX_POINTS = 2000
"""Points of a learning curve."""
MAX_POINTS_SMALL = 500
"""Points of a line in a small chart."""


class SeriesCache:
    """What was computed before, of runs that have not changed since."""

    def __init__(self) -> None:
        self._previous: dict[Any, Any] = {}
        self._current: dict[Any, Any] = {}

    def evict(self) -> None:
        """Forget what was not used since the last eviction."""
        self._previous, self._current = self._current, {}

    def get(self, runs: Sequence[RunSnapshot], name: str, compute: Callable[[], T]) -> T:
        key = name, *((run.result.path, run.fingerprint) for run in runs)
        if key not in self._current:
            self._current[key] = self._previous[key] if key in self._previous else compute()
        value: T = self._current[key]
        return value


class Line(NamedTuple):
    """The mean over seeds, and their range."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int


def points(run: RunSnapshot, value: Callable[[RoundRecord], float | None], scale: float = 1) -> Points:
    """A number of each record that has it."""
    numbers = ((record.round, finite_or_none(value(record))) for record in run.records)
    return {index: scale * number for index, number in numbers if number is not None}


def combine_seeds(seeds: Sequence[Points], limit: int = MAX_POINTS) -> Line | None:
    """Mean and range in the rounds that all seeds have, so that every mean is over the same runs; None: no round."""
    seeds = [seed for seed in seeds if seed]
    common = sorted(set.intersection(*map(set, seeds))) if seeds else []
    if not common:
        return None
    values = [[seed[index] for seed in seeds] for index in common]
    line = Line(common, [statistics.fmean(v) for v in values], [*map(min, values)], [*map(max, values)], len(seeds))
    return downsample(line, limit)


def downsample(line: Line, limit: int) -> Line:
    """At most `limit` points: both ends, and of each stretch between them the lowest and the highest."""
    last = len(line.rounds) - 1
    if last < limit:
        return _round_digits(line)
    stretches = [range(a, b) for a, b in _stretches(1, last, (limit - 2) // 2)]
    samples: list[tuple[int, range]] = [(0, range(0, 1))]
    for stretch in stretches:
        ends = {min(stretch, key=line.mean.__getitem__), max(stretch, key=line.mean.__getitem__)}
        samples += [(k, stretch) for k in sorted(ends)]
    samples.append((last, range(last, last + 1)))
    low = [min(line.low[stretch.start : stretch.stop]) for _, stretch in samples]
    high = [max(line.high[stretch.start : stretch.stop]) for _, stretch in samples]
    rounds, mean = [line.rounds[k] for k, _ in samples], [line.mean[k] for k, _ in samples]
    return _round_digits(Line(rounds, mean, low, high, line.seeds))


def _stretches(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    cuts = [start + (stop - start) * k // count for k in range(count + 1)]
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]


def _round_digits(line: Line) -> Line:
    mean, low, high = ([float(f"{v:.6g}") for v in values] for values in (line.mean, line.low, line.high))
    return line._replace(mean=mean, low=low, high=high)


def cost_axes(runs: Sequence[RunSnapshot]) -> dict[str, list[float]]:
    """Some rounds, and for every cost that all records state, what the rounds up to each cost in the mean of seeds."""
    runs = [run for run in runs if run.records]
    common = sorted(set.intersection(*({r.round for r in run.records} for run in runs))) if runs else []
    if not common:
        return {}
    step = -(-len(common) // MAX_POINTS_SMALL)
    rounds = sorted({*common[::step], *common[-1:]})
    axes = {"rounds": [*map(float, rounds)]}
    for cost in COSTS:
        totals = [cumulative_costs(run.records, cost) for run in runs]
        if cost != "rounds" and all(run.result.last_round in total for run, total in zip(runs, totals, strict=True)):
            axes[cost] = [float(f"{statistics.fmean(total[index] for total in totals):.6g}") for index in rounds]
    return axes
