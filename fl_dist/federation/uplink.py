"""The uplink: weighted sums of what the clients send, as one buffer that a single reduce adds up.

Exact sums are integers in fixed point. Integer addition does not depend on order, so the same clients give the same
bits however they are spread over workers. A client's weight does not depend on the others either: leaving a client
out gives what a round without it would have given.

A mean is off by at most 2**-RESOLUTION, and by its own rounding. One word of 64 bits is enough for that if the clients
are not too unequal; if they are, a second word holds what the first rounds off. Numbers (counts of steps, distances)
have two words always: whole and fraction.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_dist.common.errors import FlDistError
from fl_dist.federation.fixed_point import FixedPoint, FixedPointSum, ScratchBuffers

RANGE, SCALAR_RANGE = 2.0**12, 2.0**36
"""Largest absolute value of an upload's entry, and of a number, that the fixed point holds."""
BITS = 50
RESOLUTION = 40
REMEDY = "lower local.lr or set local.clip"


class ClientReport(NamedTuple):
    """What a worker reports of one client beside its sums; one writer each, so that adding gathers."""

    status: float = 0.0
    """TRAINED, FAILED, or 0 before it ran."""
    loss: float = 0.0
    norm: float = 0.0
    """Length of its update."""
    seconds: float = 0.0
    recording_seconds: float = 0.0
    """For copies that diagnostics need, in addition to `seconds`."""
    forwards: float = 0.0
    backwards: float = 0.0
    vectors: float = 0.0
    """Model-sized vectors that it sends."""

    @property
    def is_trained(self) -> bool:
        return self.status == TRAINED


TRAINED, FAILED = 1.0, 2.0


class RankReport(NamedTuple):
    """What each rank reports of itself."""

    stop_requested: int = 0
    host_memory: int = 0
    device_memory: int = 0


class OutOfRangeError(FlDistError):
    """A value that is not finite or does not fit the fixed point."""


class Uplink:
    """Named sums of one round, a report per client of the cohort and one per rank."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        max_cohort: int,
        mode: str,
        device: torch.device,
        min_weight: float = 1.0,
        ranks: int = 1,
        scalars: Collection[str] = (),
    ) -> None:
        """`sizes`: entries of each sum; `min_weight`: smallest weight of a client; `scalars`: sums of one number.

        `mode`: as `comm.reduce`; what is gathered is no sum, the others are then exact.
        """
        self.is_exact = mode != "float32"
        self.formats = _choose_formats(sizes, max_cohort, min_weight, scalars, self.is_exact)
        dtype = torch.int64 if self.is_exact else torch.float32
        tables = [max_cohort * len(ClientReport._fields), ranks * len(RankReport._fields)]
        lengths = [*(self.formats[name].words * n for name, n in sizes.items()), *tables]
        self.buffer = torch.zeros(sum(lengths), dtype=dtype, device=device)
        *pieces, _, _ = self.buffer.split(lengths)
        self._sums = {n: piece.view(self.formats[n].words, -1) for n, piece in zip(sizes, pieces, strict=True)}
        scratch = ScratchBuffers(max(sizes.values()), device)
        self._totals = {n: FixedPointSum(words, self.formats[n], scratch) for n, words in self._sums.items()}
        self._reports = self.buffer[-sum(tables) :]
        self._host_reports = torch.zeros_like(self._reports, device="cpu")
        """Reports are written on the host; `copy_reports` copies them to the device's buffer."""
        clients, rank_table = (part.numpy() for part in self._host_reports.split(tables))
        self._clients = clients.reshape(max_cohort, -1).view(np.float64 if self.is_exact else np.float32)
        self._ranks = rank_table.reshape(ranks, -1)

    def reset(self) -> None:
        self.buffer.zero_()
        self._host_reports.zero_()

    def check(self, name: str, largest: float) -> None:
        """Raise OutOfRangeError unless a vector whose largest entry has this size can be added."""
        if not math.isfinite(largest):
            raise OutOfRangeError(f"training diverged, its {name} is not finite; {REMEDY}")
        if self.is_exact and largest > (limit := self.formats[name].range):
            raise OutOfRangeError(
                f"its {name} has an entry of size {largest:.3g}, more than the {limit:g} that the exact reduce holds; "
                f"if training diverges, {REMEDY}"
            )

    def add(self, name: str, vector: Tensor, weight: float) -> None:
        """sum += weight * vector; the caller has checked the range."""
        if self.is_exact:
            self._totals[name].add(vector.reshape(-1), weight)
        else:
            self._sums[name][0].add_(vector.reshape(-1), alpha=weight)

    def report_client(self, row: int, report: ClientReport) -> None:
        self._clients[row] = report

    def report_rank(self, rank: int, report: RankReport) -> None:
        self._ranks[rank] = report

    def copy_reports(self) -> None:
        """Before the reduce: reports go with the sums."""
        self._reports.copy_(self._host_reports)

    def read_reports(self) -> tuple[list[ClientReport], list[RankReport]]:
        """After the reduce: a report per client of the cohort, and one per rank."""
        reports, length = self._reports.cpu().numpy(), self._clients.size
        clients = reports[:length].view(self._clients.dtype).reshape(self._clients.shape).tolist()
        ranks = reports[length:].reshape(self._ranks.shape).tolist()
        return [ClientReport(*row) for row in clients], [RankReport(*map(int, row)) for row in ranks]

    def mean(self, name: str, weight: float, out: Tensor) -> Tensor:
        """The sum divided by the total weight, in the memory of `out`."""
        if self.is_exact:
            return self._totals[name].mean_over(weight, out)
        return torch.div(self._sums[name][0], weight, out=out)


def _choose_formats(
    sizes: Iterable[str], max_cohort: int, min_weight: float, scalars: Collection[str], is_exact: bool
) -> dict[str, FixedPoint]:
    """Vectors have one word unless clients are very unequal; single numbers have two, whole and fraction."""
    headroom = math.ceil(math.log2(max_cohort))
    scale, second = 2.0 ** (BITS - headroom), 2.0 ** (BITS + 12 - headroom)
    # Each client rounds by half a unit; a mean of the lightest clients divides by their weight.
    words = 2 if min_weight * scale < 2.0 ** (RESOLUTION - 1) else 1
    vector = FixedPoint(RANGE, scale, second, words if is_exact else 1)
    scalar = FixedPoint(SCALAR_RANGE, 1.0, second, 2 if is_exact else 1)
    return {name: scalar if name in scalars else vector for name in sizes}
