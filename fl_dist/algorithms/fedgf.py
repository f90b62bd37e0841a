"""FedGF: Lee, Yoon, Rethinking the Flat Minima Searching in Federated Learning, ICML 2024.

    xt = x + rho_g u(x_prev - x);  q = c xt + (1-c)(y + rho u(g(y)));  r = g(q)
    D = (1/S) sum_i |y_iK - x|;  c = mean of the last W values of 1[D > T_D], used in the next round

Eq. 16 and Algorithm 1 disagree on the window; as in the code, c divides by the number of values kept. In the first
round, with no x_prev, c = 0. Weights are normalised over the participants (Eq. 3 is not).
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import (
    Algorithm,
    Number,
    Oracle,
    Part,
    Round,
    Upload,
    Uploaded,
    Vars,
    algorithm,
    ascend,
    parts,
    unit_vector,
)
from fl_dist.algorithms.fedsam import Rho

Threshold = Annotated[float, Field(ge=0, description="T_D, mean distance above which a round counts as divergent")]
Window = Annotated[int, Field(ge=1, le=10**6, description="W, rounds over which divergence is averaged")]
Share = Annotated[
    float | None, Field(ge=0, le=1, description="a constant c, for ablations; without it c adapts itself to divergence")
]


@parts.register
class Interpolate(Part):
    """An evaluation point between the global and the local perturbation; c is called `share`."""

    server = ("previous", "perturbed", "share", "window")
    published = ("perturbed", "share")
    uploads: ClassVar = {"distance": Upload("uniform", message=False, scalar=True)}
    extra_passes = (1, 1)
    role = "evaluation point"
    reports: ClassVar = {
        "share": "c, share of the global perturbation in the next round",
        "distance": "D, mean distance that clients went",
    }

    def __init__(
        self,
        *,
        rho: Rho = 0.1,
        rho_global: Rho = 0.1,
        threshold: Threshold = 0.2,
        window: Window = 30,
        share: Share = None,
    ) -> None:
        self.rho, self.rho_global, self.threshold, self.window = rho, rho_global, threshold, window
        self.share = share

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        window = x.new_full((self.window,), float("nan"))
        return {"previous": x.clone(), "perturbed": x.clone(), "share": x.new_zeros(()), "window": window}

    def publish(self, x: Tensor, s: Vars, r: Round) -> Tensor:
        s.perturbed = x + unit_vector(s.previous - x).mul_(self.rho_global)
        return x

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        c = i.share
        if c == 1:
            return grad(s.perturbed)
        q = ascend(w, grad(w), self.rho)
        return grad(q.lerp_(s.perturbed, c) if c else q)

    def begin(self, s: Vars, i: Vars, r: Round, full: object) -> None:
        i.share = float(s.share)

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
        return {"distance": torch.linalg.vector_norm(delta)}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        s.window[r.index % self.window] = float(mean.distance > self.threshold)
        s.share = s.window[~s.window.isnan()].mean() if self.share is None else s.x.new_tensor(self.share)
        s.previous.copy_(s.x)
        return delta

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        return {"share": s.share, "distance": mean.distance}


@algorithm(paper="Lee, Yoon 2024")
def fedgf(
    *, rho: Rho = 0.1, rho_global: Rho = 0.1, threshold: Threshold = 0.2, window: Window = 30, share: Share = None
) -> Algorithm:
    """The paper's CIFAR-10 values; the threshold is an absolute distance and depends on model, rate and steps."""
    return Algorithm(Interpolate(rho=rho, rho_global=rho_global, threshold=threshold, window=window, share=share))
