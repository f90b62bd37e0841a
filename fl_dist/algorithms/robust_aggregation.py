"""Aggregates of the clients' updates that a few wrong ones cannot move far; each needs all updates.

median and trimmed_mean: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
    each entry's median over the m updates; its mean without the floor(b m) largest and smallest values, at least one
krum: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.
    the mean of the k updates of lowest score: the sum of the m-f-2 smallest squared distances to others; m > 2f+2

All updates have equal weights; of equal scores, that of the lower client id comes first.
"""

import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Part, Round, Vars, parts
from fl_dist.common.vector_math import norm

ROUNDING = 1e-9
"""A product such as 0.29 * 100 is a little less than the integer that it stands for."""
COLUMNS = 1 << 16
"""Entries that are sorted at a time: a sorted copy of all updates would be larger than the updates."""


class RobustAggregate(Part):
    """`combine` is the rule."""

    role = "aggregate"
    needs = ("all updates",)

    def aggregate(self, delta: Tensor, updates: Tensor | None, s: Vars, r: Round) -> Tensor:
        assert updates is not None  # the configuration was checked
        return self.combine(updates).to(delta.device)

    def combine(self, updates: Tensor) -> Tensor:
        """One vector from [clients, entries]."""
        raise NotImplementedError


@parts.register
class Median(RobustAggregate):
    """The median of each entry over the clients' updates."""

    def combine(self, updates: Tensor) -> Tensor:
        m = len(updates)
        return _mean_of_sorted(updates, (m - 1) // 2, m // 2 + 1)


@parts.register_as("trimmed_mean")
class TrimmedMean(RobustAggregate):
    """The mean of each entry without its largest and smallest values."""

    def __init__(
        self,
        *,
        share: Annotated[
            float, Field(gt=0, lt=0.5, description="b, of the updates that is left out at each end")
        ] = 0.1,
    ) -> None:
        self.share, self.min_clients = share, math.ceil(1 / share - ROUNDING)

    def combine(self, updates: Tensor) -> Tensor:
        m = len(updates)
        cut = math.floor(self.share * m + ROUNDING)
        return _mean_of_sorted(updates, cut, m - cut)


@parts.register
class Krum(RobustAggregate):
    """The update, or the mean of several, that is nearest to most others."""

    def __init__(
        self,
        *,
        byzantine: Annotated[int, Field(ge=0, description="f, wrong updates that a round may have")] = 1,
        keep: Annotated[int, Field(ge=1, description="k, updates whose mean is used (more than 1: Multi-Krum)")] = 1,
    ) -> None:
        self.byzantine, self.keep = byzantine, keep
        self.min_clients = max(2 * byzantine + 3, byzantine + keep)

    def combine(self, updates: Tensor) -> Tensor:
        nearest = len(updates) - self.byzantine - 2
        scores = [sum(sorted(row)[1 : nearest + 1]) for row in _squared_distances(updates)]
        best = sorted(sorted(range(len(updates)), key=scores.__getitem__)[: self.keep])
        return torch.cat([columns[best].double().mean(0) for columns in updates.split(COLUMNS, 1)]).to(updates.dtype)


def _mean_of_sorted(updates: Tensor, first: int, end: int) -> Tensor:
    """Of each entry, the mean of the values from place `first` on, without that of place `end`."""
    # numpy sorts columns several times faster than torch.
    kept = (torch.from_numpy(np.sort(columns.numpy(), axis=0)[first:end]) for columns in updates.split(COLUMNS, 1))
    return torch.cat([values.double().mean(0) for values in kept]).to(updates.dtype)


def _squared_distances(updates: Tensor) -> list[list[float]]:
    table = [[0.0] * len(updates) for _ in updates]
    for i, first in enumerate(updates):
        for j, second in enumerate(updates[:i]):
            table[i][j] = table[j][i] = norm(first - second) ** 2
    return table
