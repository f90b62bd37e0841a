"""The base of diagnostics: numbers about a model, the loss around it and the round that led to it.

Diagnostics see vectors and functions of vectors; no ranks, no data, no models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Vars
from fl_dist.common.errors import FlDistError
from fl_dist.common.randomness import torch_generator
from fl_dist.common.registry import Registry
from fl_dist.common.vector_math import norm

ALL_ROWS, TEST_ROWS = 0, -1
"""The rows of a loss: all clients' training rows, or the test rows; a positive number is a sample of that size."""

Values = dict[str, Any]
"""Numbers or lists of numbers by name; None if it could not be measured."""
Requirement = Literal["ends", "steps", "previous step", "train_client", "validation rows"]
Radius = Annotated[float, Field(gt=0, description="radius of the perturbation")]
RowCount = Annotated[int | None, Field(ge=1, description="number of training rows; null: all clients' rows")]


def client_rows(client: int) -> int:
    """The `rows` argument that means those of one client."""
    return TEST_ROWS - 1 - client


class FineTuning(NamedTuple):
    """Plain SGD of clients, each from the same model on its own training rows."""

    epochs: int
    steps: int
    """The first so many of these epochs; 0: all."""
    lr: float
    """0: `local.lr`."""
    sample: int
    """Number of clients, sampled by the seed; 0: all that hold rows out."""


class MeasurementError(FlDistError, ArithmeticError):
    """A loss, gradient or product that is not finite, or a method that did not converge."""

    def __init__(self, reason: str, partial_values: Values | None = None) -> None:
        super().__init__(reason)
        self.partial_values = partial_values or {}


class LossOracle(Protocol):
    """The mean loss, in evaluation mode and without augmentation, as a function of the weights."""

    def loss(self, w: Tensor, rows: int = ALL_ROWS) -> float:
        """The mean loss at `w`. `rows` is ALL_ROWS, TEST_ROWS, `client_rows(client)` or the size of a sample."""

    def gradient(self, w: Tensor, rows: int = ALL_ROWS) -> Tensor:
        """Of the mean loss at `w`."""

    def hessian_vector_product(self, w: Tensor, v: Tensor, rows: int = ALL_ROWS) -> Tensor:
        """The Hessian at `w` times `v`."""

    def count(self, rows: int = ALL_ROWS) -> int:
        """The number of rows."""

    def clients(self, w: Tensor, on_validation: bool) -> list[float]:
        """The task's primary metric of each client, on its validation rows if there are any, or its training rows."""

    def fine_tune(self, w: Tensor, settings: FineTuning) -> tuple[list[float], list[float]]:
        """The task's primary metric of each client on its validation rows: of `w`, and of its own model from there."""

    def classes(self, w: Tensor) -> list[float | None]:
        """The accuracy of each class on the test rows; empty unless the task predicts the data's classes."""


class LocalModels(Protocol):
    """The clients that a round trained; their vectors are `end`, and `y0`, `delta0`, ... of the recorded steps."""

    @property
    def sizes(self) -> Sequence[int]:
        """The number of rows of each client."""

    def mean(self, name: str) -> Tensor:
        """Of the clients' vectors, with equal weights."""

    def vector(self, name: str, client: int) -> Tensor:
        """Of one client, which the round trained."""

    def distances(self, name: str, point: Tensor) -> list[float]:
        """Of each client's vector from the point."""

    def chordal_distances(self, name: str, point: Tensor) -> list[float]:
        """Of each client's vector from the point, both scaled to length 1: from 0 to 2."""

    def sharpness(self, rho: float) -> list[float]:
        """By how much each client's own loss rises from its end by a step of `rho` along its gradient."""


RECORDED_STEP_FRACTIONS = (0.0, 0.5, 1.0)
"""The local steps that are recorded, as fractions of a client's steps: the first, the middle one, the last."""


@dataclass(frozen=True)
class DiagnosticContext:
    """What a diagnostic can use after a round."""

    x: Tensor
    """The new model."""
    start: Tensor
    """The model that the round's clients received."""
    server: Vars
    """The server's variables."""
    server_lr: float
    """The factor on the mean update in the last round."""
    loss_oracle: LossOracle
    """Losses and their derivatives at any weights."""
    locals: LocalModels
    """What the clients of the round trained."""
    cohort: Sequence[int]
    """The clients of the last round."""
    last_step: Mapping[str, Tensor]
    """The server's `step` and the clients' mean `update`, if a diagnostic needs them."""
    previous_step: Mapping[str, Tensor]
    """The same of the round before, if known."""
    parameter_views: Callable[[Tensor], list[Tensor]]
    """Views of a vector in the shapes of the parameters."""
    has_filters: Sequence[bool]
    """Whether each parameter consists of filters; biases and parameters of normalisations do not."""
    train_client: Callable[[Algorithm, int], list[Tensor]]
    """The points of a client's local training from the new model, by this algorithm."""
    best_is: Literal["max", "min"]
    """Which values of the task's primary metric are better."""
    seed: int
    """Of the configuration."""

    def noise(self, purpose: str, number: int = 0) -> Tensor:
        """Standard normal entries, the same in every round."""
        return self._sample(torch.randn, purpose, number)

    def signs(self, purpose: str, number: int) -> Tensor:
        """Entries of -1 and 1."""
        return self._sample(lambda *shape, **k: torch.randint(0, 2, shape, **k).mul_(2).sub_(1), purpose, number)

    def _sample(self, draw: Callable[..., Tensor], purpose: str, number: int) -> Tensor:
        rng, vector = torch_generator(self.seed, f"diagnostics {purpose}", number), torch.zeros_like(self.x)
        for view in self.parameter_views(vector):
            view.copy_(draw(*view.shape, generator=rng))
        return vector


class Diagnostic:
    """One measurement; the keywords of `__init__` are its settings."""

    needs: tuple[Requirement, ...] = ()
    """What has to be recorded of the round, and what else has to be there."""
    algorithms: tuple[str, ...] = ()
    """Settings that hold algorithms by label, as in a configuration."""
    clients: tuple[str, ...] = ()
    """Settings that name a client."""

    def measure(self, context: DiagnosticContext) -> Values:
        """Numbers, or lists of numbers, by name; None for what could not be measured."""
        raise NotImplementedError


diagnostics: Registry[Diagnostic] = Registry("diagnostic", Diagnostic)


class ScheduledDiagnostic(NamedTuple):
    """A diagnostic of a run with its label."""

    label: str
    every: int
    diagnostic: Diagnostic

    def is_due(self, index: int) -> bool:
        """After round `index`, counted from 0."""
        return (index + 1) % self.every == 0


def cosine(a: Tensor, b: Tensor) -> float:
    """0 if one of them is 0."""
    norms = norm(a) * norm(b)
    return float(torch.dot(a.double(), b.double())) / norms if norms else 0.0


def project_to_ball(v: Tensor, rho: float) -> Tensor:
    """The nearest point of the ball of radius `rho`."""
    length = norm(v)
    return v if length <= rho else v * (rho / length)


def loss_grid(
    context: DiagnosticContext, u: Tensor, v: Tensor, xs: Sequence[float], ys: Sequence[float], rows: int
) -> list[list[float]]:
    """The loss at w + x*u + y*v, one list per y."""
    return [[context.loss_oracle.loss(context.x + u * x + v * y, rows) for x in xs] for y in ys]
