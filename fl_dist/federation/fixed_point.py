"""Sums in fixed point: integers, whose addition does not depend on order, so that anybody may add what."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_SIZES = {"cpu": 1 << 15, "cuda": 1 << 20}


class FixedPoint(NamedTuple):
    """Units of 1/scale in the first word, of 1/(scale*second) in the second, if there is one."""

    range: float
    scale: float
    second: float
    words: int


class ScratchBuffers:
    """Memory in which sums convert what is added and what it amounts to; vectors go through it in pieces."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self.size = max(1, min(CHUNK_SIZES[device.type], entries))
        self.real = torch.empty(self.size, dtype=torch.float64, device=device)
        self.whole = torch.empty(self.size, dtype=torch.int64, device=device)


class FixedPointSum:
    """One sum of vectors, in words of int64 that a reduce may add."""

    def __init__(self, words: Tensor, fixed: FixedPoint, scratch: ScratchBuffers) -> None:
        """`words`: memory for it, [words of the fixed point, entries]."""
        self.fixed, self._size = fixed, scratch.size
        pieces = words.split(scratch.size, 1) if words.numel() else ()
        self._pieces = [(scratch.real[: piece.shape[1]], scratch.whole[: piece.shape[1]], *piece) for piece in pieces]
        """What conversions go through and the words of each piece of the sum."""

    def add(self, vector: Tensor, weight: float) -> None:
        """sum += weight * vector, whose entries are within the range."""
        for piece, (real, whole, first, *second) in self._zip_pieces(vector):
            real.copy_(piece).mul_(weight * self.fixed.scale)
            if second:
                rounded = real.round()
                first.add_(whole.copy_(rounded))
                second[0].add_(whole.copy_(real.sub_(rounded).mul_(self.fixed.second).round_()))
            else:
                first.add_(whole.copy_(real.round_()))

    def mean_over(self, weight: float, out: Tensor) -> Tensor:
        """The sum divided by the weight, in the memory of `out`."""
        for piece, (real, _, first, *second) in self._zip_pieces(out):
            real.copy_(first)
            for rest in second:
                real += rest.double() / self.fixed.second
            piece.copy_(real.div_(self.fixed.scale * weight))
        return out

    def _zip_pieces(self, vector: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Its pieces with those of the sum, which has as many entries."""
        entries = vector.numel()
        pieces = vector.split(self._size) if entries > self._size else (vector,) if entries else ()
        return zip(pieces, self._pieces, strict=True)
