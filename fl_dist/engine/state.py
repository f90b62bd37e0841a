"""Per-client variables: they live on the worker that last ran the client and move to the one that runs it next."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fl_dist.core import Vars
from fl_dist.machine.comm import Comm
from fl_dist.machine.copies import HOST, Copies

Template = dict[str, tuple[tuple[int, ...], torch.dtype]]
Read = Callable[[int], dict[str, Tensor] | None]


class ClientStates:
    """This rank's share of the clients' variables, in host memory and, beyond `room` bytes, in mapped files."""

    def __init__(
        self,
        template: Template,
        comm: Comm,
        saved: Read,
        room: float = float("inf"),
        spill: Path | None = None,
        copies: Copies = HOST,
    ) -> None:
        self.template, self.comm, self._saved, self._copies = template, comm, saved, copies
        self._sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in template.values()]
        self._clients_in_memory = room // max(1, sum(map(copies.room, self._sizes)))
        self._spill = spill
        self._held: dict[int, dict[str, Tensor]] = {}
        self._mapped: set[int] = set()
        self.home: dict[int, int] = {}
        """Client -> the rank that holds its variables; the same on every rank."""
        self.unsaved: set[int] = set()
        self._pending: dict[int, set[int]] = {}
        """Clients that were handed to a save whose fate is not known, by its round."""

    def move(self, assignment: Mapping[int, int]) -> None:
        """Send and fetch what the round's assignment asks for."""
        if not self.template:
            return
        me = self.comm.rank
        moves = [(c, self.home[c], to) for c, to in sorted(assignment.items()) if self.home.get(c, to) != to]
        if any(source == me for _, source, _ in moves):
            self._copies.arrive()
        sends = [(self._pack(self._held.pop(c, None)), to) for c, source, to in moves if source == me]
        self._mapped &= self._held.keys()
        arriving = {c: self._empty() for c, _, to in moves if to == me}
        self.comm.exchange(sends, [(arriving[c], source) for c, source, to in moves if to == me])
        for client, buffer in arriving.items():
            if buffer[-1]:
                self._hold(client, self._unpack(buffer))
        # A variable that has not been saved stays unsaved at its new home.
        self.unsaved -= {c for c, source, _ in moves if source == me}
        self.unsaved |= set(arriving)
        self.home.update(assignment)

    def load(self, client: int) -> Vars | None:
        """A copy of the client's variables on the device, or None before its first round."""
        if client not in self._held:
            saved = self._saved(client) if self.template else None
            if saved is None:
                return None
            self._hold(client, saved)
        return Vars(**self._copies.back(self._held[client]))

    def fetched(self, client: int) -> dict[str, Tensor] | None:
        """On rank 0, if all ranks call it: the client's variables, wherever they are; there they stay as they are."""
        self._copies.arrive()
        home, me = self.home.get(client, 0), self.comm.rank
        held = (self._held.get(client) or self._saved(client)) if self.template and home == me else None
        if home == 0:
            return held
        buffer = self._pack(held)
        self.comm.exchange([(buffer, 0)] if me == home else [], [(buffer, home)] if me == 0 else [])
        return self._unpack(buffer) if me == 0 and buffer[-1] else None

    def store(self, client: int, state: Vars) -> None:
        """Replace the client's variables; what others hold of the old ones stays as it was."""
        if self.template:
            self._hold(client, {n: self._copies.of(getattr(state, n)) for n in self.template})
            self.unsaved.add(client)

    def _hold(self, client: int, tensors: dict[str, Tensor]) -> None:
        """A client that came first stays in memory; one that finds no room goes to a file."""
        in_memory = len(self._held) - len(self._mapped) - (client in self._held and client not in self._mapped)
        if client not in self._mapped and in_memory < self._clients_in_memory:
            self._held[client] = tensors
            return
        self._mapped.add(client)
        self._copies.arrive()
        self._held[client] = {n: _mapped(t, self._spill) for n, t in tensors.items()}

    def hand_over(self, round_: int, everything: bool = False) -> dict[int, dict[str, Tensor]]:
        """For a save: the variables that have changed, or all, once they have arrived; nobody writes to them."""
        due = self._held.keys() if everything else self.unsaved & self._held.keys()
        self._pending[round_], self.unsaved = set(due), set()
        return {c: self._held[c] for c in sorted(due)}

    def decide(self, round_: int, whole: bool) -> None:
        """The fate of a save: after a failed one its clients are unsaved again."""
        handed = self._pending.pop(round_, set())
        if not whole:
            self.unsaved |= handed

    def doubt(self) -> None:
        """Before the last save: what is still being saved counts as unsaved, for its fate will not be told."""
        for round_ in list(self._pending):
            self.decide(round_, whole=False)

    def _empty(self) -> Tensor:
        """Room for a client's variables and a last byte: whether it has any (none if its first round failed)."""
        return torch.zeros(sum(self._sizes) + 1, dtype=torch.uint8)

    def _pack(self, held: dict[str, Tensor] | None) -> Tensor:
        if held is None:
            return self._empty()
        pieces = [held[n].contiguous().view(-1).view(torch.uint8) for n in self.template]
        return torch.cat([*pieces, torch.ones(1, dtype=torch.uint8)])

    def _unpack(self, buffer: Tensor) -> dict[str, Tensor]:
        held, start = {}, 0
        for (name, (shape, dtype)), size in zip(self.template.items(), self._sizes, strict=True):
            held[name] = buffer[start : start + size].clone().view(dtype).view(shape)
            start += size
        return held


def _mapped(tensor: Tensor, folder: Path | None) -> Tensor:
    """The tensor in a mapped file that has no name, so that it goes with the process."""
    handle, path = tempfile.mkstemp(dir=folder, prefix=".state-")
    try:
        os.posix_fallocate(handle, 0, max(1, tensor.nbytes))
        mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    finally:
        os.close(handle)
        os.unlink(path)
    return mapped.view(tensor.shape).copy_(tensor)
