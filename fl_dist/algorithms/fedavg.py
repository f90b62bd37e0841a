"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

y <- y - eta g(y);  x <- x + eta_g sum_i p_i (y_iK - x)
"""

from fl_dist.algorithms.core import Algorithm, algorithm


@algorithm(paper="McMahan et al. 2017")
def fedavg() -> Algorithm:
    return Algorithm()
