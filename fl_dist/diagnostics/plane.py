"""The plane in which a client's local training goes, by several methods from one model (FedGMT, Fig. 6)."""

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from fl_dist.algorithms import build
from fl_dist.core import unit
from fl_dist.diagnostics.base import ALL, Diagnostic, Moment, Need, SomeRows, Values, diagnostics, norm, of_client

METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedSAM": {"name": "fedsam"},
    "FedGMT without ADMM": {"parts": [{"trajectory": {}}]},
    "FedGMT": {"name": "fedgmt"},
}
MARGIN = 0.25
"""By which the grid reaches beyond the paths, as a share of their extent."""


@diagnostics.register
class Plane(Diagnostic):
    """Local paths of one client by several methods, and the losses, its own and that of all, in the plane they span.

    Through the model and the ends of the first and of the last method; `rest` is how far a path leaves it.
    """

    needs: tuple[Need, ...] = ("walk",)
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
        rows: SomeRows = None,
    ) -> None:
        self.client, self.points, self.rows = client, points, rows or ALL
        self.methods = {
            label: build({"name": given} if isinstance(given, str) else given)
            for label, given in (methods or METHODS).items()
        }

    def measure(self, at: Moment) -> Values:
        client = at.cohort[0] if self.client is None else self.client
        paths = {label: at.walk(algorithm, client) for label, algorithm in self.methods.items()}
        first, *_, last = paths.values()
        u = unit(first[-1] - at.x)
        v = last[-1] - at.x
        v = unit(v - u * u.dot(v))
        told = {label: _followed(path, at.x, u, v) for label, path in paths.items()}
        xs, ys = (self._axis([p for path in told.values() for p in path[axis]]) for axis in ("x", "y"))
        return {
            "x": xs,
            "y": ys,
            "client": client,
            "client_loss": self._losses(at, u, v, xs, ys, of_client(client)),
            "global_loss": self._losses(at, u, v, xs, ys, self.rows),
            "paths": told,
        }

    def _losses(self, at: Moment, u: Tensor, v: Tensor, xs: list[float], ys: list[float], rows: int) -> Any:
        return [[at.landscape.loss(at.x + u * x + v * y, rows) for x in xs] for y in ys]

    def _axis(self, values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        extent = (high - low) or 1.0
        low, high = low - MARGIN * extent, high + MARGIN * extent
        return [low + (high - low) * k / (self.points - 1) for k in range(self.points)]


def _followed(path: list[Tensor], x: Tensor, u: Tensor, v: Tensor) -> dict[str, Any]:
    """A path's places in the plane, and how far it goes from it."""
    steps = [point - x for point in path]
    places = [(float(u.dot(step)), float(v.dot(step))) for step in steps]
    rests = [norm(step - u * a - v * b) for step, (a, b) in zip(steps, places, strict=True)]
    return {"x": [a for a, _ in places], "y": [b for _, b in places], "rest": max(rests)}
