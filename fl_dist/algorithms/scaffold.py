"""SCAFFOLD (option II): Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, ICML 2020.

    r = g(y) - c_i + c;  c_i+ = c_i - c + (z - y_K)/(eta K);  c <- c + (1/N) sum_i (c_i+ - c_i)

FedLESAM's text has the sign of c - c_i and the weight of c wrong, three published codes have a correction
without effect; the rule above is the original one.
"""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Number, Oracle, Part, Round, Upload, Uploaded, Vars, algorithm, parts

Control = Annotated[
    Literal["option2", "gradients"],
    Field(description="new c_i from the update (option II), or the mean of the raw gradients"),
]


@parts.register
class Scaffold(Part):
    """Control variates against client drift."""

    server = ("c",)
    client = ("c_i",)
    published = ("c",)
    uploads: ClassVar = {"c_change": Upload("uniform")}
    reports: ClassVar = {"control_norm": "norm of the server's control variate c"}

    def __init__(self, *, control: Control = "option2") -> None:
        self.from_gradients = control == "gradients"
        self.assumes_sgd = not self.from_gradients

    def begin(self, s: Vars, i: Vars, r: Round, full: object) -> None:
        i.correction = s.c - i.c_i
        if self.from_gradients:
            i.gradients = torch.zeros_like(s.x)

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        g = grad(w)
        if self.from_gradients:
            i.gradients.add_(g)
        return g.add_(i.correction)

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
        # With option II c_i+ - c_i is -c - delta/(eta K).
        if self.from_gradients:
            change = (i.gradients / r.steps).sub_(i.c_i)
        else:
            change = torch.add(s.c, delta, alpha=1 / (r.lr * r.steps)).neg_()
        i.c_i.add_(change)
        return {"c_change": change}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        s.c.add_(mean.c_change, alpha=r.participants / r.clients)
        return delta

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        return {"control_norm": torch.linalg.vector_norm(s.c)}


@algorithm(paper="Karimireddy et al. 2020")
def scaffold(*, control: Control = "option2") -> Algorithm:
    return Algorithm(Scaffold(control=control))
