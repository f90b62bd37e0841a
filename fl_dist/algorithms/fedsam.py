"""FedSAM and MoFedSAM: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.

FedSAM:    q = y + rho u(g(y));  r = g(q)                       on the same batch
MoFedSAM:  r = beta g(q) + (1-beta) D;  D <- -sum_i p_i d_i/(eta K_i)

Eq. 3's sign() is an error (Eq. 4 is meant), both algorithms print a stale server step, and MoFedSAM's server would
move by the step-sized D; here the server averages, and K counts steps.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Oracle, Part, Round, Vars, algorithm, ascend, parts
from fl_dist.algorithms.fedcm import ClientMomentum, Mix

Rho = Annotated[float, Field(ge=0, description="rho, radius of the perturbation (one L2 norm over all parameters)")]


@parts.register
class Sam(Part):
    """The gradient at the worst point within rho, to first order."""

    extra_passes = (1, 1)
    role = "evaluation point"

    def __init__(self, *, rho: Rho = 0.05) -> None:
        self.rho = rho

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        return grad(ascend(w, grad(w), self.rho))


@algorithm(paper="Qu et al. 2022")
def fedsam(*, rho: Rho = 0.05) -> Algorithm:
    """0.05: FedGMT's and FedNSAM's experiments; Qu et al. use 0.5, FedLESAM 0.01, FedGF 0.02 to 0.1."""
    return Algorithm(Sam(rho=rho))


@algorithm(paper="Qu et al. 2022")
def mofedsam(*, rho: Rho = 0.1, mix: Mix = 0.1) -> Algorithm:
    """0.1 and 0.1: FedLESAM's experiments; Qu et al. use rho 0.5."""
    return Algorithm(Sam(rho=rho), ClientMomentum(mix=mix))
