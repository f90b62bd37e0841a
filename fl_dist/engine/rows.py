"""Rows of the data where training can take them: on the device, or read from the machine's files ahead of their use."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fl_dist.core import Batch
from fl_dist.data.dataset import moved

READERS = 2
AHEAD = 8
"""Batches that are read before they are asked for."""


class Rows:
    """Rows and their targets. Rows beyond `most` bytes stay where they are: in memory, or in a mapped file."""

    def __init__(self, x: Tensor, y: Tensor, device: torch.device, dtype: torch.dtype, most: float) -> None:
        self.device, self.dtype = device, dtype
        self.resident = x.nbytes <= most
        self.x = place(x, device, dtype) if self.resident else x
        self.y = place(y, device, dtype)

    def taken(self, pieces: Iterable[Tensor]) -> Iterator[Batch]:
        """A batch for each piece of row numbers."""
        for piece, x in self._selected(pieces):
            yield x, self.y.index_select(0, piece)

    def in_order(self, size: int, first: int = 0, step: int = 1) -> Iterator[Batch]:
        """Batches of so many rows; of those every so-manieth."""
        mine = slice(first, None, step)
        if self.resident:
            return zip(self.x.split(size)[mine], self.y.split(size)[mine], strict=True)
        return self.taken(torch.arange(len(self.x)).split(size)[mine])

    def _selected(self, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        if self.resident:
            for piece in pieces:
                there = moved(piece, self.device)
                yield there, self.x.index_select(0, there)
            return
        for piece, x in _ahead(self.x, pieces):
            yield moved(piece, self.device), place(moved(x, self.device), self.device, self.dtype)


def _ahead(x: Tensor, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces with their rows, in their order, whichever of the readers is faster."""
    waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(READERS) as readers:
        for piece in pieces:
            waiting.append((piece, readers.submit(x.index_select, 0, piece)))
            if len(waiting) > AHEAD:
                asked, rows = waiting.popleft()
                yield asked, rows.result()
        for asked, rows in waiting:
            yield asked, rows.result()


def place(rows: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Images stay bytes and ids ids on the device; features and targets take the precision of training."""
    return rows.to(device, dtype if rows.is_floating_point() else rows.dtype)
