"""Norms of vectors and steps along them, and statistics of numbers that may not be finite."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

CHUNK_SIZES = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Entries that are converted to float64 at a time: few kernels on a GPU, within the caches of a CPU."""


def norm(v: Tensor) -> float:
    return float(float64_norm(v))


def float64_norm(v: Tensor) -> Tensor:
    """‖v‖ in float64, without a float64 copy of a large vector."""
    if v.numel() > (size := CHUNK_SIZES[v.device.type]):
        chunks = v.reshape(-1).split(size)
        v = torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks])
    length: Tensor = torch.linalg.vector_norm(v, dtype=torch.float64)
    return length


def unit_vector(v: Tensor) -> Tensor:
    """v/‖v‖ with one norm over all parameters, and 0 for 0."""
    return v * _inverse_norm(v)


def ascend(w: Tensor, v: Tensor, rho: float) -> Tensor:
    """w + rho*unit(v), in one pass and in the memory of v."""
    return torch.addcmul(w, v, rho * _inverse_norm(v), out=v)


def _inverse_norm(v: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(v)
    return torch.where(norm > 0, 1 / norm, torch.zeros_like(norm))


def mean(values: Sequence[float]) -> float:
    """NaN if the sum overflows or has infinities of both signs."""
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):
        return math.nan


def standard_deviation(values: Sequence[float]) -> float:
    """As statistics.pstdev, which needs finite numbers and takes longer than a step of a small model."""
    centre = mean(values)
    return math.sqrt(mean([(value - centre) * (value - centre) for value in values]))


def summarize_clients(values: Sequence[float], best_is: Literal["max", "min"]) -> dict[str, float]:
    """How a metric differs between clients; NaN is the worst value."""
    sign = -1 if best_is == "max" else 1
    ranked = sorted(values, key=lambda value: (math.isnan(value), sign * value))
    return {
        "mean": mean(values),
        "std": standard_deviation(values),
        "best": ranked[0],
        "worst": ranked[-1],
        "worst_tenth": mean(ranked[-math.ceil(len(ranked) / 10) :]),
    }
