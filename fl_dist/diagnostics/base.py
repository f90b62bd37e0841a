"""What a diagnostic is: numbers about a model, the loss around it and the round that made it.

Diagnostics see vectors and functions of vectors; no ranks, no data, no models.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.common.randomness import torch_generator
from fl_dist.common.registry import Registry
from fl_dist.core import Algorithm, Vars

ALL, TEST = 0, -1
"""Rows over which a loss is taken: those of all clients (or so many of them), or the test rows."""

Values = dict[str, Any]
"""By name, numbers or lists of numbers; None is what could not be measured."""
Need = Literal["ends", "steps", "previous step", "walk"]
Radius = Annotated[float, Field(gt=0, description="radius of the perturbation")]
SomeRows = Annotated[
    int | None, Field(ge=1, description="training rows that it is taken over; null: all clients' rows")
]


def of_client(client: int) -> int:
    """The rows of one client."""
    return TEST - 1 - client


class Unmeasurable(ArithmeticError):
    """A loss, gradient or product that is not finite; a method that did not come to an end."""

    def __init__(self, why: str, found: Values | None = None) -> None:
        """`found`: what could be measured all the same."""
        super().__init__(why)
        self.found = found or {}


class Landscape(Protocol):
    """The mean loss, in evaluation mode and without augmentation, as a function of the weights."""

    def loss(self, w: Tensor, rows: int = ALL) -> float: ...
    def gradient(self, w: Tensor, rows: int = ALL) -> Tensor: ...
    def curvature(self, w: Tensor, v: Tensor, rows: int = ALL) -> Tensor:
        """The Hessian at `w` times `v`."""

    def count(self, rows: int = ALL) -> int:
        """How many they are."""

    def clients(self, w: Tensor) -> list[float]:
        """The task's metric of each client, on its own rows."""

    def classes(self, w: Tensor) -> list[float | None]:
        """The accuracy of each class on the test rows; nothing if the task is not to tell the data's classes."""


class Locals(Protocol):
    """The clients that a round trained; vectors of theirs are `end`, and `y0`, `delta0`, ... of the steps of MARKS."""

    @property
    def sizes(self) -> Sequence[int]:
        """Rows of each."""

    def mean(self, name: str) -> Tensor: ...
    def distances(self, name: str, point: Tensor) -> list[float]:
        """Of each client's vector to the point."""

    def chords(self, name: str, point: Tensor) -> list[float]:
        """The distance of each client's vector, scaled to length 1, to the point, likewise: from 0 to 2."""

    def sharpness(self, rho: float) -> list[float]:
        """How much a client's own loss at its end rises within `rho`, by one step along its gradient."""


MARKS = (0.0, 0.5, 1.0)
"""Local steps that are recorded, as shares of a client's way: the first, the middle one, the last."""


@dataclass(frozen=True)
class Moment:
    """What a diagnostic may look at after a round."""

    x: Tensor
    """The new model."""
    start: Tensor
    """The model that the round's clients received."""
    server: Vars
    server_lr: float
    landscape: Landscape
    locals: Locals
    cohort: Sequence[int]
    """The clients of the last round."""
    did: Mapping[str, Tensor]
    """By name, the server's `step` and the clients' mean `update`, if somebody needs them."""
    before: Mapping[str, Tensor]
    """The same of the round before, as far as it is known."""
    pieces: Callable[[Tensor], list[Tensor]]
    """A vector's pieces in the shapes of the parameters."""
    filtered: Sequence[bool]
    """Of each piece, whether it consists of filters: biases and the parameters of normalisations do not."""
    walk: Callable[[Algorithm, int], list[Tensor]]
    """The points on a client's way from the new model, if it were trained by this algorithm."""
    better: Literal["max", "min"]
    """Which of two values of the task's metric."""
    seed: int

    def noise(self, purpose: str, number: int = 0) -> Tensor:
        """Standard normal entries, the same in every round."""
        return self._drawn(torch.randn, purpose, number)

    def signs(self, purpose: str, number: int) -> Tensor:
        """Entries of -1 and 1."""
        return self._drawn(lambda *shape, **k: torch.randint(0, 2, shape, **k).mul_(2).sub_(1), purpose, number)

    def _drawn(self, draw: Callable[..., Tensor], purpose: str, number: int) -> Tensor:
        source, vector = torch_generator(self.seed, f"diagnostics {purpose}", number), torch.zeros_like(self.x)
        for piece in self.pieces(vector):
            piece.copy_(draw(*piece.shape, generator=source))
        return vector


class Diagnostic:
    """One measurement; its keywords are its settings."""

    needs: tuple[Need, ...] = ()
    """What of the round has to be kept for it."""
    algorithms: tuple[str, ...] = ()
    """Settings that hold algorithms by label, each as in a configuration."""
    clients: tuple[str, ...] = ()
    """Settings that name a client."""

    def measure(self, at: Moment) -> Values:
        raise NotImplementedError


diagnostics: Registry[Diagnostic] = Registry("diagnostic", Diagnostic)


class Planned(NamedTuple):
    """A diagnostic of a run, under the label of its configuration."""

    label: str
    every: int
    diagnostic: Diagnostic

    def due(self, index: int) -> bool:
        """After round `index`, counted from 0."""
        return (index + 1) % self.every == 0


def norm(v: Tensor) -> float:
    return float(length(v))


def length(v: Tensor) -> Tensor:
    """‖v‖ in float64, of pieces of the vector that are converted one at a time."""
    if v.numel() <= PIECE:
        return torch.linalg.vector_norm(v, dtype=torch.float64)
    pieces = v.reshape(-1).split(PIECE)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in pieces]))


PIECE = 1 << 18


def mean(values: Sequence[float]) -> float:
    """NaN if they are too large to be added, or infinite with both signs."""
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):
        return math.nan


def deviation(values: Sequence[float]) -> float:
    """As statistics.pstdev, which wants finite numbers, and whose fractions cost more than a step of a small model."""
    centre = mean(values)
    return math.sqrt(mean([(value - centre) * (value - centre) for value in values]))


def cosine(a: Tensor, b: Tensor) -> float:
    """0 if one of them is 0."""
    lengths = norm(a) * norm(b)
    return float(torch.dot(a.double(), b.double())) / lengths if lengths else 0.0


def within(v: Tensor, rho: float) -> Tensor:
    """The nearest point of the ball of radius `rho`."""
    length = norm(v)
    return v if length <= rho else v * (rho / length)
