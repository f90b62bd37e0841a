"""A worker's part of a round: run its clients, add what they send to the uplink."""

import logging
import math
from pathlib import Path
from typing import NamedTuple

import torch

from fl_dist.common.contract import Mistake
from fl_dist.common.imports import told
from fl_dist.core import Round
from fl_dist.diagnostics.base import length
from fl_dist.engine.client import DIVERGED, ClientFailure, LocalTraining, Trained
from fl_dist.engine.downlink import Downlink
from fl_dist.engine.state import ClientStates, Read
from fl_dist.engine.tape import Tape
from fl_dist.engine.uplink import OutOfRange, Uplink
from fl_dist.engine.world import BUFFERS, UPDATE, World
from fl_dist.machine import breakdown, faults
from fl_dist.machine.comm import Comm, Lost
from fl_dist.machine.copies import Copies

log = logging.getLogger("fl_dist")

TRAINED, FAILED = 1.0, 2.0
"""Status of a client in the uplink's report."""


STOP, HOST, DEVICE = 0, 1, 2
"""Signals of the uplink: who was asked to stop; then, of each rank, its memory on the host and on the device."""


def messages(world: World, ranks: int) -> tuple[Downlink, Uplink]:
    """The two messages of a round, as all ranks lay them out."""
    down = Downlink(world.published(), world.initial_buffers, world.largest, world.device)
    reduce, least = world.config.comm.reduce, world.least_weight
    sizes, numbers = world.upload_sizes(), world.numbers()
    return down, Uplink(sizes, world.largest, reduce, world.device, least, 1 + 2 * ranks, numbers)


class Made(NamedTuple):
    """A client's round that can be added up."""

    trained: Trained
    loss: float
    norm: float
    """Of its update."""


class Worker:
    def __init__(self, world: World, comm: Comm, saved: Read, spill: Path, copies: Copies) -> None:
        self.world, self.comm = world, comm
        config = world.config
        self.training = LocalTraining(
            world.model,
            world.twin,
            world.algorithm,
            world.samples,
            config.local,
            config.seed,
            config.clients.deadline,
            self._tick,
        )
        self.states = ClientStates(world.template, comm, saved, 1e9 * config.topology.state_memory, spill, copies)
        self.tape: Tape | None = None
        """Records the round for diagnostics, if some are due."""
        self.where = "before the first round"
        """What this worker is doing, for the message of a failure."""

    def _tick(self) -> None:
        self.comm.tick()
        faults.point("step")

    def run(self, index: int, cohort: list[int], assignment: dict[int, int], down: Downlink, up: Uplink) -> None:
        """Train this rank's clients of the round and add them up."""
        up.reset()
        self.where = f"round {index + 1}"
        self.states.move(assignment)
        for row, client in enumerate(cohort):
            if assignment[client] == self.comm.rank:
                self.where = f"round {index + 1}, client {client}"
                self.comm.doing(self.where)
                faults.point("local")
                self._client(row, client, self.world.round(index, len(cohort), client), down, up)
        self.where = f"round {index + 1}"
        self.comm.doing("")

    def _client(self, row: int, client: int, r: Round, down: Downlink, up: Uplink) -> None:
        made = self._attempt(client, r, down, up)
        if made is None:
            up.report(row, status=FAILED)
            return
        trained, loss, norm = made
        if self.tape is not None:
            self.tape.end(client)
        self._add(client, trained, up)
        self.states.store(client, trained.state)
        up.report(
            row,
            status=TRAINED,
            loss=loss,
            norm=norm,
            seconds=self.training.seconds,  # after the look: what the device was given is done
            copied=self.tape.seconds if self.tape is not None else 0.0,
            forwards=trained.passes[0],
            backwards=trained.passes[1],
            vectors=trained.vectors,
        )

    def _attempt(self, client: int, r: Round, down: Downlink, up: Uplink) -> Made | None:
        """Local training under the policy for failures; None for a client to leave out."""
        policy = self.world.config.clients.on_failure
        for attempt in range(2 if policy == "retry" else 1):
            try:
                return self._train(client, r, down, up)
            except ClientFailure as failure:
                if policy == "stop":
                    raise ClientFailure(f"{self.where}: {failure}") from failure
                bug = failure.__cause__
                log.warning("%s, attempt %d: %s", self.where, attempt + 1, failure, exc_info=bug)
        return None

    def _train(self, client: int, r: Round, down: Downlink, up: Uplink) -> Made:
        """Local training whose result can be added, or ClientFailure; a fault of the machine is not the client's."""
        state = self.states.load(client) or self.world.algorithm.client_init(down.vars, r)
        try:
            return self._judged(self.training.run(client, down.vars, down.buffers, state, r, self.tape), up)
        except (ClientFailure, Mistake, Lost, OSError):
            raise
        except OutOfRange as e:
            raise ClientFailure(str(e)) from None
        except Exception as e:
            if breakdown.kind(e) is not None:
                raise
            raise ClientFailure(told(e)) from e

    def _judged(self, trained: Trained, up: Uplink) -> Made:
        """What can be added, or OutOfRange. The first and only look at what the device made of the client."""
        sent = [(UPDATE, trained.delta, 1.0), (BUFFERS, trained.buffers, 1.0)]
        sent += [(self.world.sum_of(name), tensor, factor) for name, (tensor, factor) in trained.sent.items()]
        distinct = {id(tensor): tensor for _, tensor, _ in sent if tensor.numel()}
        extremes = [extreme for tensor in distinct.values() for extreme in torch.aminmax(tensor)]
        loss, norm, *read = torch.stack([trained.loss, length(trained.delta), *extremes]).tolist()
        if not math.isfinite(loss):
            raise OutOfRange(DIVERGED)
        largest = dict(zip(distinct, map(max, map(abs, read[::2]), map(abs, read[1::2])), strict=True))
        for name, tensor, factor in sent:
            up.check(name, largest.get(id(tensor), 0.0) * abs(factor))
        return Made(trained, loss, norm)

    def _add(self, client: int, trained: Trained, up: Uplink) -> None:
        uploads, weighting = self.world.algorithm.uploads, self.world.config.server.weighting
        own = self.world.weight(client, weighting)
        up.add(UPDATE, trained.delta, own)
        up.add(BUFFERS, trained.buffers, own)
        for name, (tensor, factor) in trained.sent.items():
            if self.world.sum_of(name) == name:
                up.add(name, tensor, factor * (own if uploads[name].by == "samples" else 1.0))
