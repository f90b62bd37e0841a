"""FedGAMMA: Dai et al., FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization, TNNLS 2023.

    q = y + rho u(g(y));  r = g(q) - c_i + c        (the perturbation uses the uncorrected gradient)

FedGF's code divides the change of c once more by the number of participants; SCAFFOLD's rule is kept.
"""

from fl_dist.algorithms.core import Algorithm, algorithm
from fl_dist.algorithms.fedsam import Rho, Sam
from fl_dist.algorithms.scaffold import Control, Scaffold


@algorithm(paper="Dai et al. 2023")
def fedgamma(*, rho: Rho = 0.1, control: Control = "option2") -> Algorithm:
    """rho 0.1: FedLESAM's experiments."""
    return Algorithm(Sam(rho=rho), Scaffold(control=control))
