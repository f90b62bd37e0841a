"""The server's part of a round: publish, then step with the means of what the clients sent."""

import math

import torch
from torch import Tensor

from fl_dist.core import Upload, Vars
from fl_dist.diagnostics.base import norm
from fl_dist.engine.outcome import Outcome, Report, drift, later, outcome, work
from fl_dist.engine.plan import Speeds, assign
from fl_dist.engine.uplink import Uplink
from fl_dist.engine.worker import TRAINED
from fl_dist.engine.world import BUFFERS, UPDATE, World


class TooFewSurvivors(RuntimeError):
    """A round in which too many clients failed."""


class Diverged(RuntimeError):
    """A server step that cannot be used."""


REMEDY_SERVER = "lower server.lr, or look at the server hooks of the algorithm's parts"


class Server:
    def __init__(self, world: World, workers: list[int]) -> None:
        self.world = world
        self.vars: Vars = world.algorithm.server_init(world.initial.to(world.device))
        self.buffers: Tensor = world.initial_buffers.clone()
        self.update = torch.zeros_like(self.vars.x)
        """The clients' mean update of the last round."""
        self.speeds = Speeds(workers)
        self._workers = workers

    def assign(self, cohort: list[int], home: dict[int, int]) -> dict[int, int]:
        costs = {c: self.world.costs[c] for c in cohort}
        return assign(costs, self._workers, self.speeds.relative(), home)

    def publish(self, index: int, participants: int) -> Vars:
        return self.world.algorithm.publish(self.vars, self.world.round(index, participants))

    def step(
        self, index: int, cohort: list[int], assignment: dict[int, int], reports: list[Report], up: Uplink
    ) -> Outcome:
        """One step with what the cohort's clients sent and reported."""
        told = zip(cohort, reports, strict=False)
        trained = {client: report for client, report in told if report["status"] == TRAINED}
        self._check_survivors(index, list(trained), cohort)
        weights = [self.world.weight(client, self.world.config.server.weighting) for client in trained]
        mean, lr = self._means(weights, up), self.world.config.server.lr
        norms = {"update": norm(self.update)}
        norms["drift"] = drift(weights, [report["norm"] for report in trained.values()], norms["update"])
        update = self.update if lr == 1 else self.update * lr
        method = self.world.algorithm.update(update, self.vars, mean, self.world.round(index, len(trained)))
        norms["model"] = norm(self.vars.x)
        if not math.isfinite(norms["model"]):  # what clients sent was finite
            raise Diverged(f"round {index + 1}: the server step made values that are not finite; {REMEDY_SERVER}")
        workers = work(self._workers, assignment, trained)
        passed = dict.fromkeys(workers, 0)
        for client in trained:
            passed[assignment[client]] += self.world.costs[client]
        for worker, cost in passed.items():
            if cost:
                self.speeds.observe(worker, cost, workers[worker]["busy"])
            else:
                self.speeds.rest(worker)
        held_up = later(workers, assignment, trained)
        return outcome(self.world, index, cohort, trained, workers, held_up, norms, method)

    def _check_survivors(self, index: int, survivors: list[int], cohort: list[int]) -> None:
        least = self.world.config.clients.min_survivors
        if len(survivors) < least:
            raise TooFewSurvivors(
                f"round {index + 1}: {len(survivors)} of {len(cohort)} clients survived, "
                f"clients.min_survivors asks for {least}; the last checkpoint is whole"
            )

    def _means(self, weights: list[float], up: Uplink) -> Vars:
        """Of the uploads; that of the updates goes where the last one was."""
        weight, mean = sum(weights), Vars()
        if self.buffers.numel():
            self.buffers = self.buffers + up.mean(BUFFERS, weight, torch.empty_like(self.buffers))
        up.mean(UPDATE, weight, self.update)
        for name, upload in self.world.algorithm.uploads.items():
            by = weight if upload.by == "samples" else float(len(weights))
            setattr(mean, name, self._mean(name, upload, by, up))
        return mean

    def _mean(self, name: str, upload: Upload, by: float, up: Uplink) -> Tensor:
        if self.world.sum_of(name) == UPDATE:
            return self.update
        if upload.scalar:
            return up.mean(name, by, self.update.new_empty(1)).squeeze(0)
        return up.mean(name, by, torch.empty_like(self.update))
