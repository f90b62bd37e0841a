"""Diagnostics of a round, on rank 0: what they may look at, and their values as plain data."""

import logging
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_dist.algorithms.core import Algorithm, Part
from fl_dist.common.hook_contract import HookContractError, describe_value
from fl_dist.config import ConfigError
from fl_dist.diagnostics import ScheduledDiagnostic
from fl_dist.diagnostics.base import DiagnosticContext, MeasurementError, Requirement, Values
from fl_dist.federation.flat_model import FlatModel
from fl_dist.federation.local_training import DIVERGED_MESSAGE, ClientFailedError, LocalTraining
from fl_dist.federation.loss_oracle import LossOracle
from fl_dist.federation.server import Server
from fl_dist.federation.trajectory_recorder import Trajectory
from fl_dist.optimizers.base import PREFIX

log = logging.getLogger(__name__)
SAVED = "diagnostics."
"""Prefix of the step history's tensors in a checkpoint."""
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


class StepHistory:
    """What the last two rounds did to the model: by name, the server's step and the clients' mean update."""

    def __init__(self, last: dict[str, Tensor] | None = None) -> None:
        self.last, self.previous = last or {}, dict[str, Tensor]()

    def add(self, **tensors: Tensor) -> None:
        self.last, self.previous = tensors, self.last

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {f"{SAVED}{name}": tensor.cpu().clone() for name, tensor in self.last.items()}


def pop_step_history(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Remove from a checkpoint's tensors what belongs to the step history, and return it."""
    names = [name for name in tensors if name.startswith(SAVED)]
    return {name.removeprefix(SAVED): tensors.pop(name).to(device) for name in names}


def requirements_of(diagnostics: Iterable[ScheduledDiagnostic]) -> set[Requirement]:
    """What training has to record for them."""
    return {need for scheduled in diagnostics for need in scheduled.diagnostic.needs}


def diagnostic_context(
    server: Server, loss_oracle: LossOracle, start: Tensor, history: StepHistory, index: int
) -> DiagnosticContext:
    """After a round whose clients received `start`; `index` is that of the next one."""
    experiment = server.experiment
    return DiagnosticContext(
        x=server.vars.x,
        start=start,
        server=server.vars,
        server_lr=experiment.server_rate(max(0, index - 1)),
        loss_oracle=loss_oracle,
        locals=loss_oracle,
        cohort=loss_oracle.trained or experiment.cohort(max(0, index - 1)),
        last_step=history.last,
        previous_step=history.previous,
        parameter_views=experiment.model.views,
        has_filters=_has_filters(experiment.model),
        train_client=lambda algorithm, client: train_client(server, loss_oracle, algorithm, client, index),
        best_is=experiment.task.primary_metric.best,
        seed=experiment.config.seed,
    )


def _has_filters(model: FlatModel) -> list[bool]:
    norms = {name for name, module in model.module.named_modules() if isinstance(module, NORMS)}
    named = zip(model.names, model.params, strict=True)
    return [p.dim() > 1 and name.rpartition(".")[0] not in norms for name, p in named]


def train_client(
    server: Server, loss_oracle: LossOracle, algorithm: Algorithm, client: int, index: int
) -> list[Tensor]:
    """Some points on a client's trajectory from the server's model.

    Variables of the optimiser and of the parts that the run's algorithm also has are the run's, its server's and this
    client's; others are new.
    """
    experiment = server.experiment
    if client >= experiment.config.clients.total:
        raise ConfigError(
            f"there is no client {client} to be trained: the last one is {experiment.config.clients.total - 1}"
        )
    if experiment.client_rows.workers is not None:
        raise ConfigError(f"client {client} cannot be trained on rank 0: its rows are only on its worker")
    s, r = algorithm.server_init(server.vars.x), experiment.round(index, 1, client)
    known = {name for part in algorithm.parts for name in part.server if _has_part(experiment.algorithm, part)}
    vars(s).update({name: v for name, v in vars(server.vars).items() if name in known})
    s = algorithm.publish(s, r)
    state, own = algorithm.client_init(s, r), loss_oracle.client_variables(client)
    known = {name for part in algorithm.parts for name in part.client if _has_part(experiment.algorithm, part)}
    known |= {name for name in own if name.startswith(PREFIX)}
    vars(state).update({name: v.to(experiment.device, copy=True) for name, v in own.items() if name in known})
    trajectory, training = Trajectory(r.steps), LocalTraining(experiment, algorithm, experiment.client_data)
    try:
        result = training.run(client, s, server.buffers, state, r, trajectory)
    finally:
        training.close()
    if not math.isfinite(result.loss):
        raise ClientFailedError(DIVERGED_MESSAGE)
    return trajectory.points


def _has_part(algorithm: Algorithm, part: Part) -> bool:
    """Whether it has a part of this kind, whose variables then mean the same."""
    return any(type(own) is type(part) for own in algorithm.parts)


def run_diagnostics(due: Iterable[ScheduledDiagnostic], context: DiagnosticContext, round_: int) -> dict[str, Values]:
    """Values by label; what is not finite is None."""
    measured: dict[str, Values] = {}
    for label, _, diagnostic in due:
        try:
            values = diagnostic.measure(context)
        except (MeasurementError, ClientFailedError) as e:
            log.warning("round %d: %s could not be measured: %s", round_, label, e)
            values = e.partial_values if isinstance(e, MeasurementError) else {}
        if not isinstance(values, dict):
            raise HookContractError(f"diagnostic {label} gave {describe_value(values)}; numbers by name")
        measured[label] = {name: _plain(value, label, name) for name, value in values.items()}
    return measured


def _plain(value: Any, label: str, name: str) -> Any:
    """Numbers as a file holds them; None for one that is not finite."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner, label, name) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, label, name) for inner in value]
    if value is not None and not isinstance(value, Real):
        raise HookContractError(
            f"diagnostic {label} gave {describe_value(value)} as {name}; numbers or lists of numbers"
        )
    return value if value is None or math.isfinite(value) else None
