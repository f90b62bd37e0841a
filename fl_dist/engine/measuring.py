"""Diagnostics of a round, on rank 0: what they may look at, what they found."""

import logging
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_dist.common.contract import Mistake, what
from fl_dist.config import ConfigError
from fl_dist.core import Algorithm, Part
from fl_dist.diagnostics import Planned
from fl_dist.diagnostics.base import Moment, Need, Unmeasurable, Values
from fl_dist.engine.client import DIVERGED, ClientFailure, LocalTraining
from fl_dist.engine.flat import Flat
from fl_dist.engine.landscape import Landscape
from fl_dist.engine.server import Server
from fl_dist.engine.tape import Way
from fl_dist.engine.world import World

log = logging.getLogger("fl_dist")
SAVED = "diagnostics."
"""Before the names of a trail's tensors among those of a save."""
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


class Trail:
    """What the last round and the one before did to the model: tensors by name."""

    def __init__(self, last: dict[str, Tensor] | None = None) -> None:
        self.last, self.before = last or {}, dict[str, Tensor]()

    def add(self, **did: Tensor) -> None:
        self.last, self.before = did, self.last

    def tensors(self) -> dict[str, Tensor]:
        """For a save."""
        return {f"{SAVED}{name}": tensor.cpu().clone() for name, tensor in self.last.items()}


def taken_out(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """What a save has of a trail, taken out of its tensors."""
    names = [name for name in tensors if name.startswith(SAVED)]
    return {name.removeprefix(SAVED): tensors.pop(name).to(device) for name in names}


def needed(diagnostics: Iterable[Planned]) -> set[Need]:
    """What has to be kept for them."""
    return {need for planned in diagnostics for need in planned.diagnostic.needs}


def moment(world: World, server: Server, landscape: Landscape, start: Tensor, trail: Trail, index: int) -> Moment:
    """After a round whose clients received `start`; `index` is that of the next one."""
    return Moment(
        x=server.vars.x,
        start=start,
        server=server.vars,
        server_lr=world.config.server.lr,
        landscape=landscape,
        locals=landscape,
        cohort=landscape.trained or world.cohort(max(0, index - 1)),
        did=trail.last,
        before=trail.before,
        pieces=world.model.views,
        filtered=_filtered(world.model),
        walk=lambda algorithm, client: walked(world, server, landscape, algorithm, client, index),
        better=world.task.headline.best,
        seed=world.config.seed,
    )


def _filtered(model: Flat) -> list[bool]:
    norms = {name for name, module in model.module.named_modules() if isinstance(module, NORMS)}
    named = zip(model.names, model.params, strict=True)
    return [p.dim() > 1 and name.rpartition(".")[0] not in norms for name, p in named]


def walked(
    world: World, server: Server, landscape: Landscape, algorithm: Algorithm, client: int, index: int
) -> list[Tensor]:
    """Some points on a client's way from the server's model.

    Variables of the parts that the run's algorithm also has are the run's, its server's and this client's; others new.
    """
    if client >= world.config.clients.total:
        raise ConfigError(
            f"there is no client {client} to be trained: the last one is {world.config.clients.total - 1}"
        )
    s, r = algorithm.server_init(server.vars.x), world.round(index, 1, client)
    known = {name for part in algorithm.parts for name in part.server if _has(world.algorithm, part)}
    vars(s).update({name: v for name, v in vars(server.vars).items() if name in known})
    s = algorithm.publish(s, r)
    state, own = algorithm.client_init(s, r), landscape.variables(client)
    known = {name for part in algorithm.parts for name in part.client if _has(world.algorithm, part)}
    vars(state).update({name: v.to(world.device, copy=True) for name, v in own.items() if name in known})
    path, local, seed = Way(r.steps), world.config.local, world.config.seed
    training = LocalTraining(world.model, world.twin, algorithm, world.samples, local, seed)
    try:
        trained = training.run(client, s, server.buffers, state, r, path)
    finally:
        training.close()
    if not math.isfinite(trained.loss):
        raise ClientFailure(DIVERGED)
    return path.points


def _has(algorithm: Algorithm, part: Part) -> bool:
    """Whether it has a part of this kind, whose variables then mean the same."""
    return any(type(own) is type(part) for own in algorithm.parts)


def measured(due: Iterable[Planned], at: Moment, round_: int) -> dict[str, Values]:
    """By label, what the diagnostics found; what is not finite is None."""
    found: dict[str, Values] = {}
    for label, _, diagnostic in due:
        try:
            values = diagnostic.measure(at)
        except (Unmeasurable, ClientFailure) as e:
            log.warning("round %d: %s could not be measured: %s", round_, label, e)
            values = e.found if isinstance(e, Unmeasurable) else {}
        if not isinstance(values, dict):
            raise Mistake(f"diagnostic {label} gave {what(values)}; numbers by name")
        found[label] = {name: _plain(value, label, name) for name, value in values.items()}
    return found


def _plain(value: Any, label: str, name: str) -> Any:
    """Numbers as a file holds them; None for one that is not finite."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner, label, name) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, label, name) for inner in value]
    if value is not None and not isinstance(value, Real):
        raise Mistake(f"diagnostic {label} gave {what(value)} as {name}; numbers or lists of numbers")
    return value if value is None or math.isfinite(value) else None
