"""FedRobust: Reisizadeh et al., Robust Federated Learning: The Case of Affine Distribution Shifts, NeurIPS 2020.

    min_x max_{L_i,b_i} (1/N) sum_i [F_i(x; L_i a + b_i) - lambda(|L_i - 1|^2 + |b_i|^2)]
    y <- y - eta grad_y;  (L_i, b_i) <- (L_i, b_i) + eta_2 (grad_{L,b} CE - 2 lambda (L_i - 1, b_i))

L_i and b_i have one value per channel (per feature, for flat inputs). The FedSAM paper does not say which variant,
rates or number of ascent steps it ran.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Oracle, Part, Round, Vars, algorithm, parts

AscentLr = Annotated[float, Field(ge=0, description="eta_2, rate of the ascent; not decayed")]
Penalty = Annotated[float, Field(ge=0, description="lambda, weight of the squared shift")]
Steps = Annotated[
    int, Field(ge=1, le=1000, description="ascent steps per local step; each beyond the first costs a pass")
]


@parts.register
class Affine(Part):
    """The worst affine shift of a client's inputs, learnt along with the model."""

    client = ("scale", "shift")
    needs = ("real inputs",)

    def __init__(self, *, ascent_lr: AscentLr = 0.01, penalty: Penalty = 1.0, ascent_steps: Steps = 1) -> None:
        self.lr, self.penalty_weight, self.steps = ascent_lr, penalty, ascent_steps
        self.extra_passes = (ascent_steps - 1, ascent_steps - 1)

    def client_init(self, s: Vars, r: Round) -> dict[str, Tensor]:
        return {"scale": s.x.new_ones(r.channels), "shift": s.x.new_zeros(r.channels)}

    def inputs(self, x: Tensor, i: Vars) -> Tensor:
        shape = (1, -1) + (1,) * (x.dim() - 2)
        for v in (i.scale, i.shift):
            v.requires_grad_().grad = None
        return x * i.scale.view(shape) + i.shift.view(shape)

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        for _ in range(self.steps):
            g = grad(w)
            self._ascend(i)
        return g

    @torch.no_grad()
    def _ascend(self, i: Vars) -> None:
        for v, rest in ((i.scale, 1.0), (i.shift, 0.0)):
            assert v.grad is not None
            v.add_(v.grad - 2 * self.penalty_weight * (v - rest), alpha=self.lr)


@algorithm(paper="Reisizadeh et al. 2020")
def fedrobust(*, ascent_lr: AscentLr = 0.01, penalty: Penalty = 1.0, ascent_steps: Steps = 1) -> Algorithm:
    return Algorithm(Affine(ascent_lr=ascent_lr, penalty=penalty, ascent_steps=ascent_steps))
