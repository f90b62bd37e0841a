"""The downlink: command, assignment and model for every rank, as one buffer for one broadcast per round."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_dist.algorithms.core import Vars
from fl_dist.federation.client_state import StateTemplate
from fl_dist.federation.commands import LENGTH, Command
from fl_dist.federation.flat_model import ALIGNMENT


class Downlink:
    """A header of integers and aligned vectors in one run of bytes."""

    def __init__(self, published: StateTemplate, buffers: Tensor, max_cohort: int, device: torch.device) -> None:
        fields = {"header": ((LENGTH + max_cohort,), torch.int64), **published}
        fields["buffers"] = (tuple(buffers.shape), buffers.dtype)
        lengths = [math.prod(shape) * dtype.itemsize for shape, dtype in fields.values()]
        aligned = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        self.buffer = torch.zeros(sum(aligned), dtype=torch.uint8, device=device)
        pieces = zip(fields.items(), lengths, self.buffer.split(aligned), strict=True)
        views = {name: p[:length].view(dtype).view(shape) for (name, (shape, dtype)), length, p in pieces}
        self._header, self.buffers = views.pop("header"), views.pop("buffers")
        self.vars = Vars(**views)
        """What the algorithm's clients see as `s`."""

    def write(
        self, command: Command, published: Vars, buffers: Tensor, cohort: Sequence[int], assignment: Mapping[int, int]
    ) -> None:
        for name, view in vars(self.vars).items():
            view.copy_(getattr(published, name))
        self.buffers.copy_(buffers)
        header = [*command.encode(), *(assignment[client] for client in cohort)]
        self._header[: len(header)].copy_(torch.tensor(header))

    def read(self, cohort: Sequence[int]) -> tuple[Command, dict[int, int]]:
        """The command, and which rank trains which client of the cohort."""
        header = self._header.tolist()
        return Command.decode(header[:LENGTH]), dict(zip(cohort, header[LENGTH:], strict=False))
