"""comm.reduce=gather: every client's update on rank 0, instead of their sum."""

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from fl_dist.distributed.process_group import ProcessGroup


def gather_updates(
    own: MutableMapping[int, Tensor], assignment: Mapping[int, int], model: Tensor, group: ProcessGroup
) -> Tensor | None:
    """On rank 0 the updates [clients, entries] of all clients in `assignment`, in its order, in host memory.

    `own`: by client, the updates of this rank, which are then freed one by one; `assignment`: on rank 0, the rank of
    each client that was trained.
    """
    if group.rank != 0:
        group.collectives.exchange([(own[client], 0) for client in assignment if client in own], [])
        own.clear()
        return None
    updates = torch.empty(len(assignment), len(model), dtype=model.dtype)
    rows = dict(zip(assignment, updates, strict=True))
    group.collectives.exchange([], [(rows[client], rank) for client, rank in assignment.items() if rank != 0])
    for client in list(own):
        rows[client].copy_(own.pop(client))
    return updates


def weighted_mean(updates: Tensor, weights: Sequence[float]) -> Tensor:
    """In float64, added in the order of the rows."""
    total = torch.zeros(updates.shape[1], dtype=torch.float64)
    for row, weight in zip(updates, weights, strict=True):
        total.add_(row, alpha=weight)
    return total.div_(sum(weights))
