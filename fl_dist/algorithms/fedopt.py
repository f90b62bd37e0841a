"""Server optimisers: what the server does with the mean update.

FedAvgM: Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019.
    m <- beta m + d;  x <- x + m          (undamped, as in all published codes)
FedAdam: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    m <- b1 m + (1-b1) d;  v <- b2 v + (1-b2) d^2;  x <- x + eta_g m/(sqrt(v)+tau);  v_0 = tau^2, no bias correction
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Number, Part, Round, Vars, algorithm, parts

Decay = Annotated[float, Field(ge=0, lt=1, description="beta, share of the old momentum that stays")]
Decay2 = Annotated[float, Field(ge=0, le=1, description="decay of the second moment")]
ServerLr = Annotated[float, Field(gt=0, description="eta_g, the server's rate")]
Tau = Annotated[float, Field(gt=0, description="adaptivity: added to the root; v starts at its square")]


@parts.register
class ServerMomentum(Part):
    """m <- beta*m + delta; x <- x + m."""

    server = ("m",)
    role = "server optimiser"
    reports: ClassVar = {"momentum_norm": "norm of the server's momentum m"}

    def __init__(self, *, decay: Decay = 0.9) -> None:
        self.decay = decay

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        s.m.mul_(self.decay).add_(delta)
        return s.m

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        return {"momentum_norm": torch.linalg.vector_norm(s.m)}


@parts.register
class ServerAdam(Part):
    """Adam on the mean update."""

    server = ("m", "v")
    role = "server optimiser"
    reports: ClassVar = {"server_rate": "mean over the entries of eta_g/(sqrt(v)+tau), what m is multiplied by"}

    def __init__(self, *, server_lr: ServerLr = 0.1, beta1: Decay = 0.9, beta2: Decay2 = 0.99, tau: Tau = 0.01) -> None:
        self.lr, self.beta1, self.beta2, self.tau = server_lr, beta1, beta2, tau

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(x), "v": torch.full_like(x, self.tau**2)}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        s.m.lerp_(delta, 1 - self.beta1)
        s.v.lerp_(delta.square(), 1 - self.beta2)
        return self.lr * s.m / (s.v.sqrt() + self.tau)

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        return {"server_rate": (self.lr / (s.v.sqrt() + self.tau)).mean()}


@algorithm(paper="Hsu et al. 2019")
def fedavgm(*, server_momentum: Decay = 0.9) -> Algorithm:
    """0.9: FedNSAM's code and FedGF's grid."""
    return Algorithm(ServerMomentum(decay=server_momentum))


@algorithm(paper="Reddi et al. 2021")
def fedadam(*, server_lr: ServerLr = 0.1, beta1: Decay = 0.9, beta2: Decay2 = 0.99, tau: Tau = 0.01) -> Algorithm:
    """The values of FedLESAM's experiments."""
    return Algorithm(ServerAdam(server_lr=server_lr, beta1=beta1, beta2=beta2, tau=tau))
