"""The record of a round: what its clients, ranks and server report, added up."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from fl_dist.common.vector_math import standard_deviation
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.round_timer import RoundTimes
from fl_dist.federation.server import ServerStep
from fl_dist.federation.uplink import ClientReport, RankReport
from fl_dist.metrics.record import NOT_EVALUATED, RoundRecord, Seconds, Spread, WorkerRecord


class PendingRecord:
    """The record of the last round, until callbacks see it: built when first needed, mostly while others train."""

    def __init__(self, round_number: int, build: Callable[[], RoundRecord]) -> None:
        self.round, self._build = round_number, build

    @cached_property
    def record(self) -> RoundRecord:
        return self._build()


@dataclass
class WorkerLoad:
    """What one worker did in the round."""

    busy: float = 0.0
    clients: int = 0
    recording: float = 0.0
    """Seconds in which it copied vectors for diagnostics."""


def worker_loads(
    workers: list[int], assignment: dict[int, int], trained: dict[int, ClientReport]
) -> dict[int, WorkerLoad]:
    loads = {rank: WorkerLoad() for rank in workers}
    for client, report in trained.items():
        load = loads[assignment[client]]
        load.busy += report.seconds
        load.clients += 1
        load.recording += report.recording_seconds
    return loads


def recording_delay(loads: dict[int, WorkerLoad]) -> float:
    """Seconds by which copies for diagnostics made the round longer."""
    return max(load.busy + load.recording for load in loads.values()) - max(load.busy for load in loads.values())


def build_record(
    experiment: Experiment,
    index: int,
    assignment: dict[int, int],
    step: ServerStep,
    workers: list[int],
    ranks: list[RankReport],
    times: RoundTimes,
    ended_at: float,
) -> RoundRecord:
    """The record of a round that has not been evaluated yet."""
    trained, reports = step.trained, step.trained.values()
    loads = worker_loads(workers, assignment, trained)
    seconds = times.to_seconds(max(load.busy for load in loads.values()), recording_delay(loads))
    weights = [experiment.weight(client, "samples") for client in trained]
    losses, norms = [report.loss for report in reports], [report.norm for report in reports]
    messages = int(sum(report.vectors for report in reports))
    bytes_per_number = experiment.model.vector.element_size()
    vector, buffers = experiment.model.count * bytes_per_number, experiment.model.buffers.size * bytes_per_number
    return RoundRecord(
        round=index + 1,
        time=round(ended_at, 3),
        test=NOT_EVALUATED,
        train_loss=sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights),
        clients=len(trained),
        dropped=[client for client in assignment if client not in trained],
        bytes_down=len(assignment) * (experiment.vectors_per_download * vector + buffers),
        bytes_up=len(trained) * (experiment.update_bytes + buffers) + (messages - len(trained)) * vector,
        messages=len(assignment) * experiment.vectors_per_download + messages,
        forwards=int(sum(report.forwards for report in reports)),
        backwards=int(sum(report.backwards for report in reports)),
        lr=experiment.local_rate(index),
        server_lr=experiment.server_rate(index),
        method=step.method,
        spread=Spread(
            loss_std=standard_deviation(losses),
            loss_min=min(losses),
            loss_max=max(losses),
            norm_mean=statistics.fmean(norms),
            norm_std=standard_deviation(norms),
        ),
        norms=step.norms,
        seconds=seconds,
        workers={str(rank): _worker_record(loads.get(rank), report, seconds) for rank, report in enumerate(ranks)},
    )


def _worker_record(load: WorkerLoad | None, report: RankReport, seconds: Seconds) -> WorkerRecord:
    memory = {"memory": report.host_memory, "device_memory": report.device_memory or None}
    if load is None:
        return WorkerRecord(**memory)
    return WorkerRecord(busy=load.busy, clients=load.clients, share=round(load.busy / seconds.total, 6), **memory)
