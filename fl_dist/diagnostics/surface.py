"""The loss over a plane through the model, along two random directions in the scale of its filters (Li et al. 2018)."""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from fl_dist.diagnostics.base import ALL, TEST, Diagnostic, Moment, SomeRows, Values, diagnostics


@diagnostics.register
class Surface(Diagnostic):
    """The loss on a grid of the plane of two random directions, each filter of them as long as the model's."""

    def __init__(
        self,
        *,
        points: Annotated[int, Field(ge=2, le=1001, description="of the grid, in each direction")] = 41,
        span: Annotated[float, Field(gt=0, description="the grid reaches from -span to span")] = 1.0,
        orthogonal: Annotated[bool, Field(description="directions at right angles before they are scaled")] = False,
        on: Annotated[Literal["train", "test"], Field(description="whose loss: the clients' rows or the test rows")] = (
            "train"
        ),
        rows: SomeRows = None,
    ) -> None:
        self.grid = [span * (2 * k / (points - 1) - 1) for k in range(points)]
        self.orthogonal, self.rows = orthogonal, TEST if on == "test" else rows or ALL

    def measure(self, at: Moment) -> Values:
        a, b = self.directions(at)
        losses = [[at.landscape.loss(at.x + a * x + b * y, self.rows) for x in self.grid] for y in self.grid]
        return {"x": self.grid, "y": self.grid, "loss": losses}

    def directions(self, at: Moment) -> tuple[Tensor, Tensor]:
        a, b = at.noise("surface", 0), at.noise("surface", 1)
        if self.orthogonal:
            b = b - a * (a.dot(b) / a.dot(a))
        return _scaled(at, a), _scaled(at, b)


def _scaled(at: Moment, direction: Tensor) -> Tensor:
    """Each filter as long as the model's; nothing along biases and the parameters of normalisations."""
    direction = direction.clone()
    for piece, own, filtered in zip(at.pieces(direction), at.pieces(at.x), at.filtered, strict=True):
        if not filtered:
            piece.zero_()
            continue
        filters, lengths = piece.flatten(1), own.flatten(1).norm(dim=1, keepdim=True)
        present = filters.norm(dim=1, keepdim=True)
        filters.mul_(lengths / present.where(present > 0, 1.0))
    return direction
