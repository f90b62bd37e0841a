"""The downlink: what the server tells every worker at the start of a round, as one buffer for one broadcast."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_dist.core import Vars
from fl_dist.engine.flat import ALIGN


class Orders(NamedTuple):
    """What the header says before the assignment of the cohort's clients."""

    save: int = 0
    """1: what has changed is to be saved, 2: all that the rank holds."""
    stop: int = 0
    decided: int = 0
    """The round of a save whose fate is known now; 0: none."""
    whole: int = 1
    """Whether that save is whole; if not, its clients are unsaved again."""
    evaluate: int = 0
    """1: all ranks evaluate the model of this message first, 2: another, which follows it."""


class Downlink:
    """A header of integers and aligned vectors in one run of bytes."""

    def __init__(self, shapes: Vars, buffers: Tensor, largest: int, device: torch.device) -> None:
        fields = {"header": torch.empty(len(Orders()) + largest, dtype=torch.int64), **vars(shapes), "buffers": buffers}
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

    def order(self, orders: Orders, cohort: Sequence[int], assignment: Mapping[int, int]) -> None:
        header = [*orders, *(assignment[c] for c in cohort)]
        self._header[: len(header)].copy_(torch.tensor(header))

    def read_orders(self, cohort: Sequence[int]) -> tuple[Orders, dict[int, int]]:
        header, n = self._header.tolist(), len(Orders())
        return Orders(*header[:n]), dict(zip(cohort, header[n:], strict=False))
