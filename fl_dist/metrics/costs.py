"""What rounds cost: in bytes, passes or minutes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fl_dist.metrics.record import RoundRecord


class Cost(NamedTuple):
    """A unit in which a round can be paid for."""

    label: str
    """Label of an axis."""
    per_round: Callable[[RoundRecord], float | None]
    """None if the record does not say."""


COSTS = {
    "rounds": Cost("round", lambda record: 1),
    "gigabytes": Cost("sent to and from clients (GB)", lambda record: (record.bytes_down + record.bytes_up) / 1e9),
    "passes": Cost("passes", lambda record: _add(record.forwards, record.backwards)),
    "minutes": Cost("minutes", lambda record: record.seconds.total / 60),
    "local_minutes": Cost("minutes of local training", lambda record: record.seconds.local / 60),
}


def cumulative_costs(records: Sequence[RoundRecord], cost: str) -> dict[int, float]:
    """What the rounds up to each cost together, from round 0 to the first record that does not say."""
    total = 0.0
    totals = {0: total}
    for record in records:
        value = COSTS[cost].per_round(record)
        if value is None:
            break
        total += value
        totals[record.round] = total
    return totals


def _add(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second
