"""Which clients take part in a round, and which worker runs which: pure functions."""

import heapq
from collections.abc import Mapping, Sequence

from fl_dist.common.randomness import generator
from fl_dist.config import Clients


def cohort(clients: Clients, schedule: list[list[int]] | None, seed: int, index: int) -> list[int]:
    """The clients of round `index`, in ascending order."""
    if schedule is not None:
        return sorted(schedule[index])
    rng = generator(seed, "cohort", index)
    if clients.sampling == "uniform":
        return sorted(rng.choice(clients.total, clients.per_round, replace=False).tolist())
    while True:
        drawn = rng.random(clients.total) < clients.per_round / clients.total
        if drawn.any():
            return drawn.nonzero()[0].tolist()


def largest_cohort(clients: Clients, schedule: list[list[int]] | None) -> int:
    if schedule is not None:
        return max(map(len, schedule))
    return clients.per_round if clients.sampling == "uniform" else clients.total


def assign(
    costs: Mapping[int, float], workers: Sequence[int], speeds: Mapping[int, float], home: Mapping[int, int]
) -> dict[int, int]:
    """Client -> worker, longest first: to where its state is if that worker has room, else to where it ends soonest."""
    speed, ends = {w: speeds.get(w, 1.0) for w in workers}, dict.fromkeys(workers, 0.0)
    # Workers of one speed wait in one queue: hundreds of workers take no longer than a few.
    queues = {s: [(0.0, w) for w in sorted(workers) if speed[w] == s] for s in dict.fromkeys(speed.values())}
    room = sum(costs.values()) / sum(speed.values()) * (1 + 1e-9)
    placed = {}
    for client in sorted(costs, key=lambda c: (-costs[c], c)):
        cost, best = costs[client], home.get(client, -1)
        if best not in ends or ends[best] + cost / speed[best] > room:
            best = _soonest(cost, queues, ends)
        ends[best] += cost / speed[best]
        heapq.heappush(queues[speed[best]], (ends[best], best))
        placed[client] = best
    return placed


def _soonest(cost: float, queues: dict[float, list[tuple[float, int]]], ends: dict[int, float]) -> int:
    for queue in queues.values():
        while queue[0][0] != ends[queue[0][1]]:  # that worker has been given more since
            heapq.heappop(queue)
    return min((queue[0][0] + cost / speed, queue[0][1]) for speed, queue in queues.items())[1]


class Speeds:
    """Measured speed of each worker (cost a second), smoothed; used to place clients, never for a result."""

    def __init__(self, workers: Sequence[int]) -> None:
        self.values = dict.fromkeys(workers, 1.0)
        self._seen: set[int] = set()

    def observe(self, worker: int, cost: float, seconds: float) -> None:
        measured = cost / max(seconds, 1e-9)
        old = self.values[worker]
        self.values[worker] = 0.7 * old + 0.3 * measured if worker in self._seen else measured
        self._seen.add(worker)

    def rest(self, worker: int) -> None:
        """It had nothing to do. What made it slow may be over, so it comes nearer to the fastest, to be tried again."""
        if worker in self._seen:
            self.values[worker] = 0.7 * self.values[worker] + 0.3 * max(self.values.values())

    def relative(self) -> dict[int, float]:
        """Speeds to one decimal place of the fastest, so that noise does not shuffle clients about."""
        if len(self._seen) < len(self.values):
            return dict.fromkeys(self.values, 1.0)
        top = max(self.values.values())
        return {w: max(round(v / top, 1), 0.1) for w, v in self.values.items()}

    def dump(self) -> dict[str, float]:
        return {str(w): self.values[w] for w in sorted(self._seen)}

    def restore(self, saved: dict[str, float]) -> None:
        """Speeds of before an interruption, for the workers that are still there."""
        for worker, speed in saved.items():
            if int(worker) in self.values:
                self.values[int(worker)] = speed
                self._seen.add(int(worker))
