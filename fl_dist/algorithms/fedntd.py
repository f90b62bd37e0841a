"""FedNTD: Lee et al., Preservation of the Global Knowledge by Not-True Distillation, NeurIPS 2022.

    loss = CE + gamma tau^2 KL(softmax(f_x without the true logit / tau) || softmax(f_y without it / tau))

FedACG's re-implementation mixes (1-gamma) CE and drops tau^2; not followed.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Batch, Forward, ModelOutput, Part, Vars, algorithm, parts

Distill = Annotated[float, Field(ge=0, description="gamma, weight of the distillation")]
Temperature = Annotated[float, Field(gt=0, description="tau, temperature of the distillation")]


def distillation(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """tau^2 KL(teacher || student), averaged over the batch."""
    t = F.log_softmax(teacher / temperature, dim=1)
    s = F.log_softmax(student / temperature, dim=1)
    return temperature**2 * F.kl_div(s, t, reduction="batchmean", log_target=True)


@parts.register
class NotTrue(Part):
    """Distils the received model's opinion on the wrong classes."""

    extra_passes = (1, 0)
    needs = ("logits",)
    role = "teacher"

    def __init__(self, *, distill: Distill = 1.0, temperature: Temperature = 1.0) -> None:
        self.weight, self.temperature = distill, temperature

    def penalty(self, output: ModelOutput, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Tensor:
        x, y = batch
        teacher = _drop_true_class(forward(s.x, x).logits, y)
        return self.weight * distillation(teacher, _drop_true_class(output.logits, y), self.temperature)


def _drop_true_class(logits: Tensor, y: Tensor) -> Tensor:
    """The logits of all classes but the true one."""
    n, c = logits.shape
    rest = torch.arange(c - 1, device=y.device).expand(n, -1)
    return logits.gather(1, rest + (rest >= y[:, None]))


@algorithm(paper="Lee et al. 2022")
def fedntd(*, distill: Distill = 1.0, temperature: Temperature = 1.0) -> Algorithm:
    """1 and 1: the authors and the FedGMT paper."""
    return Algorithm(NotTrue(distill=distill, temperature=temperature))
