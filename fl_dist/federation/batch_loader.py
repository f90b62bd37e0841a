"""Rows of the data where training can use them: on the device, or read from files ahead of their use."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.data.dataset import to_device

READER_THREADS = 2
PREFETCH = 8
"""Batches that are read before they are asked for."""
ALL = slice(None)


class BatchLoader:
    """Rows and their targets. Rows beyond `max_bytes` stay where they are: in memory, or in a mapped file."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        max_bytes: float,
        image_format: torch.memory_format = torch.channels_last,
        first: int = 0,
    ) -> None:
        """`image_format`: of images as model input; `first`: the number of the first row."""
        self.device, self.dtype, self.image_format, self.first = device, dtype, image_format, first
        self.is_resident = x.nbytes <= max_bytes
        self.x = to_training_dtype(x, device, dtype) if self.is_resident else x
        self.y = to_training_dtype(y, device, dtype)

    def load(self, pieces: Iterable[Tensor]) -> Iterator[Batch]:
        """A batch for each piece of row numbers."""
        for piece, x in self._select(piece - self.first if self.first else piece for piece in pieces):
            yield x, self.y.index_select(0, piece)

    def sequential_batches(self, size: int, pieces: slice = ALL) -> Iterator[Batch]:
        """These of the batches of `size` rows, in order."""
        if self.is_resident:
            return zip(self.x.split(size)[pieces], self.y.split(size)[pieces], strict=True)
        return self.load(torch.arange(len(self.x)).split(size)[pieces])

    def _select(self, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        if self.is_resident:
            for piece in pieces:
                indices = to_device(piece, self.device)
                yield indices, self.x.index_select(0, indices)
            return
        for piece, x in _prefetch(self.x, pieces):
            rows = to_training_dtype(to_device(x, self.device), self.device, self.dtype)
            yield to_device(piece, self.device), rows


def _prefetch(x: Tensor, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces with their rows, in order, whichever reader is faster."""
    pending: deque[tuple[Tensor, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(READER_THREADS) as readers:
        for piece in pieces:
            pending.append((piece, readers.submit(x.index_select, 0, piece)))
            if len(pending) > PREFETCH:
                first, rows = pending.popleft()
                yield first, rows.result()
        for piece, rows in pending:
            yield piece, rows.result()


def to_training_dtype(rows: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Images stay bytes and ids ids on the device; features and targets take the precision of training."""
    return rows.to(device, dtype if rows.is_floating_point() else rows.dtype)
