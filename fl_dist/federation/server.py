"""The server's state, and its part of a round: publish a model, then step with the means of what the clients sent."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fl_dist.algorithms.core import Upload, Vars
from fl_dist.common.errors import FlDistError
from fl_dist.common.vector_math import norm
from fl_dist.federation.experiment import BUFFERS, UPDATE, Experiment
from fl_dist.federation.gathering import weighted_mean
from fl_dist.federation.scheduling import WorkerSpeeds, assign_clients
from fl_dist.federation.uplink import ClientReport, Uplink
from fl_dist.metrics.record import Norms

REMEDY = "lower server.lr, or look at the server hooks of the algorithm's parts"


class TooFewClientsError(FlDistError):
    """Too many clients of a round failed."""


class ServerDivergedError(FlDistError):
    """A server step that cannot be used."""


class ServerStep(NamedTuple):
    """What became of a round on the server."""

    trained: dict[int, ClientReport]
    """Reports of the clients whose updates were used."""
    norms: Norms
    method: dict[str, float]
    """What the algorithm's parts report."""


class Server:
    def __init__(self, experiment: Experiment, workers: list[int], variables: Vars) -> None:
        """`variables`: the algorithm's, before the first round."""
        self.experiment, self.vars = experiment, variables
        self.buffers: Tensor = experiment.initial_buffers.clone()
        self._mean_update = torch.zeros_like(self.vars.x)
        self.update = self._mean_update
        """The clients' mean update of the last round, or what the algorithm used instead."""
        self.speeds = WorkerSpeeds(workers)
        self._workers = workers

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Variables and buffers from a checkpoint; variables that it lacks keep their first values."""
        device = self.experiment.device
        self.buffers = tensors["buffers"].to(device)
        for name in self.experiment.algorithm.server:
            if name in tensors:
                setattr(self.vars, name, tensors[name].to(device))

    def named_model(self) -> dict[str, Tensor]:
        """The global model by parameter name: copies in host memory."""
        model = self.experiment.model
        named = model.named(self.vars.x) | model.buffers.named(self.buffers) | model.saved
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}

    def assign(self, cohort: list[int], owners: dict[int, int]) -> dict[int, int]:
        """Which worker trains which client, in the cohort's order."""
        fixed = self.experiment.client_rows.workers
        if fixed is not None:
            return {client: fixed[client] for client in cohort}
        costs = {client: self.experiment.costs[client] for client in cohort}
        assignment = assign_clients(costs, self._workers, self.speeds.relative(), owners)
        return {client: assignment[client] for client in cohort}

    def publish(self, index: int, participants: int) -> Vars:
        return self.experiment.algorithm.publish(self.vars, self.experiment.round(index, participants))

    def step(
        self,
        index: int,
        assignment: dict[int, int],
        reports: list[ClientReport],
        up: Uplink,
        updates: Tensor | None,
    ) -> ServerStep:
        """One step with what the assigned clients sent and reported; `updates`: those that were gathered."""
        trained = {client: report for client, report in zip(assignment, reports, strict=False) if report.is_trained}
        self._check_survivors(index, len(trained), len(assignment))
        config = self.experiment.config.server
        weights = [self.experiment.weight(client, config.weighting) for client in trained]
        self.update = mean = self._average_updates(weights, up, updates)  # frees that of the last round
        length = norm(mean)
        drift = _drift(weights, [report.norm for report in trained.values()], length)
        round_, algorithm = self.experiment.round(index, len(trained)), self.experiment.algorithm
        self.update = algorithm.aggregate(mean, updates, self.vars, round_)
        length = length if self.update is mean else norm(self.update)
        means = self._means(weights, up)
        rate = self.experiment.server_rate(index)
        update = self.update if rate == 1 else self.update * rate
        method = algorithm.update(update, self.vars, means, round_)
        norms = Norms(update=length, drift=drift, model=norm(self.vars.x))
        if not math.isfinite(norms.model):  # what clients sent was finite
            raise ServerDivergedError(f"round {index + 1}: the server step made values that are not finite; {REMEDY}")
        self._observe_speeds(assignment, trained)
        return ServerStep(trained, norms, method)

    def _observe_speeds(self, assignment: dict[int, int], trained: dict[int, ClientReport]) -> None:
        for worker in self._workers:
            own = [client for client in trained if assignment[client] == worker]
            if own:
                seconds = sum(trained[client].seconds for client in own)
                self.speeds.observe(worker, sum(self.experiment.costs[client] for client in own), seconds)
            else:
                self.speeds.observe_idle(worker)

    def _check_survivors(self, index: int, survivors: int, participants: int) -> None:
        required = {"clients.min_survivors": self.experiment.config.clients.min_survivors}
        required["the algorithm's aggregate"] = self.experiment.algorithm.min_clients
        for who, number in required.items():
            if survivors < number:
                raise TooFewClientsError(
                    f"round {index + 1}: {survivors} of {participants} clients survived, "
                    f"{who} asks for {number}; the last checkpoint is whole"
                )

    def _average_updates(self, weights: list[float], up: Uplink, updates: Tensor | None) -> Tensor:
        """It overwrites that of the last round."""
        if updates is None:
            return up.mean(UPDATE, sum(weights), self._mean_update)
        return self._mean_update.copy_(weighted_mean(updates, weights))

    def _means(self, weights: list[float], up: Uplink) -> Vars:
        """Of the other uploads, and of the buffers."""
        weight, means = sum(weights), Vars()
        if self.buffers.numel():
            self.buffers = self.buffers + up.mean(BUFFERS, weight, torch.empty_like(self.buffers))
        for name, upload in self.experiment.algorithm.uploads.items():
            total = weight if upload.by == "samples" else float(len(weights))
            setattr(means, name, self._mean(name, upload, total, up))
        return means

    def _mean(self, name: str, upload: Upload, weight: float, up: Uplink) -> Tensor:
        if self.experiment.sum_name(name) == UPDATE:
            return self.update
        if upload.scalar:
            return up.mean(name, weight, self.update.new_empty(1)).squeeze(0)
        return up.mean(name, weight, torch.empty_like(self.update))


def _drift(weights: list[float], norms: list[float], mean: float) -> float:
    """Root mean squared distance of the clients' updates, of these lengths, from their mean, of length `mean`."""
    squares = sum(w * norm**2 for w, norm in zip(weights, norms, strict=True)) / sum(weights)
    return math.sqrt(max(0.0, squares - mean**2))
