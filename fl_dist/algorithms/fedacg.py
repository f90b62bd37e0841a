"""FedACG: Kim et al., Communication-Efficient Federated Learning with Accelerated Client Gradient, CVPR 2024.

    z = x + lambda m;  r = g(y) + 2w (y - z);  d = avg(y_K) - z;  m <- lambda m + d;  x <- x + m (= avg(y_K))

FedNSAM's code drops the proximal term's gradient and forgets the old m; the authors' own code is followed.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Round, Vars, algorithm, parts
from fl_dist.algorithms.fedopt import ServerMomentum
from fl_dist.algorithms.fedprox import Prox

Lookahead = Annotated[float, Field(ge=0, lt=1, description="lambda, momentum and extrapolation of the global model")]


@parts.register
class Nesterov(ServerMomentum):
    """Server momentum whose clients start from the extrapolated model x + lambda*m."""

    def __init__(self, *, lookahead: Lookahead = 0.85) -> None:
        super().__init__(decay=lookahead)

    def publish(self, x: Tensor, s: Vars, r: Round) -> Tensor:
        return x.add(s.m, alpha=self.decay)


@algorithm(paper="Kim et al. 2024")
def fedacg(
    *, lookahead: Lookahead = 0.85, prox_w: Annotated[float, Field(ge=0, description="w of w*|y - z|^2")] = 0.001
) -> Algorithm:
    """The authors' values."""
    return Algorithm(Prox(weight=2 * prox_w), Nesterov(lookahead=lookahead))
