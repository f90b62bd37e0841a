"""The uplink: weighted sums of what the clients send, as one buffer that a single reduce adds up.

Exact sums are integers in fixed point. Integer addition does not depend on order, so the same clients give the same
bits however they are spread over workers. A client's weight does not depend on the others either: leaving a client
out gives what a round without it would have given.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

RANGE = 2.0**12
"""Largest absolute value of an upload's entry that the fixed point holds."""
BITS = 50
REMEDY = "lower local.lr or set local.clip"
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}

REPORT = ("status", "loss", "seconds", "forwards", "backwards", "vectors")
"""What is reported of each client beside the sums; one writer each, so adding gathers."""


class OutOfRange(ValueError):
    """A value that is not finite or does not fit the fixed point."""


class Uplink:
    """Named sums of one round and a table of reports, one row a client of the cohort."""

    def __init__(
        self, sizes: Mapping[str, int], largest: int, mode: str, device: torch.device, signals: int = 1
    ) -> None:
        self.exact = mode == "exact"
        self.scale = 2.0 ** (BITS - math.ceil(math.log2(largest)))
        dtype = torch.int64 if self.exact else torch.float32
        total = sum(sizes.values()) + largest * len(REPORT) + signals
        self.buffer = torch.zeros(total, dtype=dtype, device=device)
        *pieces, reports, self._signals = self.buffer.split([*sizes.values(), largest * len(REPORT), signals])
        self._sums = dict(zip(sizes, pieces, strict=True))
        self._reports = reports.view(largest, len(REPORT))
        self._chunk = min(CHUNK[device.type], max(sizes.values()))
        self._real = torch.empty(self._chunk, dtype=torch.float64, device=device)
        self._whole = torch.empty(self._chunk, dtype=torch.int64, device=device)

    def reset(self) -> None:
        self.buffer.zero_()

    def check(self, name: str, vector: Tensor, factor: float) -> None:
        """Raise OutOfRange unless `factor * vector` can be added."""
        if not vector.numel():
            return
        low, high = torch.aminmax(vector)
        largest = max(abs(float(low)), abs(float(high))) * abs(factor)
        if not math.isfinite(largest):
            raise OutOfRange(f"training diverged, its {name} is not finite; {REMEDY}")
        if self.exact and largest > RANGE:
            raise OutOfRange(
                f"its {name} has an entry of size {largest:.3g}, more than the {RANGE:g} that the exact reduce holds; "
                f"if training diverges, {REMEDY}"
            )

    def add(self, name: str, vector: Tensor, weight: float) -> None:
        """sum += weight * vector; the caller has checked the range."""
        target, vector = self._sums[name], vector.reshape(-1)
        if not self.exact:
            target.add_(vector, alpha=weight)
            return
        # In pieces that fit the cache: four passes over a large vector would wait for memory.
        for start in range(0, vector.numel(), self._chunk):
            piece = vector[start : start + self._chunk]
            real, whole = self._real[: piece.numel()], self._whole[: piece.numel()]
            real.copy_(piece).mul_(weight * self.scale).round_()
            target[start : start + self._chunk].add_(whole.copy_(real))

    def report(self, row: int, **values: float) -> None:
        line = torch.tensor([values.get(k, 0.0) for k in REPORT], dtype=torch.float64)
        self._reports[row].copy_(line.view(torch.int64) if self.exact else line)

    def signal(self, position: int, value: int) -> None:
        self._signals[position] += value

    def signals(self) -> list[int]:
        return [int(v) for v in self._signals.tolist()]

    def reports(self) -> list[dict[str, float]]:
        table = self._reports.cpu().contiguous()
        rows = (table.view(torch.float64) if self.exact else table).tolist()
        return [dict(zip(REPORT, row, strict=True)) for row in rows]

    def mean(self, name: str, weight: float, like: Tensor) -> Tensor:
        """The sum divided by the total weight, in the dtype of `like`."""
        divisor = self.scale * weight if self.exact else weight
        return (self._sums[name].to(torch.float64) / divisor).to(like.dtype)
