"""The downlink: what the server tells every worker at the start of a round, as one buffer for one broadcast."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_dist.core import Vars
from fl_dist.flat import ALIGN

SAVE, STOP = 0, 1
"""Positions of the orders in the header; the assignment of the cohort's clients follows."""


class Downlink:
    """A header of integers and aligned vectors in one run of bytes."""

    def __init__(self, shapes: Vars, buffers: Tensor, largest: int, device: torch.device) -> None:
        fields = {"header": torch.empty(2 + largest, dtype=torch.int64), **vars(shapes), "buffers": buffers}
        sizes = [-(-t.nbytes // ALIGN) * ALIGN for t in fields.values()]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        pieces = zip(fields.items(), self.buffer.split(sizes), strict=True)
        views = {n: p[: t.nbytes].view(t.dtype).view(t.shape) for (n, t), p in pieces}
        self._header, self.buffers = views.pop("header"), views.pop("buffers")
        self.vars = Vars(**views)
        """What the algorithm's clients see as `s`."""

    def fill(self, published: Vars, buffers: Tensor) -> None:
        for name, view in vars(self.vars).items():
            view.copy_(getattr(published, name))
        self.buffers.copy_(buffers)

    def order(self, save: bool, stop: bool, cohort: Sequence[int], assignment: Mapping[int, int]) -> None:
        header = [int(save), int(stop), *(assignment[c] for c in cohort)]
        self._header[: len(header)].copy_(torch.tensor(header))

    def read_orders(self, cohort: Sequence[int]) -> tuple[bool, bool, dict[int, int]]:
        header = self._header.tolist()
        return bool(header[SAVE]), bool(header[STOP]), dict(zip(cohort, header[2:], strict=False))
