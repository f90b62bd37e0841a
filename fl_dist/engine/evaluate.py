"""The task's metrics of the global model on the test set, from sums that do not depend on order."""

import torch
from torch import Tensor, nn

from fl_dist.data import Dataset, normalise
from fl_dist.engine.flat import Flat
from fl_dist.engine.rows import Rows
from fl_dist.engine.world import World
from fl_dist.tasks import Task

SCALE = 2.0**36
LARGEST = 2.0**30
"""A value beyond it makes the mean infinite."""


class Evaluator:
    """Holds the test data; borrows the world's twin model."""

    def __init__(self, world: World, batch_size: int) -> None:
        self.world, self.batch_size = world, batch_size
        data, most = world.dataset, 1e9 * world.config.topology.data_memory
        self.rows = Rows(data.x_test, data.y_test, world.device, world.samples.dtype, most)

    def __call__(self, x: Tensor, buffers: Tensor) -> dict[str, float]:
        model: Flat = self.world.twin
        model.bind(x)
        model.buffers.write(buffers)
        model.module.eval()
        return measured(model.module, self.world.task, self.world.dataset, self.rows, self.batch_size)


@torch.no_grad()
def measured(module: nn.Module, task: Task, data: Dataset, rows: Rows, batch_size: int) -> dict[str, float]:
    """By name: test_loss and what else the task measures on these rows of the data."""
    sums = Sums(rows.device)
    for x, y in rows.in_order(batch_size):
        given, wanted = task.batch(normalise(x, data, rows.dtype), y)
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
