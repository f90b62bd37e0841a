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

import numpy as np
import torch
from torch import Tensor

from fl_dist.engine.exact import Fixed, Scratch, Total

RANGE, NUMBER_RANGE = 2.0**12, 2.0**36
"""Largest absolute value of an upload's entry, and of a number, that the fixed point holds."""
BITS = 50
RESOLUTION = 40
REMEDY = "lower local.lr or set local.clip"

REPORT = ("status", "loss", "norm", "seconds", "copied", "forwards", "backwards", "vectors")
"""What is reported of each client beside the sums; one writer each, so adding gathers."""


class OutOfRange(ValueError):
    """A value that is not finite or does not fit the fixed point."""


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
        *pieces, _, _ = self.buffer.split(lengths)
        self._end = self.buffer[sum(lengths[:-2]) :]
        """What is known on the host, where it is written; `seal` brings it along."""
        self._written = torch.zeros_like(self._end, device="cpu")
        reports, told = (part.numpy() for part in self._written.split(lengths[-2:]))
        self._sums = {n: piece.view(self.fixed[n].words, -1) for n, piece in zip(sizes, pieces, strict=True)}
        scratch = Scratch(max(sizes.values()), device)
        self._totals = {n: Total(words, self.fixed[n], scratch) for n, words in self._sums.items() if self.exact}
        self._table = reports.reshape(largest, len(REPORT)).view(np.float64 if self.exact else np.float32)
        self._signals = told

    def reset(self) -> None:
        self.buffer.zero_()
        self._written.zero_()

    def check(self, name: str, largest: float) -> None:
        """Raise OutOfRange unless a vector whose largest entry has this size can be added."""
        if not math.isfinite(largest):
            raise OutOfRange(f"training diverged, its {name} is not finite; {REMEDY}")
        if self.exact and largest > (most := self.fixed[name].range):
            raise OutOfRange(
                f"its {name} has an entry of size {largest:.3g}, more than the {most:g} that the exact reduce holds; "
                f"if training diverges, {REMEDY}"
            )

    def add(self, name: str, vector: Tensor, weight: float) -> None:
        """sum += weight * vector; the caller has checked the range."""
        if self.exact:
            self._totals[name].add(vector.reshape(-1), weight)
        else:
            self._sums[name][0].add_(vector.reshape(-1), alpha=weight)

    def report(self, row: int, **values: float) -> None:
        self._table[row] = [values.get(k, 0.0) for k in REPORT]

    def signal(self, position: int, value: int) -> None:
        self._signals[position] += value

    def seal(self) -> None:
        """Before the reduce: reports and signals go with the sums."""
        self._end.copy_(self._written)

    def read(self) -> tuple[list[dict[str, float]], list[int]]:
        """After the reduce: reports, a row a client of the cohort, and signals."""
        end, length = self._end.cpu().numpy(), self._table.size
        table = end[:length].view(self._table.dtype).reshape(self._table.shape).tolist()
        return [dict(zip(REPORT, row, strict=True)) for row in table], [int(value) for value in end[length:].tolist()]

    def mean(self, name: str, weight: float, found: Tensor) -> Tensor:
        """The sum divided by the total weight, in the memory of `found`."""
        if self.exact:
            return self._totals[name].over(weight, found)
        return torch.div(self._sums[name][0], weight, out=found)
