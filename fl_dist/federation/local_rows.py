"""Rows that only their own worker can read (`data.local`), and what other ranks know of them.

A worker sends rank 0 the shapes and types of its rows, their number, how many are of each class, and a hash by which a
resumed run recognises them. Rank 0 compares shapes and types, and sends the numbers of rows to all ranks.
"""

import json
from typing import Any

import numpy as np

from fl_dist.common.hashing import hash_tensors
from fl_dist.common.rows import describe_rows, tensors_of
from fl_dist.config import Config, ConfigError
from fl_dist.data import Dataset
from fl_dist.data.dataset import fill_empty_splits
from fl_dist.data.dirichlet import RowLists
from fl_dist.data.partition import hold_out
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.federation.client_rows import ClientRows, count_classes, hash_partition, own_client
from fl_dist.models import ModelInterface

Summary = dict[str, Any]
"""What a worker sends of its rows: their `kind`, `count` and `hash`."""


def gather_local_rows(config: Config, data: Dataset, interface: ModelInterface, group: ProcessGroup) -> ClientRows:
    """The rows of all clients by number; this rank holds those of its own client."""
    client, summaries = own_client(group), _gather_summaries(data, interface, group)
    counts = [summary["count"] for summary in summaries.values()]
    sizes = json.loads(group.store.broadcast_text("sizes", json.dumps(counts) if group.rank == 0 else None))
    firsts = np.cumsum([0, *sizes])
    rows = [np.arange(first, first + size) for first, size in zip(firsts, sizes, strict=False)]
    training, validation = hold_out(rows, config.clients.validation, int(firsts[-1]), config.seed)
    first = 0 if client is None else int(firsts[client])
    own_rows = [] if client is None else [training[client] - first]
    class_counts = _gather_class_counts(data, own_rows, group)
    hashes = {f"data of client {c}": summary["hash"] for c, summary in summaries.items()}
    hashes |= {"partition": hash_partition(training)}
    if group.rank == 0:
        hashes["data"] = hash_tensors([*tensors_of(data.x_test), data.y_test])
    return ClientRows(data, training, validation, lambda: class_counts, lambda: hashes, first, group.workers)


def _gather_summaries(data: Dataset, interface: ModelInterface, group: ProcessGroup) -> dict[int, Summary]:
    """By client: of all of them on rank 0, of this rank's own elsewhere."""
    kind, client = _describe_kind(data, interface), own_client(group)
    hash_of_rows = hash_tensors([*tensors_of(data.x_train), data.y_train])
    own = {"kind": kind, "count": len(data.y_train), "hash": hash_of_rows}
    texts = _gather(group, "rows", json.dumps(own))
    if group.rank:
        return {} if client is None else {client: own}
    summaries, hosts = dict(enumerate(map(json.loads, texts))), group.hosts()
    for other, summary in summaries.items():
        _compare_kinds(kind, summary["kind"], f"client {other} on {hosts[group.workers[other]]}")
    return summaries


def _describe_kind(data: Dataset, interface: ModelInterface) -> dict[str, Any]:
    """What has to be equal on all ranks, by name."""
    filled = fill_empty_splits(data)
    x, y = filled.x_train, filled.y_train
    return {
        "rows of shape": describe_rows(x, lambda tensor: list(tensor.shape[1:])),
        "rows of type": describe_rows(x, lambda tensor: str(tensor.dtype).removeprefix("torch.")),
        "targets of shape": list(y.shape[1:]),
        "targets of type": str(y.dtype).removeprefix("torch."),
        "a number of classes of": data.classes,
        "a vocabulary of": interface.vocabulary,
        "a number of outputs of": interface.outputs,
        "a mean of": list(data.mean),
        "a std of": list(data.std),
    }


def _compare_kinds(expected: dict[str, Any], kind: dict[str, Any], where: str) -> None:
    for name, value in kind.items():
        if value != expected[name]:
            raise ConfigError(
                f"the data of {where} has {name} {value}, that of rank 0 {expected[name]}; make them equal "
                "(data.classes and data.vocabulary say how many there are, also if a file does not show them)"
            )


def _gather_class_counts(data: Dataset, own_rows: RowLists, group: ProcessGroup) -> list[np.ndarray] | None:
    """On rank 0, how many training rows of each class each client has; None without labels, and elsewhere."""
    own = count_classes(data, own_rows)
    text = json.dumps(None if own is None else [counts.tolist() for counts in own])
    texts = _gather(group, "classes", text)
    counts = [counts for text in texts for counts in json.loads(text) or []]
    return [np.array(own) for own in counts] or None


def _gather(group: ProcessGroup, key: str, text: str) -> list[str]:
    """On rank 0 the texts of all workers, in the order of their clients; elsewhere nothing."""
    if group.rank in group.workers:
        group.store.set(f"{key}/{group.rank}", text)
    return [group.store.broadcast_text(f"{key}/{rank}", None) for rank in group.workers] if group.rank == 0 else []
