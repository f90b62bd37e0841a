"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

    r = g(y) + lambda (y - x)

The published FedNSAM code adds this term without a gradient; here it acts.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Oracle, Part, Round, Vars, algorithm, parts

Pull = Annotated[float, Field(ge=0, description="lambda, pull towards the received model")]


@parts.register
class Prox(Part):
    """Adds weight*(y - z), z the received model."""

    def __init__(self, *, weight: Pull = 0.1) -> None:
        self.weight = weight

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        return grad(w).add_(w, alpha=self.weight).sub_(s.x, alpha=self.weight)


@algorithm(paper="Li et al. 2020")
def fedprox(*, prox: Pull = 0.1) -> Algorithm:
    """0.1: FedLESAM's experiments."""
    return Algorithm(Prox(weight=prox))
