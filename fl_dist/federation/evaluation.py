"""The task's metrics of the global model on the test set, the same on any number of ranks."""

import json
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_dist.algorithms.core import Batch
from fl_dist.data import Dataset, normalise
from fl_dist.distributed import fault_injection
from fl_dist.distributed.bf16 import forward
from fl_dist.distributed.devices import synchronizer
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.federation.batch_loader import BatchLoader
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.measurement_share import MeasurementShare, Where
from fl_dist.federation.metric_sums import MetricSums, bits_table, mean_of_words, read_bits_table
from fl_dist.tasks import Task


class EvaluationResult(NamedTuple):
    """What an evaluation finds; nothing on ranks other than 0."""

    metrics: dict[str, float]
    """Of the test set."""
    clients: list[float]
    """The task's primary metric on each client's own validation rows, of the clients that have some."""


class Evaluator:
    """Evaluates a model, by this rank alone or by all; borrows the experiment's `eval_model`."""

    def __init__(self, experiment: Experiment, group: ProcessGroup) -> None:
        self.experiment, self.group, self.share = experiment, group, MeasurementShare(experiment, group)
        self._names: list[str] = []
        """What the task measures, as all ranks agreed."""

    def evaluate_alone(self, x: Tensor, buffers: Tensor, done: int) -> EvaluationResult:
        """Of the model after `done` rounds."""
        with self._activity(done):  # includes reading from the device, which may hang
            metrics = self._measure_alone(x, buffers)
            clients = self._client_metrics(range(len(self.experiment.client_data.validated_clients)))
            return EvaluationResult(metrics, read_bits_table(clients))

    def evaluate_together(self, x: Tensor, buffers: Tensor, done: int) -> EvaluationResult:
        """The same by all ranks, each for its share of the same batches and clients; rank 0 has the numbers."""
        with self._activity(done):
            sums = self._measure(x, buffers, self.share.test_pieces)
            own_clients = self.share.clients(self.experiment.client_data.validated_clients)
            clients = self._client_metrics(own_clients).to(self.group.device)
            synchronizer(self.group.device)()  # before all ranks wait for each other
        names = self._agree_on_names(sums.names)
        words = sums.table(names)
        self.group.collectives.reduce(words)
        if len(clients):
            self.group.collectives.reduce(clients)
        if self.group.rank:
            return EvaluationResult({}, [])
        *known, (others, *_) = words.cpu()
        means = {name: mean_of_words(row) for name, row in zip(names, known, strict=True)}
        metrics = self._measure_alone(x, buffers) if others else self.experiment.task.metrics(means)
        return EvaluationResult(metrics, read_bits_table(clients))

    def _activity(self, done: int) -> AbstractContextManager[None]:
        return self.group.failure_detector.activity(f"the evaluation of round {done}")

    def _measure_alone(self, x: Tensor, buffers: Tensor) -> dict[str, float]:
        return self.experiment.task.metrics(self._measure(x, buffers, slice(None)).means())

    def _measure(self, x: Tensor, buffers: Tensor, pieces: slice) -> MetricSums:
        """What the task measures on these pieces of the test rows."""
        experiment, model = self.experiment, self.experiment.eval_model
        model.bind(x)
        model.buffers.write(buffers)
        if model.module.training:
            model.module.eval()
        batches = experiment.test.sequential_batches(experiment.config.evaluate.batch_size, pieces)
        return self._measure_batches(experiment.test, batches)

    def _measure_batches(self, rows: BatchLoader, batches: Iterable[Batch]) -> MetricSums:
        experiment = self.experiment
        module, precision = experiment.eval_model.module, experiment.config.local.precision
        return _sum_batches(module, experiment.task, experiment.dataset, rows, batches, precision, self._progress)

    def _client_metrics(self, positions: Iterable[int]) -> Tensor:
        """A table of bits with the metric of these of the clients with validation rows, by the model just measured."""
        experiment, data, task = self.experiment, self.experiment.client_data, self.experiment.task
        numbers = []
        for position in positions:
            client = data.validated_clients[position]
            batches = data.validation_batches(client, experiment.config.evaluate.batch_size)
            sums = self._measure_batches(data.data, batches)
            numbers.append((position, task.metrics(sums.means())[task.primary_metric.name]))
        return bits_table(len(data.validated_clients), numbers)

    def _progress(self) -> None:
        self.group.failure_detector.progress()
        fault_injection.point("evaluate")

    def _agree_on_names(self, own: list[str]) -> list[str]:
        """Names of all ranks' sums, agreed on once: a rank may have no batch, and names may depend on the batch."""
        if not self._names:
            ranks = range(self.group.size)
            texts = [json.dumps(own) if rank == self.group.rank else None for rank in ranks]
            shared = [self.group.store.broadcast_text(f"measures/{k}", text) for k, text in enumerate(texts)]
            self._names = list(dict.fromkeys(name for text in shared for name in json.loads(text)))
        return self._names


class EvaluationPlacement:
    """Who evaluates the next model: rank 0 alone, or all ranks. By measured seconds; no result depends on it."""

    def __init__(self, where: Where, ranks: int) -> None:
        self.where, self.ranks = where, ranks
        self._alone: float | None = None
        self._together: float | None = None
        self._known: set[bool] = set()

    def observe(self, together: bool, seconds: float) -> None:
        """The first of each kind does not count: it includes copying the rows to the device."""
        if together not in self._known:
            self._known.add(together)
        elif together:
            self._together = seconds
            # One rank alone takes at most this long: the earlier measurement may have been an outlier.
            self._alone = min(self._alone or math.inf, seconds * self.ranks)
        else:
            self._alone = seconds

    def uses_all_ranks(self, idle: float, send: float) -> bool:
        """`idle`: seconds that rank 0 has while others train; `send`: those of one broadcast of the model."""
        if self.where != "auto" or self.ranks == 1:
            return self.where == "workers" and self.ranks > 1
        if self._alone is None:
            return False
        together = self._alone / self.ranks + send if self._together is None else self._together
        # Rank 0 alone delays the others by what it cannot do while they train; all ranks are delayed by all of it.
        return together < self._alone - max(0.0, idle)


def evaluate_rows(
    module: nn.Module, task: Task, data: Dataset, rows: BatchLoader, batch_size: int, precision: str
) -> dict[str, float]:
    """The task's metrics on these rows of the data."""
    batches = rows.sequential_batches(batch_size)
    return task.metrics(_sum_batches(module, task, data, rows, batches, precision).means())


@torch.no_grad()
def _sum_batches(
    module: nn.Module,
    task: Task,
    data: Dataset,
    rows: BatchLoader,
    batches: Iterable[Batch],
    precision: str,
    progress: Callable[[], None] = lambda: None,
) -> MetricSums:
    sums = MetricSums(rows.device)
    for x, y in batches:
        progress()
        inputs, targets = task.batch(normalise(x, data, rows.dtype, rows.image_format), y)
        sums.add(task.measure(*task.align(forward(module, inputs, precision), targets)))
    return sums
