"""Messages between ranks: gloo on CPUs, NCCL on GPUs, nothing in one process."""

import time
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fl_dist.distributed.devices import synchronizer
from fl_dist.distributed.failure_detector import FailureDetector

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 50e-6, 2e-3
"""Between two looks at a collective of NCCL."""
MAX_GATHERED_BYTES = 1 << 22
"""Of a small reduce, on rank 0: all ranks' tensors. Above it gloo's own reduce, which divides the work, is faster."""

Messages = list[tuple[Tensor, int]]
"""Tensors, each with the rank that it goes to or comes from."""


class Collectives(Protocol):
    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor, on every rank."""

    def reduce(self, tensor: Tensor) -> None:
        """The sum of all ranks' tensors, on rank 0."""

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Point to point, both lists in an order that all ranks share."""


class LocalCollectives:
    """One process is server and worker."""

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def reduce(self, tensor: Tensor) -> None:
        pass

    def exchange(self, sends: Messages, receives: Messages) -> None:
        assert not sends and not receives


class DistributedCollectives:
    def __init__(self, rank: int, size: int, device: torch.device, uses_nccl: bool, detector: FailureDetector) -> None:
        self._rank, self._size = rank, size
        self._device, self._uses_nccl, self._failure_detector = device, uses_nccl, detector
        self._reduces_on_host = device.type == "cuda" and not uses_nccl
        """gloo reduces host memory only."""

    def broadcast(self, tensor: Tensor) -> None:
        with self._failure_detector.waiting():
            self._finish(dist.broadcast(tensor, src=0, async_op=self._uses_nccl))

    def reduce(self, tensor: Tensor) -> None:
        staged = tensor.cpu() if self._reduces_on_host else tensor
        with self._failure_detector.waiting():
            if staged.is_cpu and staged.nbytes * self._size <= MAX_GATHERED_BYTES:
                self._gather_and_add(staged)
            else:
                self._finish(dist.reduce(staged, dst=0, async_op=self._uses_nccl))
        if staged is not tensor:
            tensor.copy_(staged)

    def _gather_and_add(self, tensor: Tensor) -> None:
        """A reduce in one step; that of gloo passes parts from rank to rank, which takes two to four times as long."""
        if self._rank != 0:
            dist.gather(tensor, dst=0)
            return
        table = tensor.new_empty((self._size, *tensor.shape))
        dist.gather(tensor, list(table), dst=0)
        torch.sum(table, 0, dtype=tensor.dtype, out=tensor)

    def exchange(self, sends: Messages, receives: Messages) -> None:
        with self._failure_detector.waiting():
            pending = [dist.isend(t, to) for t, to in sends] + [dist.irecv(t, source) for t, source in receives]
            for work in pending:
                assert work is not None
                work.wait()

    def _finish(self, work: dist.Work | None) -> None:
        """Wait for NCCL, which returns before it is done and would raise its errors elsewhere. gloo has finished."""
        if work is None:
            return
        pause = MIN_POLL_SECONDS
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
        work.wait()
        synchronizer(self._device)()  # raises what went wrong
