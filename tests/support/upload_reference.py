"""Plain float64 references of what happens to uploads on their way, written from the papers' rules, entry by entry."""

import math
from collections.abc import Sequence

import numpy as np

Vector = list[float]


def clipped(v: Vector, bound: float) -> Vector:
    """v / max(1, |v|/C): McMahan et al. 2018."""
    length = math.sqrt(math.fsum(entry * entry for entry in v))
    return [entry / max(1.0, length / bound) for entry in v]


def private_mean(updates: Sequence[Vector], bound: float, multiplier: float, expected: int, draws: Vector) -> Vector:
    """(sum of the clipped updates + multiplier * bound * draws) / expected: the fixed-denominator estimator."""
    short = [clipped(update, bound) for update in updates]
    return [
        (math.fsum(update[j] for update in short) + multiplier * bound * draws[j]) / expected for j in range(len(draws))
    ]


def largest_entries(v: Vector, k: int) -> Vector:
    """The k entries of largest size, those of lower index first among equal ones; 0 elsewhere."""
    kept = sorted(range(len(v)), key=lambda j: (-abs(v[j]), j))[:k]
    return [entry if j in kept else 0.0 for j, entry in enumerate(v)]


def scaled_signs(v: Vector) -> Vector:
    """(|v|_1 / n) sign(v), where sign(0) = 1."""
    mean = math.fsum(abs(entry) for entry in v) / len(v)
    return [mean if entry >= 0 else -mean for entry in v]


def quantised(v: Vector, bits: int, draws: Vector) -> Vector:
    """QSGD with the largest size as scale: level l or l+1 of L, the upper one if the draw is below the remainder."""
    levels, scale = 2 ** (bits - 1) - 1, max(abs(entry) for entry in v)
    out = []
    for entry, draw in zip(v, draws, strict=True):
        position = levels * abs(entry) / scale if scale else 0.0
        level = math.floor(position)
        level += 1 if draw < position - level else 0
        out.append(math.copysign(scale * level / levels, entry))
    return out


def median(updates: Sequence[Vector]) -> Vector:
    columns = [sorted(column) for column in zip(*updates, strict=True)]
    m = len(updates)
    return [c[m // 2] if m % 2 else (c[m // 2 - 1] + c[m // 2]) / 2 for c in columns]


def trimmed_mean(updates: Sequence[Vector], cut: int) -> Vector:
    """Without the `cut` smallest and largest values of each entry."""
    columns = [sorted(column)[cut : len(updates) - cut] for column in zip(*updates, strict=True)]
    return [math.fsum(column) / len(column) for column in columns]


def krum(updates: Sequence[Vector], byzantine: int, keep: int) -> Vector:
    """The mean of the `keep` updates with the smallest sums of squared distances to their m-f-2 nearest others."""
    scores = []
    for i, own in enumerate(updates):
        distances = [
            math.fsum((a - b) ** 2 for a, b in zip(own, other, strict=True))
            for j, other in enumerate(updates)
            if j != i
        ]
        scores.append((math.fsum(sorted(distances)[: len(updates) - byzantine - 2]), i))
    chosen = [updates[i] for _, i in sorted(scores)[:keep]]
    return [math.fsum(column) / keep for column in zip(*chosen, strict=True)]


def rdp_of_a_round(q: float, sigma: float, order: float) -> float:
    """Rényi divergence of the sampled Gaussian, by numerical integration of its definition: Mironov et al. 2019, 3.3.

    A = E over z ~ N(0, sigma^2) of ((1-q) + q exp((2z-1) / (2 sigma^2)))^order; log(A) / (order - 1).
    """
    # The integrand's mass is where the density of the shifted Gaussian, to the power of the order, has it.
    z = np.linspace(-12 * sigma, order + 12 * sigma, 20_001)
    log_ratio = np.logaddexp(math.log1p(-q) if q < 1 else -np.inf, math.log(q) + (2 * z - 1) / (2 * sigma**2))
    log_terms = order * log_ratio - z**2 / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    peak = log_terms.max()
    return float((math.log(np.trapezoid(np.exp(log_terms - peak), z)) + peak) / (order - 1))


def privacy_spent(rounds: int, q: float, sigma: float, delta: float, orders: Sequence[float]) -> float:
    """The least epsilon over the orders: Balle et al. 2020, Theorem 21."""
    return min(
        rounds * rdp_of_a_round(q, sigma, order)
        + math.log1p(-1 / order)
        - (math.log(delta) + math.log(order)) / (order - 1)
        for order in orders
    )
