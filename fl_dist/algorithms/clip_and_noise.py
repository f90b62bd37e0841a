"""DP-FedAvg: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018.

    u_i = d_i min(1, C/||d_i||);  d = (sum of the u_i)/m + N(0, (z C/m)^2)

m is the expected number of clients, the paper's fixed denominator: how many took part, or failed, does not show.
Around SAM it is DP-FedSAM: Shi et al., Make Landscape Flatter in Differentially Private Federated Learning, CVPR 2023.
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Number, Part, Round, Vars, parts
from fl_dist.algorithms.privacy_accountant import epsilon
from fl_dist.common.vector_math import float64_norm


@parts.register_as("clip_and_noise")
class ClipAndNoise(Part):
    """Differential privacy of clients: updates of bounded norm, Gaussian noise on their mean, and the epsilon spent."""

    role = "aggregate"
    needs = ("uniform weights", "no other uploads", "opacus")
    reports: ClassVar = {
        "epsilon": "privacy spent so far at the part's delta: opacus' RDP accountant for Poisson sampling of clients "
        "(with clients.sampling=uniform the customary approximation)"
    }

    def __init__(
        self,
        *,
        clip: Annotated[float, Field(gt=0, description="C, largest L2 norm of a client's update")] = 1.0,
        noise: Annotated[
            float, Field(gt=0, description="z, noise multiplier: the noise on the sum has standard deviation z*C")
        ] = 1.0,
        delta: Annotated[float, Field(gt=0, lt=1, description="delta at which epsilon is reported")] = 1e-5,
    ) -> None:
        self.clip, self.noise, self.delta = clip, noise, delta

    def upload(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> Tensor:
        return delta * torch.clamp(self.clip / float64_norm(delta), max=1.0).to(delta.dtype)

    def aggregate(self, delta: Tensor, updates: Tensor | None, s: Vars, r: Round) -> Tensor:
        noise = torch.from_numpy(r.generator("privacy noise").standard_normal(len(delta)))
        scaled = noise.mul_(self.noise * self.clip / r.expected_participants).to(delta)
        return scaled.mul_(r.is_parameter).add_(delta, alpha=r.participants / r.expected_participants)

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        return {"epsilon": epsilon(r.index + 1, r.sampling_rate, self.noise, self.delta)}
