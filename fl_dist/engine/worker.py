"""A worker's part of a round: run its clients, add what they send to the uplink."""

import logging
from pathlib import Path

import torch

from fl_dist.common.contract import Mistake
from fl_dist.common.imports import told
from fl_dist.core import Round
from fl_dist.engine.client import ClientFailure, LocalTraining, Trained
from fl_dist.engine.downlink import Downlink
from fl_dist.engine.state import ClientStates, Read
from fl_dist.engine.uplink import OutOfRange, Uplink
from fl_dist.engine.world import BUFFERS, UPDATE, World
from fl_dist.machine import faults
from fl_dist.machine.comm import Comm, Lost

log = logging.getLogger("fl_dist")

TRAINED, FAILED = 1.0, 2.0
"""Status of a client in the uplink's report."""


class Worker:
    def __init__(self, world: World, comm: Comm, saved: Read, spill: Path) -> None:
        self.world, self.comm = world, comm
        config = world.config
        self.training = LocalTraining(
            world.model, world.twin, world.algorithm, world.samples, config.local, config.seed, config.clients.deadline
        )
        self.states = ClientStates(world.template, comm, saved, 1e9 * config.topology.state_memory, spill)
        self.where = "before the first round"
        """What this worker is doing, for the message of a failure."""

    def run(self, index: int, cohort: list[int], assignment: dict[int, int], down: Downlink, up: Uplink) -> None:
        """Train this rank's clients of the round and add them up."""
        up.reset()
        self.where = f"round {index + 1}"
        self.states.move(assignment)
        for row, client in enumerate(cohort):
            if assignment[client] == self.comm.rank:
                self.where = f"round {index + 1}, client {client}"
                faults.point("local")
                self._client(row, client, self.world.round(index, len(cohort), client), down, up)
        self.where = f"round {index + 1}"

    def _client(self, row: int, client: int, r: Round, down: Downlink, up: Uplink) -> None:
        trained = self._attempt(client, r, down, up)
        if trained is None:
            up.report(row, status=FAILED)
            return
        self._add(client, trained, up)
        self.states.store(client, trained.state)
        up.report(
            row,
            status=TRAINED,
            loss=trained.loss,
            seconds=trained.seconds,
            forwards=trained.passes[0],
            backwards=trained.passes[1],
            vectors=trained.vectors,
        )

    def _attempt(self, client: int, r: Round, down: Downlink, up: Uplink) -> Trained | None:
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

    def _train(self, client: int, r: Round, down: Downlink, up: Uplink) -> Trained:
        """Local training whose result can be added, or ClientFailure; a fault of the machine is not the client's."""
        state = self.states.load(client, self.world.device) or self.world.algorithm.client_init(down.vars, r)
        try:
            trained = self.training.run(client, down.vars, down.buffers, state, r)
            up.check(UPDATE, trained.delta, 1.0)
            up.check(BUFFERS, trained.buffers, 1.0)
            for name, (tensor, factor) in trained.sent.items():
                up.check(name, tensor, factor)
        except (ClientFailure, Mistake, Lost, MemoryError, OSError, torch.OutOfMemoryError):
            raise
        except OutOfRange as e:
            raise ClientFailure(str(e)) from None
        except Exception as e:
            raise ClientFailure(told(e)) from e
        return trained

    def _add(self, client: int, trained: Trained, up: Uplink) -> None:
        uploads, weighting = self.world.algorithm.uploads, self.world.config.server.weighting
        own = self.world.weight(client, weighting)
        up.add(UPDATE, trained.delta, own)
        up.add(BUFFERS, trained.buffers, own)
        for name, (tensor, factor) in trained.sent.items():
            up.add(name, tensor, factor * (own if uploads[name].by == "samples" else 1.0))
