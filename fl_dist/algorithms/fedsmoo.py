"""FedSMOO: Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML 2023.

    s_k = rho u(g(y) - mu_i - s);  mu_i <- mu_i + s_k - s;  r = g(y + s_k) + beta h_i + beta (y - x)
    s <- rho u((1/S) sum_i (mu_i - s_{K-1}));  FedDyn's server

FL-Simulator drops s_{K-1} from the upload and FedGMT's code does not clear the gradient before the first pass;
neither is followed.
"""

from typing import ClassVar

from torch import Tensor

from fl_dist.algorithms.core import (
    Algorithm,
    Oracle,
    Part,
    Round,
    Upload,
    Uploaded,
    Vars,
    algorithm,
    parts,
    unit_vector,
)
from fl_dist.algorithms.feddyn import Dual, DualWeight
from fl_dist.algorithms.fedsam import Rho


@parts.register
class CorrectedSam(Part):
    """A local perturbation held to the global one by dual variables mu_i."""

    server = ("s",)
    client = ("mu_i",)
    published = ("s",)
    uploads: ClassVar = {"s": Upload("uniform")}
    extra_passes = (1, 1)
    role = "evaluation point"

    def __init__(self, *, rho: Rho = 0.1) -> None:
        self.rho = rho

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        i.s_k = unit_vector(grad(w).sub_(i.mu_i).sub_(s.s)).mul_(self.rho)
        i.mu_i.add_(i.s_k).sub_(s.s)
        return grad(w + i.s_k)

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
        return {"s": i.mu_i - i.s_k}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        s.s = unit_vector(mean.s).mul_(self.rho)
        return delta


@algorithm(paper="Sun et al. 2023a")
def fedsmoo(*, rho: Rho = 0.1, dual: DualWeight = 0.1) -> Algorithm:
    """The values of FedLESAM's experiments."""
    return Algorithm(CorrectedSam(rho=rho), Dual(weight=dual))
