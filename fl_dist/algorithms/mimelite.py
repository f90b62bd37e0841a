"""MimeLite: Karimireddy et al., Breaking the Centralized Barrier for Cross-Device Federated Learning, NeurIPS 2021.

    r = beta g(y) + (1-beta) m;  m <- (1-beta) m + beta sum_i p_i G_i,   G_i the full local gradient at the received x

Clients use the old m; the form is damped, as the FedSAM paper writes its peers. G_i is computed in evaluation mode
without augmentation.
"""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Round, Upload, Uploaded, Vars, algorithm, parts
from fl_dist.algorithms.fedcm import GlobalDirection, Mix


@parts.register
class Mime(GlobalDirection):
    """Mixes in an average of full gradients at the global model."""

    uploads: ClassVar = {"gradient": Upload("samples")}

    def begin(self, s: Vars, i: Vars, r: Round, full: Callable[[], Tensor]) -> None:
        i.full = full()

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
        return {"gradient": i.full}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        s.direction.lerp_(mean.gradient, self.mix)
        return delta


@algorithm(paper="Karimireddy et al. 2021")
def mimelite(*, mix: Mix = 0.1) -> Algorithm:
    """0.1: the FedSAM paper's default."""
    return Algorithm(Mime(mix=mix))
