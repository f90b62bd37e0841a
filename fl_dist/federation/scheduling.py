"""Which worker runs which client: pure functions of costs and measured speeds."""

import heapq
from collections.abc import Mapping, Sequence


def assign_clients(
    costs: Mapping[int, float], workers: Sequence[int], speeds: Mapping[int, float], owners: Mapping[int, int]
) -> dict[int, int]:
    """Client -> worker, longest first: where its state is if the balance allows, else where it ends first."""
    speed, ends = {w: speeds.get(w, 1.0) for w in workers}, dict.fromkeys(workers, 0.0)
    # One queue per speed: hundreds of workers take no longer than a few.
    queues = {s: [(0.0, w) for w in sorted(workers) if speed[w] == s] for s in dict.fromkeys(speed.values())}
    room = sum(costs.values()) / sum(speed.values()) * (1 + 1e-9)
    assignment = {}
    for client in sorted(costs, key=lambda c: (-costs[c], c)):
        cost, best = costs[client], owners.get(client, -1)
        if best not in ends or ends[best] + cost / speed[best] > room:
            best = _first_to_finish(cost, queues, ends)
        ends[best] += cost / speed[best]
        heapq.heappush(queues[speed[best]], (ends[best], best))
        assignment[client] = best
    return assignment


def _first_to_finish(cost: float, queues: dict[float, list[tuple[float, int]]], ends: dict[int, float]) -> int:
    for queue in queues.values():
        while queue[0][0] != ends[queue[0][1]]:  # an outdated entry
            heapq.heappop(queue)
    return min((queue[0][0] + cost / speed, queue[0][1]) for speed, queue in queues.items())[1]


class WorkerSpeeds:
    """Measured speed of each worker (cost per second), smoothed; used to assign clients, never for a result."""

    def __init__(self, workers: Sequence[int]) -> None:
        self.values = dict.fromkeys(workers, 1.0)
        self._seen: set[int] = set()

    def observe(self, worker: int, cost: float, seconds: float) -> None:
        measured = cost / max(seconds, 1e-9)
        old = self.values[worker]
        self.values[worker] = 0.7 * old + 0.3 * measured if worker in self._seen else measured
        self._seen.add(worker)

    def observe_idle(self, worker: int) -> None:
        """It had no client, and may no longer be slow: its speed moves towards the fastest, to be tried again."""
        if worker in self._seen:
            self.values[worker] = 0.7 * self.values[worker] + 0.3 * max(self.values.values())

    def relative(self) -> dict[int, float]:
        """Relative to the fastest, rounded to one decimal, so that noise does not move clients."""
        if len(self._seen) < len(self.values):
            return dict.fromkeys(self.values, 1.0)
        top = max(self.values.values())
        return {w: max(round(v / top, 1), 0.1) for w, v in self.values.items()}

    def dump(self) -> dict[str, float]:
        return {str(w): self.values[w] for w in sorted(self._seen)}

    def restore(self, saved: dict[str, float]) -> None:
        """Speeds before an interruption, of the workers that still exist."""
        for worker, speed in saved.items():
            if int(worker) in self.values:
                self.values[int(worker)] = speed
                self._seen.add(int(worker))
