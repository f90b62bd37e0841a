"""AdamW: Loshchilov, Hutter, Decoupled Weight Decay Regularization, ICLR 2019.

w <- (1 - eta wd) w;  m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2
w <- w - eta (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)      in step t = 1, 2, ...
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.optimizers.base import Optimizer, optimizers

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(description="decay of the first and of the second moment")]
Epsilon = Annotated[float, Field(gt=0, description="added to the root of the second moment")]


@optimizers.register
class AdamW(Optimizer):
    """As torch.optim.AdamW, with local.weight_decay; local.momentum is not used."""

    def __init__(self, weight_decay: float, *, betas: Betas = (0.9, 0.999), eps: Epsilon = 1e-8) -> None:
        self.weight_decay, self.betas, self.eps = weight_decay, betas, eps

    def init(self, w: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=w.device)  # of the type that the kernel reads on a GPU
        return {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "step": step}

    def step(self, w: Tensor, direction: Tensor, state: dict[str, Tensor], lr: float) -> None:
        state["step"].add_(1)
        torch._fused_adamw_(
            [w],
            [direction],
            [state["m"]],
            [state["v"]],
            [],
            [state["step"]],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
