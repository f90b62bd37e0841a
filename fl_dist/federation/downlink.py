"""The downlink: command, assignment and model for every rank, as one buffer for one broadcast per round."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fl_dist.algorithms.core import Vars
from fl_dist.federation.client_state import StateTemplate
from fl_dist.federation.commands import LENGTH, Command

ALIGNMENT = 512
"""As of new tensors on a GPU, whose libraries choose kernels by alignment: a weight has the same in every vector."""


class Downlink:
    """A header of whole numbers and aligned vectors in one run of bytes."""

    def __init__(self, published: StateTemplate, buffers: Tensor, max_cohort: int, device: torch.device) -> None:
        fields = {"header": ((LENGTH + 1 + 2 * max_cohort,), torch.float64), **published}
        fields["buffers"] = (tuple(buffers.shape), buffers.dtype)
        lengths = [math.prod(shape) * dtype.itemsize for shape, dtype in fields.values()]
        aligned = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        self.buffer = torch.zeros(sum(aligned), dtype=torch.uint8, device=device)
        pieces = zip(fields.items(), lengths, self.buffer.split(aligned), strict=True)
        views = {name: p[:length].view(dtype).view(shape) for (name, (shape, dtype)), length, p in pieces}
        self._header, self.buffers = views.pop("header"), views.pop("buffers")
        self._host_header = torch.zeros_like(self._header, device="cpu")
        self._host_words = self._host_header.numpy()
        self.vars = Vars(**views)
        """What the algorithm's clients see as `s`."""

    def write(self, command: Command, published: Vars, buffers: Tensor, assignment: Mapping[int, int]) -> None:
        """`assignment`: which rank trains which client of the cohort, in the order of their reports."""
        for name, view in vars(self.vars).items():
            view.copy_(getattr(published, name))
        self.buffers.copy_(buffers)
        header = [*command.encode(), len(assignment), *assignment.keys(), *assignment.values()]
        self._host_words[: len(header)] = header
        self._header.copy_(self._host_header)

    def read(self) -> tuple[Command, dict[int, int]]:
        """The command, and which rank trains which client."""
        words = self._header.tolist()
        count, *clients = map(int, words[LENGTH:])
        return Command.decode(words[:LENGTH]), dict(zip(clients[:count], clients[count : 2 * count], strict=True))
