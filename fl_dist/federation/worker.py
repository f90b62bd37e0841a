"""A worker's part of a round: run its clients, add what they send to the uplink."""

import logging
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fl_dist.algorithms.core import Round
from fl_dist.common.vector_math import float64_norm
from fl_dist.distributed import fault_injection
from fl_dist.distributed.host_transfer import HostTransfer
from fl_dist.distributed.memory import max_state_bytes
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.federation.client_state import ClientStateStore, ReadClient
from fl_dist.federation.downlink import Downlink
from fl_dist.federation.experiment import BUFFERS, UPDATE, Experiment
from fl_dist.federation.gathering import gather_updates
from fl_dist.federation.local_training import (
    DIVERGED_MESSAGE,
    ClientFailedError,
    LocalResult,
    LocalTraining,
    as_client_failure,
)
from fl_dist.federation.trajectory_recorder import TrajectoryRecorder
from fl_dist.federation.uplink import FAILED, TRAINED, ClientReport, OutOfRangeError, Uplink

log = logging.getLogger(__name__)


def build_messages(experiment: Experiment, ranks: int) -> tuple[Downlink, Uplink]:
    """The two messages of a round, as all ranks lay them out."""
    max_cohort, device = experiment.max_cohort, experiment.device
    down = Downlink(experiment.published, experiment.initial_buffers, max_cohort, device)
    sizes, scalars = experiment.upload_sizes(), experiment.scalar_uploads()
    reduce, min_weight = experiment.config.comm.reduce, experiment.min_weight
    return down, Uplink(sizes, max_cohort, reduce, device, min_weight, ranks, scalars)


class ClientResult(NamedTuple):
    """What a client sends, checked."""

    local: LocalResult
    loss: float
    norm: float
    """Length of its update."""


class Worker:
    def __init__(
        self, experiment: Experiment, group: ProcessGroup, saved: ReadClient, spill: Path, transfer: HostTransfer
    ) -> None:
        self.experiment, self.group = experiment, group
        config = experiment.config
        self.training = LocalTraining(
            experiment, experiment.algorithm, experiment.client_data, config.clients.deadline, self._progress
        )
        if config.local.compile and group.rank in group.workers:
            self.training.compile()
        self.states = ClientStateStore(
            experiment.template,
            group.rank,
            group.collectives,
            saved,
            max_state_bytes(config.topology, group.ranks_on_node),
            spill,
            transfer,
        )
        self.recorder: TrajectoryRecorder | None = None
        """Records the round for diagnostics, if some are due."""
        self.updates: dict[int, Tensor] = {}
        """By client, in host memory: those that are gathered instead of added."""

    def _progress(self) -> None:
        self.group.failure_detector.progress()
        fault_injection.point("step")

    def run(self, index: int, assignment: dict[int, int], down: Downlink, up: Uplink) -> None:
        """Train this rank's clients of the round and add them up."""
        up.reset()
        self.updates = {}
        self.states.move(assignment)
        for row, (client, rank) in enumerate(assignment.items()):
            if rank == self.group.rank:
                where = f"round {index + 1}, client {client}"
                with self.group.failure_detector.activity(where):
                    fault_injection.point("local")
                    round_ = self.experiment.round(index, len(assignment), client)
                    up.report_client(row, self._run_client(client, where, round_, down, up))

    def gather(self, assignment: dict[int, int], model: Tensor, up: Uplink) -> Tensor | None:
        """After the reduce, on rank 0 with comm.reduce=gather: the updates of all clients that were trained."""
        if not self.experiment.gathers:
            return None
        fault_injection.point("gather")
        if self.group.rank == 0:
            reports, _ = up.read_reports()
            assignment = {c: rank for (c, rank), r in zip(assignment.items(), reports, strict=False) if r.is_trained}
        return gather_updates(self.updates, assignment, model, self.group)

    def _run_client(self, client: int, where: str, round_: Round, down: Downlink, up: Uplink) -> ClientReport:
        result = self._attempt(client, where, round_, down, up)
        if result is None:
            return ClientReport(status=FAILED)
        if self.recorder is not None:
            self.recorder.end(client)
        local = result.local
        self._add(client, local, up)
        self.states.store(client, local.state)
        return ClientReport(
            status=TRAINED,
            loss=result.loss,
            norm=result.norm,
            seconds=self.training.seconds,  # after reading from the device, which has then done its work
            recording_seconds=self.recorder.seconds if self.recorder is not None else 0.0,
            forwards=local.passes[0],
            backwards=local.passes[1],
            vectors=local.vectors,
        )

    def _attempt(self, client: int, where: str, round_: Round, down: Downlink, up: Uplink) -> ClientResult | None:
        """Local training under the policy for failures; None for a client to leave out."""
        policy = self.experiment.config.clients.on_failure
        for attempt in range(2 if policy == "retry" else 1):
            try:
                return self._train(client, round_, down, up)
            except ClientFailedError as failure:
                if policy == "stop":
                    raise ClientFailedError(f"{where}: {failure}") from failure
                log.warning("%s, attempt %d: %s", where, attempt + 1, failure, exc_info=failure.__cause__)
        return None

    def _train(self, client: int, round_: Round, down: Downlink, up: Uplink) -> ClientResult:
        """Local training whose result can be added, or ClientFailedError, unless the machine failed."""
        state = self.states.load(client) or self.experiment.algorithm.client_init(down.vars, round_)
        with as_client_failure():
            local = self.training.run(client, down.vars, down.buffers, state, round_, self.recorder)
            return self._check_result(local, up)

    def _check_result(self, local: LocalResult, up: Uplink) -> ClientResult:
        """What can be added, or OutOfRangeError. The only time that the host reads from the device for a client."""
        sent = [(UPDATE, local.delta, 1.0), (BUFFERS, local.buffers, 1.0)]
        sent += [(self.experiment.sum_name(name), tensor, factor) for name, (tensor, factor) in local.sent.items()]
        distinct = {id(tensor): tensor for _, tensor, _ in sent if tensor.numel()}
        extremes = [extreme for tensor in distinct.values() for extreme in torch.aminmax(tensor)]
        loss, norm, *read = torch.stack([local.loss, float64_norm(local.delta), *extremes]).tolist()
        if not math.isfinite(loss):
            raise OutOfRangeError(DIVERGED_MESSAGE)
        largest = dict(zip(distinct, map(max, map(abs, read[::2]), map(abs, read[1::2])), strict=True))
        for name, tensor, factor in sent:
            up.check(name, largest.get(id(tensor), 0.0) * abs(factor))
        return ClientResult(local, loss, norm)

    def _add(self, client: int, local: LocalResult, up: Uplink) -> None:
        uploads, weighting = self.experiment.algorithm.uploads, self.experiment.config.server.weighting
        weight = self.experiment.weight(client, weighting)
        if self.experiment.gathers:
            self.updates[client] = local.delta.to("cpu", copy=True)
        else:
            up.add(UPDATE, local.delta, weight)
        if local.buffers.numel():
            up.add(BUFFERS, local.buffers, weight)
        for name, (tensor, factor) in local.sent.items():
            if self.experiment.sum_name(name) == name:
                up.add(name, tensor, factor * (weight if uploads[name].by == "samples" else 1.0))
