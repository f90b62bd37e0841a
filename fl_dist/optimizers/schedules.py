"""Schedules of learning rates: round by round, a factor on the rate.

With T rounds after the warm-up, of which t have passed:
    constant 1;  exponential decay^t;  step decay^(milestones until t);
    cosine end + (1-end)(1 + cos(pi t/T))/2;  linear 1 + (end-1) t/T
In round k = 0, ..., W-1 of a warm-up of W rounds the factor is (k+1)/W.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from numbers import Real
from typing import Annotated, Any

from pydantic import Field

from fl_dist.common.errors import ConfigError, describe_error
from fl_dist.common.formatting import shorten
from fl_dist.common.hook_contract import HookContractError
from fl_dist.common.registry import Registry

Schedule = Callable[[int], float]
Rate = Callable[[int], float]
"""The learning rate as a function of the round's number, from 0."""
schedules: Registry[Schedule] = Registry("schedule", Callable, ("rounds", "lr_decay"))

Decay = Annotated[float, Field(gt=0, le=1)]
End = Annotated[float, Field(ge=0, le=1, description="factor at the end of the run")]
Milestone = Annotated[int, Field(ge=1)]


@schedules.register
def constant() -> Schedule:
    """The same rate in every round."""
    return lambda t: 1.0


@schedules.register
def exponential(
    lr_decay: float | None,
    *,
    decay: Annotated[
        Decay | None, Field(description="factor after each round (default of local.schedule: local.lr_decay)")
    ] = None,
) -> Schedule:
    """decay^t after t rounds."""
    factor = lr_decay if decay is None else decay
    if factor is None:
        raise ConfigError("exponential needs its decay here, such as {name: exponential, decay: 0.99}")
    return lambda t: factor**t


@schedules.register
def step(
    *,
    decay: Annotated[Decay, Field(description="factor at each milestone")] = 0.1,
    milestones: Annotated[
        list[Milestone] | None, Field(description="rounds after which the rate falls, in increasing order")
    ] = None,
    every: Annotated[int | None, Field(ge=1, description="instead of milestones: rounds between two falls")] = None,
) -> Schedule:
    """Lower at certain rounds, counted from the end of the warm-up."""
    if every is not None and milestones is None:
        return lambda t: decay ** (t // every)
    if milestones is None or every is not None:
        raise ConfigError("step needs either milestones, such as [100, 150], or every")
    if milestones != sorted(set(milestones)):
        raise ConfigError(f"milestones must increase, got {shorten(milestones)}")
    return lambda t: decay ** bisect_right(milestones, t)


@schedules.register
def cosine(rounds: int, *, end: End = 0.0) -> Schedule:
    """Half a cosine over all rounds, as torch's CosineAnnealingLR."""
    return lambda t: end + (1 - end) * (1 + math.cos(math.pi * t / rounds)) / 2


@schedules.register
def linear(rounds: int, *, end: End = 0.0) -> Schedule:
    """A straight line over all rounds, as torch's LinearLR."""
    return lambda t: 1 + (end - 1) * t / rounds


def depends_on_rounds(section: dict[str, Any]) -> bool:
    """Whether the rate of a round depends on how many follow."""
    return "rounds" in schedules.takes(section["name"])


def build_rate(lr: float, section: dict[str, Any], rounds: int, lr_decay: float | None = None) -> Rate:
    """From `{name: ..., warmup: ..., settings}`; `lr_decay` is what exponential decays by."""
    name, warmup = section["name"], section.get("warmup", 0)
    if warmup > rounds:
        raise ConfigError(f"a warm-up of {warmup} rounds does not fit into rounds={rounds}; lower warmup")
    settings = {key: value for key, value in section.items() if key not in ("name", "warmup")}
    schedule = schedules.build(name, settings, rounds=rounds - warmup, lr_decay=lr_decay)
    # A diagnostic after the last round trains with the rate of the next one.
    last = rounds - 1 if depends_on_rounds(section) else None

    def rate(index: int) -> float:
        t = index if last is None else min(index, last)
        return lr * ((t + 1) / warmup if t < warmup else _factor(name, schedule, t - warmup))

    return rate


def _factor(name: str, schedule: Schedule, t: int) -> float:
    try:
        factor = schedule(t)
    except Exception as e:
        raise HookContractError(f"schedule {name} failed for t={t}: {describe_error(e)}") from e
    if not isinstance(factor, Real) or not math.isfinite(factor) or factor < 0:
        raise HookContractError(f"schedule {name} gave {shorten(repr(factor))} for t={t}, not a number from 0")
    return factor
