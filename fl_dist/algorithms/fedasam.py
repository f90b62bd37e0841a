"""FedASAM: Caldarola, Caputo, Ciccone, Improving Generalization in FL by Seeking Flat Minima, ECCV 2022.

q = y + rho T^2 g / |T g|,   T = |y| + eta for parameters named "weight", 1 for the others
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Oracle, Round, Vars, algorithm, ascend, parts
from fl_dist.algorithms.fedsam import Rho, Sam

Eta = Annotated[float, Field(ge=0, description="eta, added to the absolute weights of the scale T")]


@parts.register
class Asam(Sam):
    """SAM in a norm that scales with the weights."""

    def __init__(self, *, rho: Rho = 0.7, asam_eta: Eta = 0.2) -> None:
        super().__init__(rho=rho)
        self.eta = asam_eta

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        scale = torch.where(r.is_weight, w.abs() + self.eta, 1.0)
        scaled = grad(w).mul_(scale)
        step = ascend(torch.zeros_like(w), scaled, self.rho)
        return grad(step.mul_(scale).add_(w))


@algorithm(paper="Caldarola et al. 2022")
def fedasam(*, rho: Rho = 0.7, asam_eta: Eta = 0.2) -> Algorithm:
    """The values of Caldarola et al. and FedGF on CIFAR-10."""
    return Algorithm(Asam(rho=rho, asam_eta=asam_eta))
