"""FedNSAM: Liu et al., FedNSAM: Consistency of Local and Global Flatness for Federated Learning, ACM MM 2025.

    z = x + lambda m;  r = g(y - rho u(m));  m <- lambda m + d;  x <- x + m

Eq. 7 and Eq. 12 differ in the sign of rho; m points downhill, so the ascent is -u(m). This is "form B"; the paper's
form A starts at x and evaluates at y + lambda m - rho u(m): the same updates without weight decay. The repository's
three versions are none of them Algorithm 1 (its current one is fedsam_nesterov), and its server forgets the old m.
-S, -D and "- Nesterov" (Table 6) are not defined there; in -D the dual shift stays outside m.
"""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Oracle, Part, Round, Vars, algorithm, parts, unit_vector
from fl_dist.algorithms.fedacg import Lookahead, Nesterov
from fl_dist.algorithms.feddyn import Dual, DualWeight
from fl_dist.algorithms.fedopt import ServerMomentum
from fl_dist.algorithms.fedsam import Rho, Sam
from fl_dist.algorithms.scaffold import Control, Scaffold


@parts.register
class MomentumPerturb(Part):
    """Evaluates at y + ahead*m - rho*u(m), m the server's momentum; one backward pass."""

    published = ("m",)
    role = "evaluation point"

    def __init__(
        self,
        *,
        rho: Rho = 0.1,
        ahead: Annotated[float, Field(ge=0, lt=1, description="extrapolation within the local step (form A)")] = 0.0,
    ) -> None:
        self.rho, self.ahead = rho, ahead

    def begin(self, s: Vars, i: Vars, r: Round, full: object) -> None:
        i.perturbation = unit_vector(s.m).mul_(-self.rho).add_(s.m, alpha=self.ahead)

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        return grad(w + i.perturbation)


@algorithm(paper="Liu et al. 2025")
def fedavg_nesterov(*, lookahead: Lookahead = 0.85) -> Algorithm:
    return Algorithm(Nesterov(lookahead=lookahead))


@algorithm(paper="Liu et al. 2025")
def fedsam_nesterov(*, lookahead: Lookahead = 0.85, rho: Rho = 0.05) -> Algorithm:
    """rho 0.05: the published code."""
    return Algorithm(Sam(rho=rho), Nesterov(lookahead=lookahead))


Form = Annotated[Literal["A", "B"], Field(description="extrapolate in the local step (A) or the start (B)")]
Reading = Annotated[
    Literal["i", "ii"],
    Field(description="i: server momentum without extrapolation; ii: no momentum, perturbed by the last update"),
]


@algorithm(paper="Liu et al. 2025")
def fednsam(*, lookahead: Lookahead = 0.85, rho: Rho = 0.1, form: Form = "B") -> Algorithm:
    """0.85 and 0.1: the paper."""
    if form == "A":
        return Algorithm(MomentumPerturb(rho=rho, ahead=lookahead), ServerMomentum(decay=lookahead))
    return Algorithm(MomentumPerturb(rho=rho), Nesterov(lookahead=lookahead))


@algorithm(paper="Liu et al. 2025")
def fednsam_minus_nesterov(*, lookahead: Lookahead = 0.85, rho: Rho = 0.1, reading: Reading = "i") -> Algorithm:
    decay = lookahead if reading == "i" else 0.0
    return Algorithm(MomentumPerturb(rho=rho), ServerMomentum(decay=decay))


@algorithm(paper="Liu et al. 2025")
def fednsam_s(*, lookahead: Lookahead = 0.85, rho: Rho = 0.1, control: Control = "option2") -> Algorithm:
    return Algorithm(MomentumPerturb(rho=rho), Scaffold(control=control), Nesterov(lookahead=lookahead))


@algorithm(paper="Liu et al. 2025")
def fednsam_d(*, lookahead: Lookahead = 0.85, rho: Rho = 0.1, dual: DualWeight = 0.1) -> Algorithm:
    return Algorithm(MomentumPerturb(rho=rho), Nesterov(lookahead=lookahead), Dual(weight=dual))
