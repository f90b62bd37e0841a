"""Which clients take part in a round: pure functions of seed and round."""

from fl_dist.common.randomness import generator
from fl_dist.config import Clients


def sample_cohort(clients: Clients, schedule: list[list[int]] | None, seed: int, index: int) -> list[int]:
    """The clients of round `index`, in ascending order."""
    if schedule is not None:
        return sorted(schedule[index])
    rng = generator(seed, "cohort", index)
    if clients.sampling == "uniform":
        return sorted(rng.choice(clients.total, clients.per_round, replace=False).tolist())
    while True:
        is_drawn = rng.random(clients.total) < clients.per_round / clients.total
        if is_drawn.any():
            return is_drawn.nonzero()[0].tolist()


def max_cohort_size(clients: Clients, schedule: list[list[int]] | None) -> int:
    if schedule is not None:
        return max(map(len, schedule))
    return clients.per_round if clients.sampling == "uniform" else clients.total
