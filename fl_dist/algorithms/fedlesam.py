"""FedLESAM: Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
Sharpness-aware Minimization, ICML 2024.

    delta = rho u(o_i - x), constant over the round;  r = g(y + delta);  o_i <- x (the model received)
    -S: r = g(y + delta) - c_i + c          -D: r = g(y + delta) + beta h_i + beta (y - x), FedDyn's server

A client's first round has no perturbation (the text's o_i = 0 would perturb along -x). The published code adds one
coordinate of the flat vector to whole tensors, sums per-tensor norms, uses the server's last update (here
`direction: last_update`) and scales the control variate of -S by 0.1; none of that is followed.
"""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Oracle, Part, Round, Uploaded, Vars, algorithm, parts, unit_vector
from fl_dist.algorithms.feddyn import Dual, DualWeight
from fl_dist.algorithms.fedsam import Rho
from fl_dist.algorithms.scaffold import Control, Scaffold

Direction = Annotated[
    Literal["own", "last_update"],
    Field(description="estimate from the client's own last received model, or from the server's last update"),
]


@parts.register
class Lesam(Part):
    """Perturbs along the way the global model has come; one backward pass."""

    role = "evaluation point"

    def __init__(self, *, rho: Rho = 0.01, direction: Direction = "own") -> None:
        self.rho = rho
        if direction == "own":
            self.client = ("old",)
        else:
            self.server = self.published = ("previous",)

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        return {name: x.clone() for name in self.server}

    def client_init(self, s: Vars, r: Round) -> dict[str, Tensor]:
        return {name: s.x.clone() for name in self.client}

    def begin(self, s: Vars, i: Vars, r: Round, full: object) -> None:
        old = i.old if self.client else s.previous
        i.perturbation = unit_vector(old - s.x).mul_(self.rho)

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        return grad(w + i.perturbation)

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
        if self.client:
            i.old.copy_(s.x)
        return {}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        if self.server:
            s.previous.copy_(s.x)
        return delta


@algorithm(paper="Fan et al. 2024")
def fedlesam(*, rho: Rho = 0.01, direction: Direction = "own") -> Algorithm:
    """0.01: the paper on CIFAR."""
    return Algorithm(Lesam(rho=rho, direction=direction))


@algorithm(paper="Fan et al. 2024")
def fedlesam_s(*, rho: Rho = 0.1, direction: Direction = "own", control: Control = "option2") -> Algorithm:
    """0.1: the paper."""
    return Algorithm(Lesam(rho=rho, direction=direction), Scaffold(control=control))


@algorithm(paper="Fan et al. 2024")
def fedlesam_d(*, rho: Rho = 0.1, dual: DualWeight = 0.1, direction: Direction = "own") -> Algorithm:
    """0.1 and 0.1: the paper."""
    return Algorithm(Lesam(rho=rho, direction=direction), Dual(weight=dual))
