"""FedCM: Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.

r = alpha g(y) + (1-alpha) D;  D <- -sum_i p_i d_i/(eta K_i)     with the eta that produced d_i
"""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Oracle, Part, Round, Upload, Uploaded, Vars, algorithm, parts

Mix = Annotated[float, Field(gt=0, le=1, description="weight of the local gradient against the global direction")]


class GlobalDirection(Part):
    """r = mix*g + (1-mix)*D, D a gradient-like vector of the server."""

    server = ("direction",)
    published = ("direction",)
    role = "global direction"

    def __init__(self, *, mix: Mix = 0.1) -> None:
        self.mix = mix

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        return grad(w).mul_(self.mix).add_(s.direction, alpha=1 - self.mix)


@parts.register
class ClientMomentum(GlobalDirection):
    """Mixes in the mean local step of the last round."""

    uploads: ClassVar = {"step": Upload("samples", message=False)}
    assumes_sgd = True

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
        return {"step": (delta, -1 / (r.lr * r.steps))}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        s.direction = mean.step
        return delta


@algorithm(paper="Xu et al. 2021")
def fedcm(*, mix: Mix = 0.1) -> Algorithm:
    """0.1: the FedSAM and FedLESAM papers."""
    return Algorithm(ClientMomentum(mix=mix))
