"""Per-client variables: they stay on the worker that last ran the client, and move to the one that runs it next."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fl_dist.algorithms.core import Vars
from fl_dist.distributed.collectives import Collectives
from fl_dist.distributed.host_transfer import NO_TRANSFER, HostTransfer
from fl_dist.storage.checkpoint import (
    Checkpoint,
    CorruptCheckpointError,
    load_checkpoint,
    newest_checkpoint_round,
    read_client,
)

StateTemplate = dict[str, tuple[tuple[int, ...], torch.dtype]]
ClientState = dict[str, Tensor]
ReadClient = Callable[[int], ClientState | None]


class ClientStateStore:
    """This rank's share of the client states: up to `max_bytes` in host memory, the rest in memory-mapped files."""

    def __init__(
        self,
        template: StateTemplate,
        rank: int,
        collectives: Collectives,
        read_saved: ReadClient,
        max_bytes: float = float("inf"),
        spill_folder: Path | None = None,
        transfer: HostTransfer = NO_TRANSFER,
    ) -> None:
        self.template, self.rank, self.collectives = template, rank, collectives
        self._read_saved, self._spill_folder, self._transfer = read_saved, spill_folder, transfer
        self._sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in template.values()]
        self._max_in_memory = max_bytes // max(1, sum(map(transfer.pinned_bytes, self._sizes)))
        self._states: dict[int, ClientState] = {}
        self._spilled: set[int] = set()
        self.homes: dict[int, int] = {}
        """Client -> the rank that holds its state; the same on every rank."""
        self.dirty: set[int] = set()
        """Clients whose state has changed since their last checkpoint."""
        self._pending: dict[int, set[int]] = {}
        """Round of a checkpoint whose result is unknown -> its clients."""

    def move(self, assignment: Mapping[int, int]) -> None:
        """Send and receive states so that each is on the rank that the assignment names."""
        if not self.template:
            return
        moves = [(c, self.homes[c], to) for c, to in sorted(assignment.items()) if self.homes.get(c, to) != to]
        outgoing = [(c, to) for c, source, to in moves if source == self.rank]
        if outgoing:
            self._transfer.synchronize()
        sends = [(self._pack(self._states.pop(c, None)), to) for c, to in outgoing]
        self._spilled &= self._states.keys()
        arriving = {c: self._new_buffer() for c, _, to in moves if to == self.rank}
        self.collectives.exchange(sends, [(arriving[c], source) for c, source, to in moves if to == self.rank])
        for client, buffer in arriving.items():
            if buffer[-1]:
                self._put(client, self._unpack(buffer))
        # Whether its old home has saved it is unknown here.
        self.dirty -= {c for c, _ in outgoing}
        self.dirty |= set(arriving)
        self.homes.update(assignment)

    def load(self, client: int) -> Vars | None:
        """A copy of the client's state on the device; None before its first round."""
        if client not in self._states:
            saved = self._read_saved(client) if self.template else None
            if saved is None:
                return None
            self._put(client, saved)
        return Vars(**self._transfer.to_device(self._states[client]))

    def fetch_to_server(self, client: int) -> ClientState | None:
        """Called by all ranks: rank 0 gets the client's state, which also stays where it is."""
        self._transfer.synchronize()
        home, is_here = self.homes.get(client, 0), self.homes.get(client, 0) == self.rank
        state = (self._states.get(client) or self._read_saved(client)) if self.template and is_here else None
        if home == 0:
            return state
        buffer = self._pack(state)
        self.collectives.exchange([(buffer, 0)] if is_here else [], [(buffer, home)] if self.rank == 0 else [])
        return self._unpack(buffer) if self.rank == 0 and buffer[-1] else None

    def store(self, client: int, state: Vars) -> None:
        """Replace the client's state; references to the old tensors stay valid."""
        if self.template:
            self._put(client, {n: self._transfer.to_host(getattr(state, n)) for n in self.template})
            self.dirty.add(client)

    def _put(self, client: int, state: ClientState) -> None:
        """The first clients stay in memory; those beyond the limit are spilled to files."""
        is_spilled = client in self._spilled
        others_in_memory = len(self._states) - len(self._spilled) - (client in self._states and not is_spilled)
        if is_spilled or others_in_memory >= self._max_in_memory:
            self._spilled.add(client)
            self._transfer.synchronize()
            state = {n: _copy_to_mapped_file(t, self._spill_folder) for n, t in state.items()}
        self._states[client] = state

    def collect_dirty(self, round_: int, everything: bool = False) -> dict[int, ClientState]:
        """For a checkpoint: the states that have changed, or all; their tensors are never written to again."""
        clients = self._states.keys() if everything else self.dirty & self._states.keys()
        self._pending[round_], self.dirty = set(clients), set()
        return {c: self._states[c] for c in sorted(clients)}

    def acknowledge(self, round_: int, is_committed: bool) -> None:
        """The result of a checkpoint: if it failed, its clients are dirty again."""
        clients = self._pending.pop(round_, set())
        if not is_committed:
            self.dirty |= clients

    def requeue_pending(self) -> None:
        """Before the last checkpoint: clients of pending ones are dirty again, because no result will follow."""
        for round_ in list(self._pending):
            self.acknowledge(round_, is_committed=False)

    def _new_buffer(self) -> Tensor:
        """Space for a state, and a last byte that says whether there is one (not if the first round failed)."""
        return torch.zeros(sum(self._sizes) + 1, dtype=torch.uint8)

    def _pack(self, state: ClientState | None) -> Tensor:
        if state is None:
            return self._new_buffer()
        pieces = [state[n].contiguous().view(-1).view(torch.uint8) for n in self.template]
        return torch.cat([*pieces, torch.ones(1, dtype=torch.uint8)])

    def _unpack(self, buffer: Tensor) -> ClientState:
        pieces = zip(self.template.items(), buffer[:-1].split(self._sizes), strict=True)
        return {name: piece.clone().view(dtype).view(shape) for (name, (shape, dtype)), piece in pieces}


def _copy_to_mapped_file(tensor: Tensor, folder: Path | None) -> Tensor:
    """A copy in a memory-mapped file without a name, which is freed with the process."""
    descriptor, path = tempfile.mkstemp(dir=folder, prefix=".state-")
    try:
        os.posix_fallocate(descriptor, 0, max(1, tensor.nbytes))
        mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return mapped.view(tensor.shape).copy_(tensor)


def client_reader(root: Path, start: Checkpoint | None) -> ReadClient:
    """Reads a client's variables from the checkpoint that the run resumes from."""
    index = dict(start.index) if start else {}

    def read(client: int) -> ClientState | None:
        if client not in index:
            return None
        try:
            return read_client(root, index[client])
        except CorruptCheckpointError:
            # Meanwhile rank 0 may have copied them to a newer checkpoint.
            index.update(load_checkpoint(root, newest_checkpoint_round(root)).index)
            return read_client(root, index[client])

    return read
