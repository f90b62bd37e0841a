"""The task's metrics of the global model on the test set, from sums that do not depend on order."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fl_dist.data import Dataset, normalise
from fl_dist.engine.client import place
from fl_dist.engine.flat import Flat
from fl_dist.engine.world import World
from fl_dist.tasks import Task

SCALE = 2.0**36
LARGEST = 2.0**30
"""A value beyond it makes the mean infinite."""


class Evaluator:
    """Holds the test data on the device; borrows the world's twin model."""

    def __init__(self, world: World, batch_size: int) -> None:
        self.world, self.batch_size = world, batch_size
        data, device, dtype = world.dataset, world.device, world.samples.dtype
        self.data = replace(data, x_test=place(data.x_test, device, dtype), y_test=place(data.y_test, device, dtype))

    def __call__(self, x: Tensor, buffers: Tensor) -> dict[str, float]:
        model: Flat = self.world.twin
        model.bind(x)
        model.buffers.write(buffers)
        model.module.eval()
        return measured(model.module, self.world.task, self.data, self.world.samples.dtype, self.batch_size)


@torch.no_grad()
def measured(module: nn.Module, task: Task, data: Dataset, dtype: torch.dtype, batch_size: int) -> dict[str, float]:
    """By name: test_loss and what else the task measures on the test rows."""
    x, y = data.x_test, place(data.y_test, data.x_test.device, dtype)
    sums = Sums(x.device)
    for rows, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
        given, wanted = task.batch(normalise(rows, data, dtype), targets)
        sums.add(task.measure(*task.align(module(given), wanted)))
    return {f"test_{name}": value for name, value in task.metrics(sums.means()).items()}


class Sums:
    """Exact sums of values by name, in two words each: wholes and fractions."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            real = value.detach().double().reshape(-1)
            fits = real.abs() <= LARGEST
            real = torch.where(fits, real, 0.0)
            whole = real.round()
            fraction = ((real - whole) * SCALE).round()
            words = torch.stack([whole.long().sum(), fraction.long().sum(), (~fits).sum()])
            self._sums[name] = self._sums.get(name, torch.zeros(3, dtype=torch.int64, device=self.device)) + words
            self._counts[name] = self._counts.get(name, 0) + real.numel()

    def means(self) -> dict[str, float]:
        return {name: _mean(words.tolist(), self._counts[name]) for name, words in self._sums.items()}


def _mean(words: list[int], count: int) -> float:
    whole, fraction, beyond = words
    return float("inf") if beyond else (whole + fraction / SCALE) / max(1, count)
