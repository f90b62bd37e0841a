"""Rows of the data where training can use them: on the device, or read from files ahead of their use."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.common.rows import Rows, count_bytes, count_rows, map_rows, select_rows, split_rows
from fl_dist.data.dataset import to_device

READER_THREADS = 2
PREFETCH = 8
"""Batches that are read before they are asked for."""
ALL = slice(None)


class BatchLoader:
    """Rows and their targets. Rows beyond `max_bytes` stay where they are: in memory, or in a mapped file."""

    def __init__(
        self,
        x: Rows,
        y: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        max_bytes: float,
        image_format: torch.memory_format = torch.channels_last,
        first: int = 0,
    ) -> None:
        """`image_format`: of images as model input; `first`: the number of the first row."""
        self.device, self.dtype, self.image_format, self.first = device, dtype, image_format, first
        self.bytes = count_bytes(x) + y.nbytes
        self.is_resident = self.bytes <= max_bytes
        self.x = map_rows(self._to_training_dtype, x) if self.is_resident else x
        self.y = self._to_training_dtype(y) if self.is_resident else y

    def load(self, pieces: Iterable[Tensor]) -> Iterator[Batch]:
        """A batch for each piece of row numbers."""
        own = (piece - self.first if self.first else piece for piece in pieces)
        return self._select(own) if self.is_resident else self._read(own)

    def sequential_batches(self, size: int, pieces: slice = ALL) -> Iterator[Batch]:
        """These of the batches of `size` rows, in order."""
        if self.is_resident:
            return zip(split_rows(self.x, size)[pieces], split_rows(self.y, size)[pieces], strict=True)
        return self.load(torch.arange(count_rows(self.x)).split(size)[pieces])

    def _select(self, pieces: Iterable[Tensor]) -> Iterator[Batch]:
        for piece in pieces:
            numbers = to_device(piece, self.device)
            yield select_rows(self.x, numbers), self.y.index_select(0, numbers)

    def _read(self, pieces: Iterable[Tensor]) -> Iterator[Batch]:
        for x, y in _prefetch(self.x, self.y, pieces):
            yield map_rows(self._send, x), self._send(y)

    def _send(self, rows: Tensor) -> Tensor:
        return self._to_training_dtype(to_device(rows, self.device))

    def _to_training_dtype(self, rows: Tensor) -> Tensor:
        return to_training_dtype(rows, self.device, self.dtype)


def _prefetch(x: Rows, y: Tensor, pieces: Iterable[Tensor]) -> Iterator[Batch]:
    """The rows of each piece, in order, whichever reader is faster."""

    def read(piece: Tensor) -> Batch:
        return select_rows(x, piece), y.index_select(0, piece)

    pending: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(READER_THREADS) as readers:
        for piece in pieces:
            pending.append(readers.submit(read, piece))
            if len(pending) > PREFETCH:
                yield pending.popleft().result()
        for batch in pending:
            yield batch.result()


def to_training_dtype(rows: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Images stay bytes and ids ids on the device; features and targets take the precision of training."""
    return rows.to(device, dtype if rows.is_floating_point() else rows.dtype)
