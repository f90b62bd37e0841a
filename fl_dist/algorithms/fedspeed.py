"""FedSpeed: Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, ICLR 2023.

    q = y + rho u(g(y));  r = (1-alpha) g(y) + alpha g(q) + beta h_i + beta (y - x);  FedDyn's server

The text has the unnormalised ascent q = y + rho g(y) and averages the shift over participants; the published codes
(normalised, alpha = 1, mean over all clients) are followed, the text's first two choices are options.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Oracle, Round, Vars, algorithm, ascend, parts
from fl_dist.algorithms.feddyn import Dual, DualWeight
from fl_dist.algorithms.fedsam import Rho, Sam

Alpha = Annotated[float, Field(ge=0, le=1, description="weight of the gradient at the perturbed point")]
Normalise = Annotated[bool, Field(description="ascend along the unit gradient; off: along the gradient itself")]


@parts.register
class MixedSam(Sam):
    """A mixture of the gradients at the iterate and at the perturbed point."""

    def __init__(self, *, rho: Rho = 0.1, alpha: Alpha = 1.0, normalise: Normalise = True) -> None:
        super().__init__(rho=rho)
        self.alpha, self.normalise = alpha, normalise

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        g = grad(w)
        local = g.clone() if self.alpha < 1 else None
        q = ascend(w, g, self.rho) if self.normalise else torch.add(w, g, alpha=self.rho, out=g)
        perturbed = grad(q)
        return perturbed if local is None else local.lerp_(perturbed, self.alpha)


@algorithm(paper="Sun et al. 2023b")
def fedspeed(*, rho: Rho = 0.1, dual: DualWeight = 0.1, alpha: Alpha = 1.0, normalise: Normalise = True) -> Algorithm:
    """FL-Simulator's values."""
    return Algorithm(MixedSam(rho=rho, alpha=alpha, normalise=normalise), Dual(weight=dual))
