"""What a round was, apart from the model it gave: what its clients reported, added up."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from fl_dist.diagnostics.base import deviation
from fl_dist.engine.world import World

Report = dict[str, float]
"""Of one client; see `uplink.REPORT`."""


@dataclass(frozen=True)
class Outcome:
    index: int
    survivors: list[int]
    dropped: list[int]
    train_loss: float
    forwards: int
    backwards: int
    bytes_down: int
    bytes_up: int
    messages: int
    """Model-sized vectors, down and up."""
    workers: dict[int, dict[str, float]]
    """Of each worker: busy seconds and clients."""
    held_up: float
    """Seconds by which copies for diagnostics made the round longer."""
    spread: dict[str, float]
    """Over the clients of the round."""
    norms: dict[str, float]
    reports: dict[str, float]
    """What the parts report."""


def outcome(
    world: World,
    index: int,
    cohort: list[int],
    trained: dict[int, Report],
    workers: dict[int, dict[str, float]],
    held_up: float,
    norms: dict[str, float],
    told: dict[str, float],
) -> Outcome:
    """`trained`: reports of the clients that were; `workers`: what each did; `told`: what the parts report."""
    weights = [world.weight(client, "samples") for client in trained]
    losses = [report["loss"] for report in trained.values()]
    vectors = int(sum(report["vectors"] for report in trained.values()))
    number = world.model.vector.element_size()
    vector, rest = world.model.count * number, world.model.buffers.size * number
    return Outcome(
        index=index,
        survivors=list(trained),
        dropped=[client for client in cohort if client not in trained],
        train_loss=sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights),
        forwards=int(sum(report["forwards"] for report in trained.values())),
        backwards=int(sum(report["backwards"] for report in trained.values())),
        bytes_down=len(cohort) * (world.vectors_down * vector + rest),
        bytes_up=vectors * vector + len(trained) * rest,
        messages=len(cohort) * world.vectors_down + vectors,
        workers=workers,
        held_up=held_up,
        spread=_spread(losses, [report["norm"] for report in trained.values()]),
        norms=norms,
        reports=told,
    )


def work(ranks: Iterable[int], assignment: dict[int, int], trained: dict[int, Report]) -> dict[int, dict[str, float]]:
    """Of each worker: busy seconds and clients."""
    did = {rank: {"busy": 0.0, "clients": 0} for rank in ranks}
    for client, report in trained.items():
        did[assignment[client]]["busy"] += report["seconds"]
        did[assignment[client]]["clients"] += 1
    return did


def later(workers: dict[int, dict[str, float]], assignment: dict[int, int], trained: dict[int, Report]) -> float:
    """Seconds by which the last of the workers was later for what it copied for diagnostics."""
    ends = {rank: did["busy"] for rank, did in workers.items()}
    for client, report in trained.items():
        ends[assignment[client]] += report["copied"]
    return max(ends.values()) - max(did["busy"] for did in workers.values())


def drift(weights: list[float], norms: list[float], mean: float) -> float:
    """How far the clients' updates lie around their mean of this length: the root of the mean squared distance."""
    squares = sum(w * norm**2 for w, norm in zip(weights, norms, strict=True)) / sum(weights)
    return math.sqrt(max(0.0, squares - mean**2))


def _spread(losses: list[float], norms: list[float]) -> dict[str, float]:
    return {
        "loss_std": deviation(losses),
        "loss_min": min(losses),
        "loss_max": max(losses),
        "norm_mean": statistics.fmean(norms),
        "norm_std": deviation(norms),
    }
