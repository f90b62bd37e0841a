"""How the loss changes around the model: the worst of a ball, the mean of a cloud, along a line."""

import statistics
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fl_dist.core import unit
from fl_dist.diagnostics.base import ALL, Diagnostic, Moment, Radius, SomeRows, Values, diagnostics, norm, within


@diagnostics.register
class Sharpness(Diagnostic):
    """How much the loss of all clients rises within a ball: max F(w + d) - F(w), |d| <= rho, by steps of ascent."""

    def __init__(
        self,
        *,
        rho: Radius = 0.05,
        steps: Annotated[int, Field(ge=1, le=1000, description="of projected ascent; the best of them counts")] = 1,
        rows: SomeRows = None,
    ) -> None:
        self.rho, self.steps, self.rows = rho, steps, rows or ALL

    def measure(self, at: Moment) -> Values:
        gradient = at.landscape.gradient(at.x, self.rows)
        loss = at.landscape.loss(at.x, self.rows)
        highest = max(at.landscape.loss(at.x + d, self.rows) for d in self._ascent(at, gradient))
        return {"sharpness": highest - loss, "loss": loss, "gradient_norm": norm(gradient), "rho": self.rho}

    def _ascent(self, at: Moment, gradient: Tensor) -> Iterator[Tensor]:
        d = unit(gradient) * self.rho
        yield d
        for _ in range(self.steps - 1):
            d = within(d + unit(at.landscape.gradient(at.x + d, self.rows)) * self.rho, self.rho)
            yield d


@diagnostics.register
class Lpf(Diagnostic):
    """The mean loss in a Gaussian cloud around the model (Bisla et al. 2022): E F(w + e), e ~ N(0, sigma^2)."""

    def __init__(
        self,
        *,
        sigma: Annotated[float, Field(gt=0, description="deviation of each entry")] = 0.01,
        samples: Annotated[int, Field(ge=1, le=10**6, description="points of the cloud")] = 100,
        rows: SomeRows = None,
    ) -> None:
        self.sigma, self.samples, self.rows = sigma, samples, rows or ALL

    def measure(self, at: Moment) -> Values:
        clouds = (at.x + at.noise("lpf", k) * self.sigma for k in range(self.samples))
        losses = [at.landscape.loss(w, self.rows) for w in clouds]
        return {"lpf": statistics.fmean(losses), "loss": at.landscape.loss(at.x, self.rows)}


@diagnostics.register
class Along(Diagnostic):
    """The loss at growing distances from the model: the mean over random directions, and along the gradient."""

    def __init__(
        self,
        *,
        reach: Annotated[float, Field(gt=0, description="the largest distance")] = 15.0,
        points: Annotated[int, Field(ge=2, le=10**4, description="distances, from 0 on")] = 16,
        directions: Annotated[int, Field(ge=1, le=10**4, description="random directions")] = 5,
        rows: SomeRows = None,
    ) -> None:
        self.radii = [reach * k / (points - 1) for k in range(points)]
        self.directions, self.rows = directions, rows or ALL

    def measure(self, at: Moment) -> Values:
        gradient, here = unit(at.landscape.gradient(at.x, self.rows)), at.landscape.loss(at.x, self.rows)
        lines = [self._line(at, unit(at.noise("along", k))) for k in range(self.directions)]
        means = [statistics.fmean(losses) for losses in zip(*lines, strict=True)]
        return {"radii": self.radii, "random": [here, *means], "gradient": [here, *self._line(at, gradient)]}

    def _line(self, at: Moment, direction: Tensor) -> list[float]:
        return [at.landscape.loss(at.x + direction * r, self.rows) for r in self.radii[1:]]
