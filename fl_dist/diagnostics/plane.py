"""The loss in the plane of a client's local training by several methods (FedGMT, Fig. 6)."""

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from fl_dist.algorithms import build
from fl_dist.common.vector_math import norm, unit_vector
from fl_dist.diagnostics.base import (
    ALL_ROWS,
    Diagnostic,
    DiagnosticContext,
    RowCount,
    Values,
    client_rows,
    diagnostics,
    loss_grid,
)

METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedSAM": {"name": "fedsam"},
    "FedGMT without ADMM": {"parts": [{"trajectory": {}}]},
    "FedGMT": {"name": "fedgmt"},
}
MARGIN = 0.25
"""How far the grid extends beyond the paths, as a fraction of their extent."""


@diagnostics.register_as("plane")
class LocalPathPlane(Diagnostic):
    """Local paths of one client by several methods, and its own loss and all clients' in the plane that they span.

    It passes through the model and the ends of the first and the last method; `rest` is how far a path leaves it.
    """

    needs = ("train_client",)
    algorithms = ("methods",)
    clients = ("client",)

    def __init__(
        self,
        *,
        client: Annotated[int | None, Field(ge=0, description="whose local training; null: one of the round's")] = None,
        methods: Annotated[
            dict[str, dict[str, Any] | str] | None,
            Field(min_length=2, description=f"label: algorithm, as in a configuration; null: {', '.join(METHODS)}"),
        ] = None,
        points: Annotated[int, Field(ge=2, le=1001, description="of the grid, in each direction")] = 21,
        rows: RowCount = None,
    ) -> None:
        self.client, self.points, self.rows = client, points, rows or ALL_ROWS
        self.methods = {
            label: build({"name": algorithm} if isinstance(algorithm, str) else algorithm)
            for label, algorithm in (methods or METHODS).items()
        }

    def measure(self, context: DiagnosticContext) -> Values:
        client = context.cohort[0] if self.client is None else self.client
        paths = {label: context.train_client(algorithm, client) for label, algorithm in self.methods.items()}
        first, *_, last = paths.values()
        u = unit_vector(first[-1] - context.x)
        v = last[-1] - context.x
        v = unit_vector(v - u * u.dot(v))
        projected = {label: _project_path(path, context.x, u, v) for label, path in paths.items()}
        xs, ys = (self._axis([p for path in projected.values() for p in path[axis]]) for axis in ("x", "y"))
        return {
            "x": xs,
            "y": ys,
            "client": client,
            "client_loss": loss_grid(context, u, v, xs, ys, client_rows(client)),
            "global_loss": loss_grid(context, u, v, xs, ys, self.rows),
            "paths": projected,
        }

    def _axis(self, values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        extent = (high - low) or 1.0
        low, high = low - MARGIN * extent, high + MARGIN * extent
        return [low + (high - low) * k / (self.points - 1) for k in range(self.points)]


def _project_path(path: list[Tensor], x: Tensor, u: Tensor, v: Tensor) -> dict[str, Any]:
    """A path's coordinates in the plane, and its largest distance from it."""
    steps = [point - x for point in path]
    coordinates = [(float(u.dot(step)), float(v.dot(step))) for step in steps]
    rests = [norm(step - u * a - v * b) for step, (a, b) in zip(steps, coordinates, strict=True)]
    return {"x": [a for a, _ in coordinates], "y": [b for _, b in coordinates], "rest": max(rests)}
