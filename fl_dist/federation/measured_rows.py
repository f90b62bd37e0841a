"""The rows that a diagnostic's question is about, and this rank's share of them in batches."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.common.randomness import generator
from fl_dist.data import normalise
from fl_dist.diagnostics.base import ALL_ROWS, TEST_ROWS
from fl_dist.federation.batch_loader import BatchLoader
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.measurement_share import MeasurementShare


class MeasuredRows:
    def __init__(self, experiment: Experiment, share: MeasurementShare, progress: Callable[[], None]) -> None:
        """`progress` is called once per batch."""
        self._experiment, self._share, self._progress = experiment, share, progress
        self._batch_size = experiment.config.evaluate.batch_size
        self._subsets: dict[int, Tensor] = {}

    def select(self, selection: int) -> Tensor:
        """Row numbers: of the test set, of one client, of all clients or so many of them."""
        if selection == TEST_ROWS:
            return torch.arange(len(self._experiment.dataset.y_test))
        if selection < TEST_ROWS:
            return self._experiment.client_data.rows[TEST_ROWS - 1 - selection]
        if selection == ALL_ROWS or selection >= len(self.all):
            return self.all
        if selection not in self._subsets:
            rng = generator(self._experiment.config.seed, "diagnostics rows")
            drawn = rng.choice(len(self.all), selection, replace=False)
            self._subsets[selection] = self.all[torch.from_numpy(drawn).sort().values]
        return self._subsets[selection]

    @cached_property
    def all(self) -> Tensor:
        """Training rows of all clients."""
        return torch.cat(self._experiment.client_data.rows)

    def batches(self, rows: Tensor) -> Iterator[Batch]:
        """Training rows that this rank holds, in pieces of `evaluate.batch_size`."""
        return self._load(rows.split(self._batch_size), self._experiment.client_data.data)

    def own_batches(self, selection: int) -> Iterator[Batch]:
        """This rank's share of the rows, in pieces of the same size."""
        rows = self.select(selection)
        if selection == TEST_ROWS:
            return self._load(rows.split(self._batch_size)[self._share.test_pieces], self._experiment.test)
        return self._load(self._share.training_pieces(rows, self._batch_size), self._experiment.client_data.data)

    def _load(self, pieces: Sequence[Tensor], loader: BatchLoader) -> Iterator[Batch]:
        experiment = self._experiment
        for x, y in loader.load(pieces):
            self._progress()
            yield experiment.task.batch(normalise(x, experiment.dataset, loader.dtype, loader.image_format), y)
