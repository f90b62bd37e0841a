"""The loss over a plane through the model, along two random directions in the scale of its filters (Li et al. 2018)."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from fl_dist.diagnostics.base import (
    ALL_ROWS,
    TEST_ROWS,
    Diagnostic,
    DiagnosticContext,
    RowCount,
    Values,
    client_rows,
    diagnostics,
    loss_grid,
)


@diagnostics.register
class Surface(Diagnostic):
    """The loss on a grid of the plane of two random directions, each filter of them as long as the model's."""

    clients = ("client",)

    def __init__(
        self,
        *,
        points: Annotated[int, Field(ge=2, le=1001, description="of the grid, in each direction")] = 41,
        span: Annotated[float, Field(gt=0, description="the grid reaches from -span to span")] = 1.0,
        orthogonal: Annotated[bool, Field(description="directions at right angles before they are scaled")] = False,
        on: Annotated[Literal["train", "test"], Field(description="whose loss: the clients' rows or the test rows")] = (
            "train"
        ),
        of: Annotated[
            Literal["global", "local"], Field(description="whose model: the new one, or a client's before averaging")
        ] = "global",
        client: Annotated[
            int | None,
            Field(ge=0, description="its own training loss; null: all clients', or of local one of the round's"),
        ] = None,
        rows: RowCount = None,
    ) -> None:
        self.grid = [span * (2 * k / (points - 1) - 1) for k in range(points)]
        self.orthogonal, self.rows = orthogonal, TEST_ROWS if on == "test" else rows or ALL_ROWS
        self.client, self.is_local = client, of == "local"
        self.needs = ("ends",) if self.is_local else ()

    def measure(self, context: DiagnosticContext) -> Values:
        client, rows = self.client, self.rows
        if self.is_local:
            client = context.cohort[0] if client is None else client
            context = replace(context, x=context.locals.vector("end", client))
        if client is not None and rows != TEST_ROWS:
            rows = client_rows(client)
        a, b = self.directions(context)
        losses = loss_grid(context, a, b, self.grid, self.grid, rows)
        return {"x": self.grid, "y": self.grid, "loss": losses} | ({} if client is None else {"client": client})

    def directions(self, context: DiagnosticContext) -> tuple[Tensor, Tensor]:
        a, b = context.noise("surface", 0), context.noise("surface", 1)
        if self.orthogonal:
            b = b - a * (a.dot(b) / a.dot(a))
        return _scale_filters(context, a), _scale_filters(context, b)


def _scale_filters(context: DiagnosticContext, direction: Tensor) -> Tensor:
    """Each filter as long as the model's; 0 for biases and parameters of normalisations."""
    direction = direction.clone()
    for view, own, has_filters in zip(
        context.parameter_views(direction), context.parameter_views(context.x), context.has_filters, strict=True
    ):
        if not has_filters:
            view.zero_()
            continue
        filters, target = view.flatten(1), own.flatten(1).norm(dim=1, keepdim=True)
        current = filters.norm(dim=1, keepdim=True)
        filters.mul_(target / current.where(current > 0, 1.0))
    return direction
