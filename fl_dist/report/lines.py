"""Numbers over rounds: of one run, of several seeds together, and with no more points than a screen shows."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from fl_dist.report.gather import Seen, finite
from fl_dist.results.collect import COSTS
from fl_dist.storage.metrics import Row

T = TypeVar("T")
Points = dict[int, float]
"""By round."""
MOST = 2000
"""Points of a learning curve."""
FEWER = 500
"""Points of a line among many small ones."""


class Known:
    """What was computed before, of runs that have not changed since."""

    def __init__(self) -> None:
        self._before: dict[Any, Any] = {}
        self._now: dict[Any, Any] = {}

    def turn(self) -> None:
        """Keep what was asked for since the last turn, and forget the rest."""
        self._before, self._now = self._now, {}

    def of(self, runs: Sequence[Seen], name: str, make: Callable[[], T]) -> T:
        key = name, *((run.outcome.path, run.mark) for run in runs)
        if key not in self._now:
            self._now[key] = self._before[key] if key in self._before else make()
        found: T = self._now[key]
        return found


class Line(NamedTuple):
    """The mean over seeds, and their range."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int


def points(run: Seen, value: Callable[[Row], object], scale: float = 1) -> Points:
    """A number of each row that has it."""
    found = ((row["round"], finite(value(row))) for row in run.rows)
    return {index: scale * value for index, value in found if value is not None}


def over_seeds(seeds: Sequence[Points], most: int = MOST) -> Line | None:
    """Of the rounds that all seeds have, so that the mean is of the same runs everywhere; None: there are none."""
    begun = [seed for seed in seeds if seed]
    if not begun:
        return None
    common = sorted(set.intersection(*(set(seed) for seed in begun)))
    values = [[seed[index] for seed in begun] for index in common]
    line = Line(common, [statistics.fmean(v) for v in values], [*map(min, values)], [*map(max, values)], len(begun))
    return thinned(line, most) if common else None


def thinned(line: Line, most: int) -> Line:
    """At most so many points; of each stretch the lowest and the highest stay, and so do both ends."""
    if len(line.rounds) <= most:
        return _short(line)
    stretches = [range(a, b) for a, b in _stretches(1, len(line.rounds) - 1, (most - 2) // 2)]
    kept: list[tuple[int, range]] = [(0, range(0, 1))]
    for stretch in stretches:
        ends = {min(stretch, key=line.mean.__getitem__), max(stretch, key=line.mean.__getitem__)}
        kept += [(k, stretch) for k in sorted(ends)]
    last = len(line.rounds) - 1
    kept.append((last, range(last, last + 1)))
    return _short(
        Line(
            [line.rounds[k] for k, _ in kept],
            [line.mean[k] for k, _ in kept],
            [min(line.low[s.start : s.stop]) for _, s in kept],
            [max(line.high[s.start : s.stop]) for _, s in kept],
            line.seeds,
        )
    )


def _stretches(begin: int, end: int, many: int) -> list[tuple[int, int]]:
    cuts = [begin + (end - begin) * k // many for k in range(many + 1)]
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]


def _short(line: Line) -> Line:
    mean, low, high = ([float(f"{v:.6g}") for v in values] for values in (line.mean, line.low, line.high))
    return line._replace(mean=mean, low=low, high=high)


def places(runs: Sequence[Seen]) -> dict[str, list[float]]:
    """Where some rounds lie in terms of every cost that is known: the mean over seeds of what was spent until then."""
    begun = [run for run in runs if run.rows]
    if not begun:
        return {}
    common = sorted(set.intersection(*({row["round"] for row in run.rows} for run in begun)))
    if not common:
        return {}
    step = -(-len(common) // FEWER)
    chosen = sorted({*common[::step], *common[-1:]})
    spent = {cost: [_spent(run, cost) for run in begun] for cost in COSTS if cost != "rounds"}
    known = {cost: [s for s in sums if s] for cost, sums in spent.items() if all(sums)}
    return {"rounds": [*map(float, chosen)]} | {
        cost: [float(f"{statistics.fmean(s[index] for s in sums):.6g}") for index in chosen]
        for cost, sums in known.items()
    }


def _spent(run: Seen, cost: str) -> Points | None:
    """What all rounds up to each cost together; None if some row does not say it."""
    total, found = 0.0, {}
    for row in run.rows:
        try:
            total += COSTS[cost](row)
        except (KeyError, TypeError):
            return None
        found[row["round"]] = total
    return found
