"""One interface for one process and for many: the only importer of torch.distributed."""

import contextlib
import functools
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fl_dist.config import Communication, Topology
from fl_dist.place import Place

MEETING = timedelta(minutes=10)
"""How long the first rank to start waits for the last."""
PATIENCE = 4.0
"""Seconds that the survivors of a failure wait for each other's words."""


class Lost(RuntimeError):
    """The job cannot go on: the message names the rank that failed, the code is the one it ended with."""

    def __init__(self, message: str, code: int = 1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.code, self.ranks = code, ranks

    def during(self, index: int, assignment: Mapping[int, int]) -> "Lost":
        """The same with the round, and the clients of the round that were the lost rank's."""
        clients = [c for c, rank in assignment.items() if rank in self.ranks]
        own = f", whose clients were {', '.join(map(str, clients))}" if clients else ""
        return Lost(f"{self} in round {index + 1}{own}", self.code) if self.ranks else self


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
    def fail(self, message: str, code: int) -> None: ...
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

    def fail(self, message: str, code: int) -> None:
        pass

    def close(self) -> None:
        pass


class Cluster:
    """Rank 0 is the server; the other ranks, and rank 0 too if it is shared, are workers."""

    def __init__(self, place: Place, topology: Topology, comm: Communication) -> None:
        shared = topology.server == "shared"
        if place.size == 1 and not shared:
            raise ValueError(
                "one rank leaves 0 workers beside the dedicated server: start at least 2 ranks, "
                "or set topology.server=shared"
            )
        self.rank, self.size = place.rank, place.size
        self.device = pick_device(topology, place.local_rank, place.local_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        nccl = self.device.type == "cuda" and not topology.oversubscribe
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        self._gloo_only = self.device.type == "cuda" and not nccl
        timeout = timedelta(seconds=comm.timeout)
        self._store = dist.PrefixStore(f"fl_dist/{_attempt(place)}/{next(_runs)}", _store(place))
        group = dist.PrefixStore("group", self._store)
        with self._watch():
            dist.init_process_group(backend, store=group, rank=self.rank, world_size=self.size, timeout=timeout)
        self.workers: Sequence[int] = range(0 if shared else 1, self.size)
        self.overlaps = not shared
        self._timeout = comm.timeout
        self._store.set(f"host/{self.rank}", host())

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
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def forget(self, key: str) -> None:
        self._store.delete_key(key)

    def share(self, key: str, text: str | None) -> str:
        """Rank 0's text, on every rank."""
        if text is not None:
            self._store.set(key, text)
        with self._watch():
            end = time.monotonic() + self._timeout
            while not self._store.check([key]):
                if self._store.check(["failure"]) or time.monotonic() > end:
                    raise RuntimeError("rank 0 did not answer")
                time.sleep(0.02)
        return self._store.get(key).decode()

    def fail(self, message: str, code: int) -> None:
        """Tell the others why this rank ends, then let them go."""
        told = {"rank": self.rank, "host": host(), "message": message, "code": code}
        with contextlib.suppress(Exception):
            self._store.set("failure", json.dumps(told))
            self._leave()
            self._wait_for_others()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _watch(self) -> Any:
        try:
            yield
        except RuntimeError as e:
            raise self._diagnose(e) from e

    def _leave(self) -> None:
        """Closing this rank's connections makes its peers notice too."""
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    def _diagnose(self, error: Exception) -> Lost:
        self._leave()
        try:
            missing = self._wait_for_others()
            failure = self.read("failure")
            if failure is not None:
                told = json.loads(failure)
                return Lost(f"rank {told['rank']} on {told['host']} failed: {told['message']}", told["code"])
            names = [f"rank {r} on {self.read(f'host/{r}') or 'an unknown host'}" for r in missing]
        except Exception:
            return Lost("rank 0, the server, was lost (killed, out of memory or hung)", ranks=[0])
        if names:
            # A rank in the middle of local training answers as little as a dead one.
            who = names[0] if len(names) == 1 else f"one of {' and '.join(names)}"
            return Lost(f"{who} was lost (killed, out of memory or hung)", ranks=missing)
        return Lost(f"the ranks lost touch: {str(error).splitlines()[0]}")

    def _wait_for_others(self) -> list[int]:
        """Say that this rank lives; the ranks that say nothing within PATIENCE are returned."""
        self._store.set(f"alive/{self.rank}", "1")
        missing = [r for r in range(self.size) if r != self.rank]
        end = time.monotonic() + PATIENCE
        while missing and time.monotonic() < end:
            missing = [r for r in missing if not self._store.check([f"alive/{r}"])]
            if self._store.check(["failure"]) and self.rank != 0:
                break
            time.sleep(0.05)
        return missing


_runs = itertools.count()


def _attempt(place: Place) -> str:
    """torchrun's restarts may share a store, whose old keys must not be read; agents of several nodes do not count
    alike, but there the launchers give every attempt a store of its own."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if place.one_machine else "0"


@functools.cache
def _store(place: Place) -> dist.Store:
    """Where the ranks meet; kept, because a process may run several configurations in turn."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun listens already
    if agent or not place.one_machine:
        listens = place.rank == 0 and not agent
        return dist.TCPStore(place.host, place.port, place.size, listens, MEETING, wait_for_workers=False)
    # All ranks are on this machine: nothing needs to listen on any other address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if place.rank != 0:
        return dist.TCPStore("127.0.0.1", place.port, place.size, is_master=False, timeout=MEETING)
    listener = socket.create_server(("127.0.0.1", place.port))
    return dist.TCPStore(
        "127.0.0.1", place.port, place.size, True, MEETING, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect(place: Place | None, topology: Topology, comm: Communication) -> Comm:
    return Alone(topology) if place is None else Cluster(place, topology, comm)


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
