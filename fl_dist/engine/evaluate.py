"""The task's metrics of the global model on the test set, from sums that do not depend on order or on who adds them."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from fl_dist.core import Batch
from fl_dist.data import Dataset, normalise
from fl_dist.engine.rows import Rows
from fl_dist.engine.world import World
from fl_dist.machine import faults
from fl_dist.machine.comm import Comm
from fl_dist.machine.devices import settle
from fl_dist.models.blocks import in_blocks
from fl_dist.tasks import Task

SCALE = 2.0**36
LARGEST = 2.0**30
"""A value beyond it makes the mean infinite."""
HELD = 2**16
"""Values that are kept until they are added up."""


class Evaluator:
    """Evaluates a model, by this rank alone or by all; borrows the world's twin model."""

    def __init__(self, world: World, comm: Comm) -> None:
        self.world, self.comm = world, comm
        self._names: list[str] = []
        """What the task measures, as all ranks agreed."""

    def alone(self, x: Tensor, buffers: Tensor, done: int) -> dict[str, float]:
        """Of the model after `done` rounds."""
        with self._at(done):  # to the last look at a device, which may be where it hangs
            return named(self.world.task, self._sums(x, buffers, 0, 1).means())

    def together(self, x: Tensor, buffers: Tensor, done: int) -> dict[str, float]:
        """The same by all ranks, each for its share of the same batches; rank 0 has the numbers."""
        with self._at(done):
            sums = self._sums(x, buffers, self.comm.rank, self.comm.size)
            settle(self.comm.device)()  # not later, when all wait for all
        names = self._agreed(sums.names)
        words = sums.table(names)
        self.comm.reduce(words)
        if self.comm.rank:
            return {}
        *known, (others, *_) = words.cpu()
        if others:
            return self.alone(x, buffers, done)
        return named(self.world.task, {name: mean(row) for name, row in zip(names, known, strict=True)})

    @contextlib.contextmanager
    def _at(self, done: int) -> Iterator[None]:
        self.comm.doing(f"the evaluation of round {done}")
        try:
            yield
        finally:
            self.comm.doing("")

    def _sums(self, x: Tensor, buffers: Tensor, first: int, step: int) -> "Sums":
        world, model = self.world, self.world.twin
        model.bind(x)
        model.buffers.write(buffers)
        if model.module.training:
            model.module.eval()
        batches = world.test.in_order(world.config.evaluate.batch_size, first, step)
        return _added(model.module, world.task, world.dataset, world.test, batches, self._tick)

    def _tick(self) -> None:
        self.comm.tick()
        faults.point("evaluate")

    def _agreed(self, own: list[str]) -> list[str]:
        """Names of all ranks' sums, settled once: a rank may have no batch, and names may depend on the batch."""
        if not self._names:
            ranks = range(self.comm.size)
            told = [self.comm.share(f"measures/{k}", json.dumps(own) if k == self.comm.rank else None) for k in ranks]
            self._names = list(dict.fromkeys(name for text in told for name in json.loads(text)))
        return self._names


class Choice:
    """Who evaluates the next model: rank 0 alone, or all ranks. By measured seconds; no result depends on it."""

    def __init__(self, where: Literal["auto", "server", "workers"], ranks: int) -> None:
        self.where, self.ranks = where, ranks
        self._alone: float | None = None
        self._together: float | None = None
        self._known: set[bool] = set()

    def observe(self, together: bool, seconds: float) -> None:
        """The first of a kind does not count: it brings the rows to the device."""
        if together not in self._known:
            self._known.add(together)
        elif together:
            self._together = seconds
            # The same work by one rank takes no longer than so: what was measured before may have been an exception.
            self._alone = min(self._alone or math.inf, seconds * self.ranks)
        else:
            self._alone = seconds

    def together(self, beside: float, send: float) -> bool:
        """`beside`: seconds that rank 0 has while others train; `send`: those of one broadcast of the model."""
        if self.where != "auto" or self.ranks == 1:
            return self.where == "workers" and self.ranks > 1
        if self._alone is None:
            return False
        together = self._alone / self.ranks + send if self._together is None else self._together
        return spreading_pays(self._alone, together, beside)


def spreading_pays(alone: float, together: float, beside: float) -> bool:
    """Rank 0 alone holds the others up by what it could not do beside their training, all ranks by the whole."""
    return together < alone - max(0.0, beside)


def measured(module: nn.Module, task: Task, data: Dataset, rows: Rows, batch_size: int) -> dict[str, float]:
    """By name: test_loss and what else the task measures on these rows of the data."""
    return named(task, _added(module, task, data, rows, rows.in_order(batch_size)).means())


def named(task: Task, means: dict[str, float]) -> dict[str, float]:
    return {f"test_{name}": value for name, value in task.metrics(means).items()}


@torch.no_grad()
def _added(
    module: nn.Module,
    task: Task,
    data: Dataset,
    rows: Rows,
    batches: Iterable[Batch],
    tick: Callable[[], None] = lambda: None,
) -> "Sums":
    sums = Sums(rows.device)
    with in_blocks():
        for x, y in batches:
            tick()
            given, wanted = task.batch(normalise(x, data, rows.dtype), y)
            sums.add(task.measure(*task.align(module(given), wanted)))
    return sums


class Sums:
    """Exact sums of values by name, in four words each: wholes, fractions, values beyond what they hold, all values."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[str, list[Tensor]] = {}
        self._count = 0
        self._words: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._words, *self._held]))

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            own = value.detach().reshape(-1)
            # A piece of something larger would keep all of it.
            own = own if own.nbytes == own.untyped_storage().nbytes() else own.clone()
            self._held.setdefault(name, []).append(own)
            self._count += own.numel()
        if self._count > HELD:
            self._settle()

    def _settle(self) -> None:
        """Add up what is held: once for many batches, for each operation takes its time, however small."""
        for name, values in self._held.items():
            words = _in_words(torch.cat(values).to(self.device))
            self._words[name] = self._words[name] + words if name in self._words else words
        self._held, self._count = {}, 0

    def table(self, names: list[str]) -> Tensor:
        """A row of words a name, of zeros for one that was not added; in the last one, how many have no row."""
        self._settle()
        none = torch.zeros(4, dtype=torch.int64, device=self.device)
        others = none + len(self._words.keys() - set(names))
        return torch.stack([*(self._words.get(name, none) for name in names), others])

    def means(self) -> dict[str, float]:
        self._settle()
        return {name: mean(words) for name, words in self._words.items()}


def _in_words(values: Tensor) -> Tensor:
    count = torch.full((), values.numel(), device=values.device)
    if values.dtype == torch.bool:  # hits
        none = torch.zeros_like(count)
        return torch.stack([values.sum(), none, none, count])
    real = values.double()
    fits = real.abs() <= LARGEST
    real = torch.where(fits, real, 0.0)
    whole = real.round()
    fraction = ((real - whole) * SCALE).round()
    return torch.stack([whole.long().sum(), fraction.long().sum(), (~fits).sum(), count])


def mean(words: Tensor) -> float:
    whole, fraction, beyond, count = words.tolist()
    return float("inf") if beyond else (whole + fraction / SCALE) / max(1, count)
