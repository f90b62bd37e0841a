"""Losses that are quadratic, for diagnostics whose values are then known."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_dist.core import unit
from fl_dist.diagnostics.base import Moment
from fl_dist.diagnostics.hessian import Spectrum


class Quadratic:
    """The loss w A w / 2 of every row."""

    def __init__(self, a: Tensor) -> None:
        self.a, self.asked = a.double(), 0

    def loss(self, w: Tensor, rows: int = 0) -> float:
        self.asked += 1
        return float(w @ self.a @ w) / 2

    def gradient(self, w: Tensor, rows: int = 0) -> Tensor:
        return self.a @ w

    def curvature(self, w: Tensor, v: Tensor, rows: int = 0) -> Tensor:
        return self.a @ v

    def count(self, rows: int = 0) -> int:
        return rows or 7


class Few:
    """Clients whose vectors are given."""

    def __init__(self, **vectors: list[list[float]]) -> None:
        self.vectors = {name: torch.tensor(of).double() for name, of in vectors.items()}

    def mean(self, name: str) -> Tensor:
        return self.vectors[name].mean(0)

    def distances(self, name: str, point: Tensor) -> list[float]:
        return [float((v - point).norm()) for v in self.vectors[name]]

    def chords(self, name: str, point: Tensor) -> list[float]:
        return [float((unit(v) - unit(point)).norm()) for v in self.vectors[name]]


def on(a: Tensor, x: list[float], **given: Any) -> Moment:
    """A moment on the quadratic of `a`."""
    known: dict[str, Any] = dict.fromkeys(field.name for field in fields(Moment))
    w = torch.tensor(x).double()
    known |= {"x": w, "start": w, "landscape": Quadratic(a), "pieces": lambda v: [v], "seed": 0, "server_lr": 1.0}
    return Moment(**(known | given))


def large_spectrum() -> list[str]:
    """Of a problem whose vectors a BLAS divides among its threads, to the last bit."""
    size, at = 60_000, on(diagonal(1), [0.0] * 60_000)
    values = torch.from_numpy(np.random.default_rng(0).normal(size=size))
    at.landscape.curvature = lambda w, v, rows=0: values * v
    return [float(value).hex() for value in Spectrum(top=3).measure(at)["eigenvalues"]]


def diagonal(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values))
