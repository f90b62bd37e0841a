"""Whose rows are which, and which of them this rank holds.

By default every rank holds all rows. With `clients.placement: process` a client's rows are on its worker alone. Then
rows are numbered client by client, so that a rank holds one range of these numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_dist.common.errors import DataError
from fl_dist.common.formatting import pluralize
from fl_dist.common.hashing import hash_tensors
from fl_dist.common.rows import select_rows, tensors_of
from fl_dist.config import Config, ConfigError
from fl_dist.data import Dataset, class_labels, datasets
from fl_dist.data.dataset import SPLITS, keep_splits
from fl_dist.data.dirichlet import RowLists
from fl_dist.data.partition import hold_out, partition_rows
from fl_dist.distributed.process_group import ProcessGroup

ClassCounts = Iterable[np.ndarray]


@dataclass(frozen=True)
class ClientRows:
    """The rows of all clients, by number, and the data set with those that this rank holds."""

    dataset: Dataset
    """The training rows that this rank holds, and the test rows if it has them."""
    training: RowLists
    """Numbers of the rows that each client trains on."""
    validation: RowLists
    """Numbers of the rows that each client holds out."""
    class_counts: Callable[[], ClassCounts | None]
    """Training rows of each client by class; None without labels, or where they are not known."""
    hashes: Callable[[], dict[str, str]]
    """Of the data and the partition, to compare ranks and attempts."""
    first: int = 0
    """Number of the first training row in `dataset`."""
    workers: Sequence[int] | None = None
    """The rank of each client if its rows are there alone."""


def check_workers(config: Config, group: ProcessGroup) -> None:
    """ConfigError unless each client has its worker, if it needs one."""
    clients, workers = config.clients.total, len(group.workers)
    if config.clients.placement == "process" and clients != workers:
        there = f"there {'is' if workers == 1 else 'are'} {workers}"
        raise ConfigError(
            f"clients.placement is process, so {pluralize(clients, 'client')} need as many workers, but {there}; "
            f"start {clients + 1} ranks (topology.server=shared: {clients}), or change clients.total"
        )


def own_client(group: ProcessGroup) -> int | None:
    """The client whose rows are on this rank, with one worker per client; none on a dedicated server."""
    return group.workers.index(group.rank) if group.rank in group.workers else None


def build_data(config: Config, group: ProcessGroup | None = None) -> Dataset:
    """The data set or, of local data, this rank's part of it; without a group, that of a dedicated server."""
    settings = {key: value for key, value in config.data.items() if key not in ("name", "local")}
    splits: tuple[str, ...] = SPLITS
    if config.data["local"]:
        client, has_test = (None, True) if group is None else (own_client(group), group.rank == 0)
        splits = tuple(
            split for split, is_needed in zip(SPLITS, (client is not None, has_test), strict=True) if is_needed
        )
        settings = _fill_client(settings, client)
    dataset = datasets.build(config.data["name"], settings, splits=splits)
    for split in splits:
        if not len(getattr(dataset, f"y_{split}")):
            raise DataError(f"data {config.data['name']} has no rows in x_{split}")
    return dataset if splits == SPLITS else keep_splits(dataset, splits)


def _fill_client(settings: dict[str, Any], client: int | None) -> dict[str, Any]:
    """The client's number, or `server`, in the place of {client} in paths."""
    name = "server" if client is None else str(client)
    return {
        key: value.replace("{client}", name) if isinstance(value, str) else value for key, value in settings.items()
    }


def build_clients(config: Config, data: Dataset) -> tuple[RowLists, RowLists]:
    """The training rows and the validation rows of each client."""
    if config.data["local"]:
        raise ConfigError(
            "data.local is true: the rows of each client are on its own worker, and can be read only there"
        )
    name, settings = config.partition["name"], {k: v for k, v in config.partition.items() if k != "name"}
    rows = partition_rows(name, settings, data.y_train.numpy(), config.clients.total, config.seed, data.client)
    return hold_out(rows, config.clients.validation, len(data.y_train), config.seed)


def divide_rows(config: Config, data: Dataset, group: ProcessGroup | None) -> ClientRows:
    """The rows of a data set that every rank can read; without a group this rank holds all of them."""
    training, validation = build_clients(config, data)

    def class_counts() -> Iterator[np.ndarray] | None:
        return count_classes(data, training)

    def hashes() -> dict[str, str]:
        rows = [*tensors_of(data.x_train), data.y_train, *tensors_of(data.x_test), data.y_test]
        return {"data": hash_tensors(rows), "partition": hash_partition(training)}

    everything = ClientRows(data, training, validation, class_counts, hashes)
    return everything if group is None or config.clients.placement == "balanced" else _keep_own(everything, group)


def _keep_own(everything: ClientRows, group: ProcessGroup) -> ClientRows:
    """Only the rows of this rank's client; what is known of the others is counted and hashed first."""
    counts, hashes, data = everything.class_counts(), everything.hashes(), everything.dataset
    known_counts = None if counts is None else list(counts)
    pairs = zip(everything.training, everything.validation, strict=True)
    own_rows = [np.unique(np.concatenate(pair)) for pair in pairs]
    firsts, client = np.cumsum([0, *map(len, own_rows)]), own_client(group)

    def renumber(parts: RowLists) -> RowLists:
        return [first + np.searchsorted(own, part) for first, own, part in zip(firsts, own_rows, parts, strict=False)]

    own = torch.from_numpy(own_rows[client] if client is not None else own_rows[0][:0])
    return ClientRows(
        replace(data, x_train=select_rows(data.x_train, own), y_train=data.y_train[own], client=None),
        renumber(everything.training),
        renumber(everything.validation),
        lambda: known_counts,
        lambda: hashes,
        0 if client is None else int(firsts[client]),
        group.workers,
    )


def count_classes(data: Dataset, rows: RowLists) -> Iterator[np.ndarray] | None:
    """How many of each client's rows are of each class; None without labels."""
    labels = class_labels(data.y_train.numpy())
    return None if labels is None else (np.bincount(labels[own], minlength=data.classes) for own in rows)


def hash_partition(rows: RowLists) -> str:
    sizes: Tensor = torch.tensor([len(own) for own in rows])
    return hash_tensors([torch.from_numpy(np.concatenate(rows).astype(np.int64)), sizes])
