"""The batches of each client: shuffled, augmented and normalised, the same on any worker."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from fl_dist.algorithms.core import Batch
from fl_dist.common.hook_contract import HookContractError, describe_value
from fl_dist.common.randomness import torch_generator
from fl_dist.common.rows import Rows
from fl_dist.config import Local
from fl_dist.data import normalise
from fl_dist.federation.batch_loader import BatchLoader
from fl_dist.federation.client_rows import ClientRows
from fl_dist.tasks import Task

DTYPES = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32, "bf16": torch.float32}
"""Of the weights, by `local.precision`."""
IMAGE_FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
Augment = Callable[[Tensor, torch.Generator], Tensor]


class ClientData:
    """The training data, and the rows of each client; batches can be had of the clients whose rows are here."""

    def __init__(
        self,
        client_rows: ClientRows,
        task: Task,
        augment: Augment,
        local: Local,
        device: torch.device,
        max_bytes: float,
    ) -> None:
        dataset = client_rows.dataset
        self.dataset, self.task, self.augment, self.local = dataset, task, augment, local
        self.dtype = DTYPES[local.precision]
        self.image_format = IMAGE_FORMATS[local.memory_format]
        self.data = BatchLoader(
            dataset.x_train, dataset.y_train, device, self.dtype, max_bytes, self.image_format, client_rows.first
        )
        """The training rows that this rank holds."""
        self.rows, self.validation = _to_tensors(client_rows.training), _to_tensors(client_rows.validation)
        """Numbers of the rows that each client trains on, and of those that it holds out."""
        self.counts = list(map(len, self.rows))
        """Training rows of each client."""
        self.validated_clients = [client for client, own in enumerate(self.validation) if len(own)]
        """Those that hold rows out."""

    def with_local(self, local: Local) -> "ClientData":
        """The same rows in other batches or epochs; precision and memory format stay as they are."""
        other = copy.copy(self)
        other.local = local
        return other

    def batch_size(self, client: int) -> int:
        size = self.local.batch_size
        return self.counts[client] if size == "full" else int(size)

    def steps(self, client: int) -> int:
        steps = self.local.epochs * -(-self.counts[client] // self.batch_size(client))
        return min(steps, self.local.steps or steps)

    def batches(self, client: int, seed: int, index: int) -> Iterator[Batch]:
        """All batches of the client's round: shuffled again each epoch, augmented, normalised."""
        noise = torch_generator(seed, "augment", index, client)
        for x, y in self.data.load(itertools.islice(self._pieces(client, seed, index), self.local.steps)):
            yield self.task.batch(self._normalise(self._augment(x, noise)), y)

    def _pieces(self, client: int, seed: int, index: int) -> Iterator[Tensor]:
        rows, size = self.rows[client], self.batch_size(client)
        if size == len(rows):
            yield from itertools.repeat(rows, self.local.epochs)
            return
        order = torch_generator(seed, "batches", index, client)
        for _ in range(self.local.epochs):
            epoch = rows[torch.randperm(len(rows), generator=order)]
            # Lazily: `local.steps` may need only a few of them.
            yield from (epoch[first : first + size] for first in range(0, len(epoch), size))

    def _augment(self, x: Rows, noise: torch.Generator) -> Rows:
        if not isinstance(x, Tensor):
            return x
        augmented = self.augment(x, noise)
        if not isinstance(augmented, Tensor) or augmented.dtype != x.dtype or len(augmented) != len(x):
            raise HookContractError(
                f"the augmentation returned {describe_value(augmented)} for {describe_value(x)}; "
                "keep the type and the number of rows"
            )
        return augmented

    def validation_batches(self, client: int, size: int) -> Iterator[Batch]:
        """The rows that the client holds out, as they are."""
        return self.data.load(self.validation[client].split(size))

    def plain_batches(self, client: int) -> Iterator[Batch]:
        """The client's data once, in order, without augmentation."""
        return self._load_plain(self.rows[client].split(self.batch_size(client)))

    def example_batch(self, size: int) -> Batch:
        """A batch of this size, of the first row that this rank holds."""
        return next(self._load_plain([torch.full((size,), self.data.first, dtype=torch.int64)]))

    def _load_plain(self, pieces: Iterable[Tensor]) -> Iterator[Batch]:
        for x, y in self.data.load(pieces):
            yield self.task.batch(self._normalise(x), y)

    def _normalise(self, x: Rows) -> Rows:
        return normalise(x, self.dataset, self.dtype, self.image_format)


def _to_tensors(rows: list[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(own, dtype=np.int64)) for own in rows]
