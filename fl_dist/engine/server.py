"""The server's part of a round: publish, then step with the means of what the clients sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_dist.core import Vars
from fl_dist.engine.plan import Speeds, assign
from fl_dist.engine.uplink import Uplink
from fl_dist.engine.worker import TRAINED
from fl_dist.engine.world import BUFFERS, UPDATE, World


class TooFewSurvivors(RuntimeError):
    """A round in which too many clients failed."""


class Diverged(RuntimeError):
    """A server step that cannot be used."""


REMEDY_SERVER = "lower server.lr, or look at the server hooks of the algorithm's parts"


@dataclass(frozen=True)
class Outcome:
    """What a round was, apart from the model it gave."""

    index: int
    survivors: list[int]
    dropped: list[int]
    train_loss: float
    forwards: int
    backwards: int
    bytes_down: int
    bytes_up: int
    local_seconds: float
    reports: dict[str, float]
    """What the parts report."""


class Server:
    def __init__(self, world: World, workers: list[int]) -> None:
        self.world = world
        self.vars: Vars = world.algorithm.server_init(world.initial)
        self.buffers: Tensor = world.initial_buffers.clone()
        self.speeds = Speeds(workers)
        self._workers = workers

    def assign(self, cohort: list[int], home: dict[int, int]) -> dict[int, int]:
        costs = {c: self.world.cost(c) for c in cohort}
        return assign(costs, self._workers, self.speeds.relative(), home)

    def publish(self, index: int, participants: int) -> Vars:
        return self.world.algorithm.publish(self.vars, self.world.round(index, participants))

    def step(self, index: int, cohort: list[int], assignment: dict[int, int], up: Uplink) -> Outcome:
        reports = dict(zip(cohort, up.reports(), strict=False))
        survivors = [c for c in cohort if reports[c]["status"] == TRAINED]
        self._check_survivors(index, survivors, cohort)
        mean, update = self._means(survivors, up)
        update.mul_(self.world.config.server.lr)
        told = self.world.algorithm.update(update, self.vars, mean, self.world.round(index, len(survivors)))
        if not bool(torch.isfinite(self.vars.x.sum())):  # what clients sent was finite
            raise Diverged(f"round {index + 1}: the server step made values that are not finite; {REMEDY_SERVER}")
        return self._outcome(index, cohort, survivors, reports, assignment, told)

    def _check_survivors(self, index: int, survivors: list[int], cohort: list[int]) -> None:
        least = self.world.config.clients.min_survivors
        if len(survivors) < least:
            raise TooFewSurvivors(
                f"round {index + 1}: {len(survivors)} of {len(cohort)} clients survived, "
                f"clients.min_survivors asks for {least}; the last checkpoint is whole"
            )

    def _means(self, survivors: list[int], up: Uplink) -> tuple[Vars, Tensor]:
        x, uploads = self.vars.x, self.world.algorithm.uploads
        total = {by: sum(self.world.weight(c, by) for c in survivors) for by in ("samples", "uniform")}
        weighting = total[self.world.config.server.weighting]
        self.buffers = self.buffers + up.mean(BUFFERS, weighting, self.buffers)
        mean = Vars()
        for name, upload in uploads.items():
            value = up.mean(name, weighting if upload.by == "samples" else total["uniform"], x)
            setattr(mean, name, value.squeeze(0) if upload.scalar else value)
        return mean, up.mean(UPDATE, weighting, x)

    def _outcome(
        self,
        index: int,
        cohort: list[int],
        survivors: list[int],
        reports: dict[int, dict[str, float]],
        assignment: dict[int, int],
        told: dict[str, float],
    ) -> Outcome:
        world, busy = self.world, dict.fromkeys(self._workers, 0.0)
        for client in survivors:
            busy[assignment[client]] += reports[client]["seconds"]
        for worker, seconds in busy.items():
            cost = sum(world.cost(c) for c in survivors if assignment[c] == worker)
            if cost:
                self.speeds.observe(worker, cost, seconds)
        weights = {c: world.weight(c, "samples") for c in survivors}
        vector = world.model.count * self.vars.x.element_size()
        rest = world.model.buffers.size * self.vars.x.element_size()
        down = 1 + len([n for n in world.algorithm.published if getattr(self.vars, n).numel() > 1])
        return Outcome(
            index=index,
            survivors=survivors,
            dropped=[c for c in cohort if c not in weights],
            train_loss=sum(weights[c] * reports[c]["loss"] for c in survivors) / sum(weights.values()),
            forwards=int(sum(reports[c]["forwards"] for c in survivors)),
            backwards=int(sum(reports[c]["backwards"] for c in survivors)),
            bytes_down=len(cohort) * (down * vector + rest),
            bytes_up=sum(int(reports[c]["vectors"]) * vector + rest for c in survivors),
            local_seconds=max(busy.values()),
            reports=told,
        )
