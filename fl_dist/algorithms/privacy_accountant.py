"""The epsilon that rounds of the subsampled Gaussian mechanism spend, by opacus' accountant of Rényi privacy.

Mironov, Talwar, Zhang, Rényi Differential Privacy of the Sampled Gaussian Mechanism, 2019: Poisson sampling, and
neighbours that differ by one client. Conversion to (epsilon, delta): Balle et al. 2020. opacus is imported at the
first use: that takes seconds.
"""

import importlib.util
import warnings
from functools import lru_cache


def has_opacus() -> bool:
    """Whether it is installed; nothing is imported."""
    return importlib.util.find_spec("opacus") is not None


def epsilon(rounds: int, sampling_rate: float, noise: float, delta: float) -> float:
    """Spent by so many rounds at this delta; `noise`: standard deviation of the sum's noise, in units of the clip."""
    analysis = importlib.import_module("opacus.accountants.analysis.rdp")
    orders, costs = _round_costs(sampling_rate, noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a best order at the end of the list is an upper bound all the same
        total, _ = analysis.get_privacy_spent(orders=orders, rdp=[rounds * cost for cost in costs], delta=delta)
    return float(total)


@lru_cache(maxsize=8)
def _round_costs(sampling_rate: float, noise: float) -> tuple[list[float], list[float]]:
    """The orders of opacus' accountant, and the Rényi divergence of one round at each; those of rounds add up."""
    accountants = importlib.import_module("opacus.accountants")
    analysis = importlib.import_module("opacus.accountants.analysis.rdp")
    orders = accountants.RDPAccountant.DEFAULT_ALPHAS
    return orders, list(analysis.compute_rdp(q=sampling_rate, noise_multiplier=noise, steps=1, orders=orders))
