"""The uplink: weighted sums of what the clients send, as one buffer that a single reduce adds up.

Exact sums are integers in fixed point. Integer addition does not depend on order, so the same clients give the same
bits however they are spread over workers. A client's weight does not depend on the others either: leaving a client
out gives what a round without it would have given.

A mean is off by at most 2**-RESOLUTION, and by its own rounding. One word of 64 bits is enough for that if the clients
are not too unequal; if they are, a second word holds what the first rounds off. Numbers (counts of steps, distances)
have two words always: whole and fraction.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

RANGE, NUMBER_RANGE = 2.0**12, 2.0**36
"""Largest absolute value of an upload's entry, and of a number, that the fixed point holds."""
BITS = 50
RESOLUTION = 40
REMEDY = "lower local.lr or set local.clip"
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}

REPORT = ("status", "loss", "seconds", "forwards", "backwards", "vectors")
"""What is reported of each client beside the sums; one writer each, so adding gathers."""


class OutOfRange(ValueError):
    """A value that is not finite or does not fit the fixed point."""


class Fixed(NamedTuple):
    """Fixed point: units of 1/scale in the first word, of 1/(scale*second) in the second, if there is one."""

    range: float
    scale: float
    second: float
    words: int


class Uplink:
    """Named sums of one round and a table of reports, one row a client of the cohort."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        largest: int,
        mode: str,
        device: torch.device,
        least: float = 1.0,
        signals: int = 1,
        numbers: Collection[str] = (),
    ) -> None:
        """`largest`: clients of a round at most; `least`: the smallest weight of a client; `numbers`: single ones."""
        self.exact = mode == "exact"
        spread = math.ceil(math.log2(largest))
        scale = 2.0 ** (BITS - spread)
        # Each client rounds by half a unit; a mean of the lightest clients divides by their weight.
        words = 2 if least * scale < 2.0 ** (RESOLUTION - 1) else 1
        vector = Fixed(RANGE, scale, 2.0 ** (BITS + 12 - spread), words if self.exact else 1)
        number = Fixed(NUMBER_RANGE, 1.0, 2.0 ** (BITS + 12 - spread), 2 if self.exact else 1)
        self.fixed = {name: number if name in numbers else vector for name in sizes}
        dtype = torch.int64 if self.exact else torch.float32
        lengths = [*(self.fixed[name].words * n for name, n in sizes.items()), largest * len(REPORT), signals]
        self.buffer = torch.zeros(sum(lengths), dtype=dtype, device=device)
        *pieces, reports, self._signals = self.buffer.split(lengths)
        self._sums = {n: piece.view(self.fixed[n].words, -1) for n, piece in zip(sizes, pieces, strict=True)}
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
        if self.exact and largest > (most := self.fixed[name].range):
            raise OutOfRange(
                f"its {name} has an entry of size {largest:.3g}, more than the {most:g} that the exact reduce holds; "
                f"if training diverges, {REMEDY}"
            )

    def add(self, name: str, vector: Tensor, weight: float) -> None:
        """sum += weight * vector; the caller has checked the range."""
        target, vector, fixed = self._sums[name], vector.reshape(-1), self.fixed[name]
        if not self.exact:
            target[0].add_(vector, alpha=weight)
            return
        # In pieces that fit the cache: four passes over a large vector would wait for memory.
        for start in range(0, vector.numel(), self._chunk):
            piece = vector[start : start + self._chunk]
            real, whole = self._real[: piece.numel()], self._whole[: piece.numel()]
            real.copy_(piece).mul_(weight * fixed.scale)
            first, *second = target[:, start : start + self._chunk]
            if second:
                rounded = real.round()
                first.add_(whole.copy_(rounded))
                second[0].add_(whole.copy_(real.sub_(rounded).mul_(fixed.second).round_()))
            else:
                first.add_(whole.copy_(real.round_()))

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
        (first, *rest), fixed = self._sums[name].to(torch.float64), self.fixed[name]
        for second in rest:
            first = first + second / fixed.second
        return (first / (fixed.scale * weight if self.exact else weight)).to(like.dtype)
