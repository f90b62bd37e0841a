"""Stochastic gradient descent with heavy-ball momentum.

g <- g + wd w;  m <- mu m + g;  w <- w - eta m
"""

import torch
from torch import Tensor

from fl_dist.optimizers.base import Optimizer, optimizers


@optimizers.register
class SGD(Optimizer):
    """As torch.optim.SGD, with local.momentum and local.weight_decay."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay

    def init(self, w: Tensor) -> dict[str, Tensor]:
        # -0 + g has the bits of g, whatever its sign: the first step is one like the others.
        return {"momentum": torch.full_like(w, -0.0)} if self.momentum else {}

    def step(self, w: Tensor, direction: Tensor, state: dict[str, Tensor], lr: float) -> None:
        # The kernel, in one pass: torch.optim's classes import a compiler.
        torch._fused_sgd_(
            [w],
            [direction],
            list(state.values()),
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
