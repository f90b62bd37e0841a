"""Quadratic losses, for which the values of diagnostics are known."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_dist.algorithms.core import unit_vector
from fl_dist.diagnostics.base import DiagnosticContext
from fl_dist.diagnostics.hessian import Spectrum


class Quadratic:
    """The loss w A w / 2 for every row."""

    def __init__(self, a: Tensor) -> None:
        self.a, self.loss_calls = a.double(), 0

    def loss(self, w: Tensor, rows: int = 0) -> float:
        self.loss_calls += 1
        return float(w @ self.a @ w) / 2

    def gradient(self, w: Tensor, rows: int = 0) -> Tensor:
        return self.a @ w

    def hessian_vector_product(self, w: Tensor, v: Tensor, rows: int = 0) -> Tensor:
        return self.a @ v

    def count(self, rows: int = 0) -> int:
        return rows or 7


class FixedClients:
    """Clients with fixed vectors."""

    def __init__(self, **vectors: list[list[float]]) -> None:
        self.vectors = {name: torch.tensor(rows).double() for name, rows in vectors.items()}

    def mean(self, name: str) -> Tensor:
        return self.vectors[name].mean(0)

    def distances(self, name: str, point: Tensor) -> list[float]:
        return [float((v - point).norm()) for v in self.vectors[name]]

    def chordal_distances(self, name: str, point: Tensor) -> list[float]:
        return [float((unit_vector(v) - unit_vector(point)).norm()) for v in self.vectors[name]]


def quadratic_context(a: Tensor, x: list[float], **changes: Any) -> DiagnosticContext:
    """A diagnostic context on the quadratic loss of `a`."""
    context_fields: dict[str, Any] = dict.fromkeys(field.name for field in fields(DiagnosticContext))
    w = torch.tensor(x).double()
    context_fields |= {
        "x": w,
        "start": w,
        "loss_oracle": Quadratic(a),
        "parameter_views": lambda v: [v],
        "seed": 0,
        "server_lr": 1.0,
    }
    return DiagnosticContext(**(context_fields | changes))


def large_spectrum() -> list[str]:
    """Eigenvalues, in hex, of a problem so large that BLAS splits its vectors among threads."""
    size, context = 60_000, quadratic_context(diagonal(1), [0.0] * 60_000)
    values = torch.from_numpy(np.random.default_rng(0).normal(size=size))
    context.loss_oracle.hessian_vector_product = lambda w, v, rows=0: values * v
    return [float(value).hex() for value in Spectrum(top=3).measure(context)["eigenvalues"]]


def diagonal(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values))
