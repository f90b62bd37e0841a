"""Exact sums of measured values: integers, so that neither order nor the number of ranks matters."""

from collections.abc import Iterable

import torch
from torch import Tensor

SCALE = 2.0**36
MAX_VALUE = 2.0**30
"""A larger value makes the mean infinite."""
MAX_PENDING = 2**16
"""Values that wait until they are added up together."""


class MetricSums:
    """Sums of values by name, in four words each: wholes, fractions, values that are too large, all values."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pending: dict[str, list[Tensor]] = {}
        self._count = 0
        self._words: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._words, *self._pending]))

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            own = value.detach().reshape(-1)
            # A piece of something larger would keep all of it.
            own = own if own.nbytes == own.untyped_storage().nbytes() else own.clone()
            self._pending.setdefault(name, []).append(own)
            self._count += own.numel()
        if self._count > MAX_PENDING:
            self._flush()

    def _flush(self) -> None:
        """Add up what is pending: once for many batches, for each operation takes its time, however small."""
        for name, values in self._pending.items():
            words = _to_words(torch.cat(values).to(self.device))
            self._words[name] = self._words[name] + words if name in self._words else words
        self._pending, self._count = {}, 0

    def table(self, names: list[str]) -> Tensor:
        """A row of words per name, of zeros for one that was not added; in the last one, how many have no row."""
        self._flush()
        none = torch.zeros(4, dtype=torch.int64, device=self.device)
        others = none + len(self._words.keys() - set(names))
        return torch.stack([*(self._words.get(name, none) for name in names), others])

    def means(self) -> dict[str, float]:
        self._flush()
        return {name: mean_of_words(words) for name, words in self._words.items()}


def _to_words(values: Tensor) -> Tensor:
    count = torch.full((), values.numel(), device=values.device)
    if values.dtype == torch.bool:  # hits
        none = torch.zeros_like(count)
        return torch.stack([values.sum(), none, none, count])
    real = values.double()
    fits = real.abs() <= MAX_VALUE
    real = torch.where(fits, real, 0.0)
    whole = real.round()
    fraction = ((real - whole) * SCALE).round()
    return torch.stack([whole.long().sum(), fraction.long().sum(), (~fits).sum(), count])


def mean_of_words(words: Tensor) -> float:
    whole, fraction, beyond, count = words.tolist()
    return float("inf") if beyond else (whole + fraction / SCALE) / max(1, count)


def bits_table(length: int, numbers: Iterable[tuple[int, float]]) -> Tensor:
    """The numbers at their places, as bits: one writer each, so that adding gathers."""
    table = torch.zeros(length, dtype=torch.float64)
    for position, number in numbers:
        table[position] = number
    return table.view(torch.int64)


def read_bits_table(table: Tensor) -> list[float]:
    return table.cpu().view(torch.float64).tolist()
