"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.

    r = g(y) + beta h_i + beta (y - x);  h_i <- h_i + (y_K - x)
    h <- h + (1/N) sum_i (y_iK - x);     x <- sum_i p_i y_iK + h

In the multiplier form lambda_i = -beta h_i. FedLESAM's Algorithm 4 mixes the signs and omits the server's shift;
FedGMT's code does not square the proximal term.
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Number, Oracle, Part, Round, Upload, Uploaded, Vars, algorithm, parts

DualWeight = Annotated[float, Field(ge=0, description="beta, weight of the dual term (1/beta in two papers)")]


@parts.register
class Dual(Part):
    """Dual variables h_i, with or without the proximal term; the shift stays outside a server's momentum."""

    server = ("h",)
    client = ("h_i",)
    uploads: ClassVar = {"h": Upload("uniform", message=False, is_update=True)}
    after = ("server optimiser",)
    reports: ClassVar = {"dual_norm": "norm of the server's mean dual variable h"}

    def __init__(
        self,
        *,
        weight: DualWeight = 0.1,
        prox: Annotated[bool, Field(description="also pull towards the received model")] = True,
    ) -> None:
        self.weight, self.prox = weight, prox

    def begin(self, s: Vars, i: Vars, r: Round, full: object) -> None:
        # Both constant terms of the step in one vector: beta (h_i - x) or beta h_i.
        i.linear = torch.sub(i.h_i, s.x) if self.prox else i.h_i

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        g = grad(w).add_(i.linear, alpha=self.weight)
        return g.add_(w, alpha=self.weight) if self.prox else g

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
        i.h_i.add_(delta)
        return {"h": delta}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        s.h.add_(mean.h, alpha=r.participants / r.clients)
        return delta + s.h

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        return {"dual_norm": torch.linalg.vector_norm(s.h)}


@algorithm(paper="Acar et al. 2021")
def feddyn(*, dual: DualWeight = 0.1) -> Algorithm:
    """0.1: FedLESAM and FedGMT (their 1/beta = 10)."""
    return Algorithm(Dual(weight=dual))
