"""One interface for one process and for many: with meeting.py the only importer of torch.distributed."""

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fl_dist.config import Communication, Topology
from fl_dist.machine.meeting import Lost, Wait, board, cut_after
from fl_dist.machine.place import Place
from fl_dist.machine.signals import REQUEUE, StopRequest

PATIENCE = 4.0
"""Seconds that the survivors of a failure wait for each other's words."""


class Comm(Protocol):
    rank: int
    size: int
    device: torch.device
    workers: Sequence[int]

    overlaps: bool
    """Rank 0 trains no clients, and so has time while the others do."""

    def broadcast(self, buffer: Tensor) -> None: ...
    def reduce(self, buffer: Tensor) -> None: ...
    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None: ...
    def post(self, key: str, text: str) -> None: ...
    def read(self, key: str) -> str | None: ...
    def forget(self, key: str) -> None: ...
    def share(self, key: str, text: str | None) -> str: ...
    def fail(self, message: str, code: int, passes: bool = False) -> None: ...
    def close(self) -> None: ...


class Alone:
    """One process is server and worker."""

    def __init__(self, topology: Topology) -> None:
        self.rank, self.size = 0, 1
        self.workers: Sequence[int] = (0,)
        self.device = pick_device(topology, 0, 1)
        self.overlaps = False
        self._posts: dict[str, str] = {}

    def broadcast(self, buffer: Tensor) -> None:
        pass

    def reduce(self, buffer: Tensor) -> None:
        pass

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        assert not sends and not receives

    def post(self, key: str, text: str) -> None:
        self._posts[key] = text

    def read(self, key: str) -> str | None:
        return self._posts.get(key)

    def forget(self, key: str) -> None:
        self._posts.pop(key, None)

    def share(self, key: str, text: str | None) -> str:
        assert text is not None
        return text

    def fail(self, message: str, code: int, passes: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class Cluster:
    """Rank 0 is the server; the other ranks, and rank 0 too if it is shared, are workers."""

    def __init__(self, place: Place, topology: Topology, comm: Communication, stop: StopRequest) -> None:
        shared = topology.server == "shared"
        if place.size == 1 and not shared:
            raise ValueError(
                "one rank leaves 0 workers beside the dedicated server: start at least 2 ranks, "
                "or set topology.server=shared"
            )
        self.rank, self.size, self._timeout = place.rank, place.size, comm.timeout
        self.workers: Sequence[int] = range(0 if shared else 1, self.size)
        self.overlaps = not shared
        backend = self._choose_device(place, topology)
        wait = Wait(place, comm.meeting, stop)
        self._board = board(place, wait).of(f"fl_dist/{_attempt(place)}/{next(_runs)}")
        self._board.limit(comm.timeout)
        self._meet(wait)
        group, timeout = dist.PrefixStore("group", self._board.store), timedelta(seconds=comm.timeout)
        with self._watch(), cut_after(comm.meeting, place.port):
            dist.init_process_group(backend, store=group, rank=self.rank, world_size=self.size, timeout=timeout)

    def _choose_device(self, place: Place, topology: Topology) -> str:
        """Take the device of this rank; the backend that goes with it."""
        self.device = pick_device(topology, place.local_rank, place.local_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        nccl = self.device.type == "cuda" and not topology.oversubscribe
        self._gloo_only = self.device.type == "cuda" and not nccl
        return "cpu:gloo,cuda:nccl" if nccl else "gloo"

    def _meet(self, wait: Wait) -> None:
        """Wait until every rank has come: torch's own wait for one that never does can neither speak nor be ended."""
        self.post(f"host/{self.rank}", host())
        while not self._all_are_here():
            try:
                wait.moment(self._absent)
            except Lost as e:
                self.fail(str(e), e.code, e.passes)
                raise

    def _all_are_here(self) -> bool:
        """Rank 0 looks, the others are told."""
        with self._watch():
            if self.read("failure") is not None:
                raise RuntimeError("a rank failed before all were here")
            if self.rank == 0 and not self._absent():
                self.post("met", "1")
            return self.read("met") is not None

    def _absent(self) -> list[int]:
        return [r for r in range(self.size) if self.read(f"host/{r}") is None]

    def broadcast(self, buffer: Tensor) -> None:
        with self._watch():
            dist.broadcast(buffer, src=0)

    def reduce(self, buffer: Tensor) -> None:
        # gloo reduces host memory only.
        staged = buffer.cpu() if self._gloo_only else buffer
        with self._watch():
            dist.reduce(staged, dst=0)
        if staged is not buffer:
            buffer.copy_(staged)

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Point to point, both lists in an order that all ranks share."""
        with self._watch():
            pending = [dist.isend(t, to) for t, to in sends] + [dist.irecv(t, source) for t, source in receives]
            for work in pending:
                assert work is not None
                work.wait()

    def post(self, key: str, text: str) -> None:
        self._board.post(key, text)

    def read(self, key: str) -> str | None:
        return self._board.read(key)

    def forget(self, key: str) -> None:
        self._board.forget(key)

    def share(self, key: str, text: str | None) -> str:
        """Rank 0's text, on every rank."""
        if text is not None:
            self.post(key, text)
        with self._watch():
            end = time.monotonic() + self._timeout
            while (shared := self.read(key)) is None:
                if self.read("failure") is not None or time.monotonic() > end:
                    raise RuntimeError("rank 0 did not answer")
                time.sleep(0.02)
        return shared

    def fail(self, message: str, code: int, passes: bool = False) -> None:
        """Tell the others why this rank ends, and whether a restart may mend it; then let them go."""
        told = {"rank": self.rank, "host": host(), "message": message, "code": code, "passes": passes}
        with contextlib.suppress(Exception):
            self._board.limit(PATIENCE)
            self.post("failure", json.dumps(told))
            self._leave()
            # Whoever interrupts a run that has not begun does not want to wait for it.
            self._wait_for_others(1.0 if code == REQUEUE else PATIENCE)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _watch(self) -> Any:
        try:
            yield
        except Lost:
            raise
        except RuntimeError as e:
            raise self._diagnose(e) from e

    def _leave(self) -> None:
        """Closing this rank's connections makes its peers notice too."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    def _diagnose(self, error: Exception) -> Lost:
        self._leave()
        try:
            self._board.limit(PATIENCE)
            missing = self._wait_for_others(PATIENCE)
            failure = self.read("failure")
            if failure is not None:
                told = json.loads(failure)
                message = f"rank {told['rank']} on {told['host']} failed: {told['message']}"
                return Lost(message, told["code"], passes=told["passes"])
            names = [f"rank {r} on {self.read(f'host/{r}') or 'an unknown host'}" for r in missing]
        except Exception:
            return Lost("rank 0, the server, was lost (killed, out of memory or hung)", ranks=[0])
        if names:
            # A rank in the middle of local training answers as little as a dead one.
            who = names[0] if len(names) == 1 else f"one of {' and '.join(names)}"
            return Lost(f"{who} was lost (killed, out of memory or hung)", ranks=missing)
        return Lost(f"the ranks lost touch: {str(error).splitlines()[0]}")

    def _wait_for_others(self, seconds: float) -> list[int]:
        """Say that this rank lives; the ranks that have come, but say nothing for so long, are returned."""
        self.post(f"alive/{self.rank}", "1")
        absent = {self.rank, *self._absent()}
        missing = [r for r in range(self.size) if r not in absent]
        end = time.monotonic() + seconds
        while missing and time.monotonic() < end:
            missing = [r for r in missing if self.read(f"alive/{r}") is None]
            if self.read("failure") is not None and self.rank != 0:
                break
            time.sleep(0.05)
        return missing


_runs = itertools.count()


def _attempt(place: Place) -> str:
    """torchrun's restarts may share a store, whose old keys must not be read; agents of several nodes do not count
    alike, but there the launchers give every attempt a store of its own."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if place.one_machine else "0"


def connect(place: Place | None, topology: Topology, comm: Communication, stop: StopRequest) -> Comm:
    return Alone(topology) if place is None else Cluster(place, topology, comm, stop)


def pick_device(topology: Topology, local_rank: int, ranks: int) -> torch.device:
    """The GPU of this local rank; CUDA_VISIBLE_DEVICES is what counts as there."""
    gpus = torch.cuda.device_count() if topology.device != "cpu" else 0
    if topology.device == "cuda" and not gpus:
        raise ValueError(
            "topology.device is cuda, but no GPU is visible: check CUDA_VISIBLE_DEVICES or use device auto"
        )
    if not gpus:
        return torch.device("cpu")
    if ranks > gpus and not topology.oversubscribe:
        raise ValueError(
            f"{ranks} ranks share {gpus} visible GPUs on this node: start {gpus} ranks a node, "
            "or set topology.oversubscribe=true to share GPUs over gloo"
        )
    return torch.device("cuda", local_rank % gpus)


def host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
