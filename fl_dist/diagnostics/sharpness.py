"""The loss around the model: its maximum in a ball, its mean under Gaussian noise, its values along lines."""

import statistics
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fl_dist.common.vector_math import norm, unit_vector
from fl_dist.diagnostics.base import (
    ALL_ROWS,
    Diagnostic,
    DiagnosticContext,
    Radius,
    RowCount,
    Values,
    diagnostics,
    project_to_ball,
)


@diagnostics.register
class Sharpness(Diagnostic):
    """How much all clients' loss rises within a ball: max F(w + d) - F(w), |d| <= rho, by steps of ascent."""

    def __init__(
        self,
        *,
        rho: Radius = 0.05,
        steps: Annotated[int, Field(ge=1, le=1000, description="of projected ascent; the best of them counts")] = 1,
        rows: RowCount = None,
    ) -> None:
        self.rho, self.steps, self.rows = rho, steps, rows or ALL_ROWS

    def measure(self, context: DiagnosticContext) -> Values:
        oracle, x = context.loss_oracle, context.x
        gradient, loss = oracle.gradient(x, self.rows), oracle.loss(x, self.rows)
        maximum = max(oracle.loss(x + d, self.rows) for d in self._ascend(context, gradient))
        return {"sharpness": maximum - loss, "loss": loss, "gradient_norm": norm(gradient), "rho": self.rho}

    def _ascend(self, context: DiagnosticContext, gradient: Tensor) -> Iterator[Tensor]:
        d = unit_vector(gradient) * self.rho
        yield d
        for _ in range(self.steps - 1):
            gradient = context.loss_oracle.gradient(context.x + d, self.rows)
            d = project_to_ball(d + unit_vector(gradient) * self.rho, self.rho)
            yield d


@diagnostics.register
class Lpf(Diagnostic):
    """The mean loss under Gaussian noise on the weights (Bisla et al. 2022): E F(w + e), e ~ N(0, sigma^2)."""

    def __init__(
        self,
        *,
        sigma: Annotated[float, Field(gt=0, description="deviation of each entry")] = 0.01,
        samples: Annotated[int, Field(ge=1, le=10**6, description="points of the cloud")] = 100,
        rows: RowCount = None,
    ) -> None:
        self.sigma, self.samples, self.rows = sigma, samples, rows or ALL_ROWS

    def measure(self, context: DiagnosticContext) -> Values:
        points = (context.x + context.noise("lpf", k) * self.sigma for k in range(self.samples))
        losses = [context.loss_oracle.loss(w, self.rows) for w in points]
        return {"lpf": statistics.fmean(losses), "loss": context.loss_oracle.loss(context.x, self.rows)}


@diagnostics.register_as("along")
class LossAlongDirections(Diagnostic):
    """The loss at growing distances from the model: the mean over random directions, and along the gradient."""

    def __init__(
        self,
        *,
        reach: Annotated[float, Field(gt=0, description="the largest distance")] = 15.0,
        points: Annotated[int, Field(ge=2, le=10**4, description="distances, from 0 on")] = 16,
        directions: Annotated[int, Field(ge=1, le=10**4, description="random directions")] = 5,
        rows: RowCount = None,
    ) -> None:
        self.radii = [reach * k / (points - 1) for k in range(points)]
        self.directions, self.rows = directions, rows or ALL_ROWS

    def measure(self, context: DiagnosticContext) -> Values:
        oracle = context.loss_oracle
        gradient, loss = unit_vector(oracle.gradient(context.x, self.rows)), oracle.loss(context.x, self.rows)
        lines = [self._line(context, unit_vector(context.noise("along", k))) for k in range(self.directions)]
        means = [statistics.fmean(losses) for losses in zip(*lines, strict=True)]
        return {"radii": self.radii, "random": [loss, *means], "gradient": [loss, *self._line(context, gradient)]}

    def _line(self, context: DiagnosticContext, direction: Tensor) -> list[float]:
        return [context.loss_oracle.loss(context.x + direction * r, self.rows) for r in self.radii[1:]]
