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
from fl_dist.config.schema import LONGEST
from fl_dist.machine import breakdown, faults
from fl_dist.machine.devices import Seat, compare, pick_device, seat, settle
from fl_dist.machine.meeting import Links, Lost, Wait, another, board, cut_after
from fl_dist.machine.place import Place
from fl_dist.machine.pulse import GRACE, PATIENCE, SILENCE, Failure, Pulse
from fl_dist.machine.signals import REQUEUE, StopRequest
from fl_dist.machine.wire import Wire

ENDLESS = timedelta(seconds=LONGEST)
"""No collective ends by its length: signs of life decide who is lost."""
POLL = (50e-6, 2e-3)
"""Seconds between two looks at a collective of a GPU: at first, and at most."""

WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""torch's own thread would end the process at an error, before this one can say what it was; torchrun asks for it."""


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
    def hosts(self) -> list[str]: ...

    def begins(self, index: int, assignment: dict[int, int]) -> None:
        """A round, and which rank has which clients: for what is said of a rank that is lost."""

    def doing(self, what: str) -> None:
        """What this rank is at, and has to get on with, tick by tick; empty: nothing of that kind."""

    def tick(self) -> None:
        """This rank gets on; Lost if another has failed meanwhile."""

    def leaves(self) -> None:
        """The last round is over: from now on a lost rank ends nobody else."""

    def trouble(self) -> str:
        """Why the job ends; empty as long as it does not."""
        ...

    def fail(self, message: str, code: int, passes: bool = False) -> None: ...
    def close(self) -> None: ...


class Alone:
    """One process is server and worker."""

    def __init__(self, topology: Topology) -> None:
        self.rank, self.size = 0, 1
        self.workers: Sequence[int] = (0,)
        self.device = pick_device(topology, 0)
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

    def hosts(self) -> list[str]:
        return [host()]

    def begins(self, index: int, assignment: dict[int, int]) -> None:
        pass

    def doing(self, what: str) -> None:
        pass

    def tick(self) -> None:
        pass

    def leaves(self) -> None:
        pass

    def trouble(self) -> str:
        return ""

    def fail(self, message: str, code: int, passes: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class Cluster:
    """Rank 0 is the server; the other ranks, and rank 0 too if it is shared, are workers."""

    def __init__(self, place: Place, topology: Topology, comm: Communication, stop: StopRequest) -> None:
        shared = topology.server == "shared" or place.size == 1
        self.rank, self.size = place.rank, place.size
        self.workers: Sequence[int] = range(0 if shared else 1, self.size)
        self.overlaps = not shared
        backend = self._choose_device(place, topology)
        wait, run = Wait(place, comm.meeting, stop), f"fl_dist/{_attempt(place)}/{next(_runs)}"
        self._board = board(place, wait).of(run)
        self._links = Links(place.port)
        self._wire: Wire | None = None
        self._pulse = Pulse(self._board, self.rank, self.size, comm.timeout, self._links.cut)
        self._board.limit(SILENCE)
        self._meet(wait)
        try:
            compare(self._seats(), topology.oversubscribe)
            with self._watch(), cut_after(comm.meeting, self._links.cut), self._links:
                self._connect(backend, place, f"{run}/group", comm.meeting)
        except Exception as e:
            if not isinstance(e, Lost):
                self.fail(breakdown.advice(e) or str(e), 1)
            self.close()
            raise

    def _choose_device(self, place: Place, topology: Topology) -> str:
        """Take the device of this rank; the backend that goes with it."""
        self.device = pick_device(topology, place.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            os.environ.update(WATCHDOG)
        nccl = self.device.type == "cuda" and not topology.oversubscribe
        self._gloo_only, self._polls = self.device.type == "cuda" and not nccl, nccl
        return "cpu:gloo,cuda:nccl" if nccl else "gloo"

    def _meet(self, wait: Wait) -> None:
        """Wait until every rank has come: torch's own wait for one that never does can neither speak nor be ended."""
        self._pulse.begin()  # whoever is here has a beat
        self.post(f"seat/{self.rank}", json.dumps(seat(host(), self.device)))
        self.post(f"host/{self.rank}", host())
        while not self._all_are_here():
            try:
                with self._watch():
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

    def _seats(self) -> list[Seat]:
        with self._watch():
            texts = self._board.read_all([f"seat/{rank}" for rank in range(self.size)])
        return [Seat(*json.loads(text)) for text in texts]

    def _absent(self) -> list[int]:
        return [r for r in range(self.size) if self.read(f"host/{r}") is None]

    def _connect(self, backend: str, place: Place, key: str, seconds: float) -> None:
        """Under the eyes of the pulse, which has a connection to the store for itself."""
        self._pulse.connects(True)
        self._pulse.start()
        faults.point("connect")
        group = dist.PrefixStore(key, another(place, seconds))
        # With its device told, NCCL connects here, and not in the first round.
        own = self.device if self._polls else None
        dist.init_process_group(backend, None, ENDLESS, self.size, self.rank, group, device_id=own)
        self._warm_up()
        if place.one_machine and self.device.type == "cpu":
            self._wire = Wire(self.rank, self.size, self.share, self._pulse.tick)
        self._pulse.connects(False)

    def _warm_up(self) -> None:
        """The first collective connects."""
        for device in {torch.device("cpu"), self.device}:
            dist.all_reduce(torch.zeros(1, device=device))

    def broadcast(self, buffer: Tensor) -> None:
        with self._watch():
            if self._wire is not None and self._wire.carries(buffer):
                self._wire.broadcast(buffer)
            else:
                self._finish(dist.broadcast(buffer, src=0, async_op=True))

    def reduce(self, buffer: Tensor) -> None:
        # gloo reduces host memory only.
        staged = buffer.cpu() if self._gloo_only else buffer
        with self._watch():
            if self._wire is not None and self._wire.carries(staged):
                self._wire.reduce(staged)
            else:
                self._finish(dist.reduce(staged, dst=0, async_op=True))
        if staged is not buffer:
            buffer.copy_(staged)

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Point to point, both lists in an order that all ranks share."""
        with self._watch():
            pending = [dist.isend(t, to) for t, to in sends] + [dist.irecv(t, source) for t, source in receives]
            for work in pending:
                assert work is not None
                work.wait()

    def _finish(self, work: dist.Work | None) -> None:
        """Until it is done. gloo's work is waited for, and fails when the pulse cuts its connections; that of a GPU
        would let this thread go on, and its errors come where nobody expects them."""
        assert work is not None
        pause, longest = POLL
        while self._polls and not work.is_completed():
            self._pulse.tick()
            time.sleep(pause)
            pause = min(2 * pause, longest)
        work.wait()
        if self._polls:
            settle(self.device)()  # an error comes out here

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
            while (shared := self.read(key)) is None:
                self._pulse.tick()
                time.sleep(0.02)
        return shared

    def hosts(self) -> list[str]:
        """Of each rank."""
        return [self.read(f"host/{rank}") or "unknown" for rank in range(self.size)]

    def begins(self, index: int, assignment: dict[int, int]) -> None:
        self._pulse.begins(index, assignment)

    def doing(self, what: str) -> None:
        self._pulse.doing(what)

    def tick(self) -> None:
        self._pulse.tick()

    def leaves(self) -> None:
        self._pulse.leaves()

    def trouble(self) -> str:
        return "" if self._pulse.failure is None else self._pulse.failure.message

    def fail(self, message: str, code: int, passes: bool = False) -> None:
        """Tell the others why this rank ends, and whether a restart may mend it; then let them go."""
        with contextlib.suppress(Exception):
            self._board.limit(PATIENCE)
            self._pulse.tell(Failure(f"rank {self.rank} on {host()} failed: {message}", code, passes))
            self._leave()
            # Whoever interrupts a run that has not begun does not want to wait for it.
            self._pulse.linger(1.0 if code == REQUEUE else PATIENCE)

    def close(self) -> None:
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):
                self._pulse.linger(PATIENCE)
        self._pulse.stop()
        if self._wire is not None:
            self._wire.close()
        if self._pulse.failure is not None:
            self._leave()
        elif dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _watch(self) -> Any:
        self._pulse.waits(True)
        try:
            yield
        except Lost:
            self._leave()
            raise
        except RuntimeError as e:
            if breakdown.is_own(e):  # before its end makes the others say that they lost it
                raise
            raise self._diagnose(e) from e
        finally:
            self._pulse.waits(False)

    def _leave(self) -> None:
        """Closing this rank's connections makes its peers notice too."""
        with contextlib.suppress(Exception):
            self._links.cut()
            if self._polls:
                # Destroying waits for kernels that may never end; aborting should not, but may hang all the same.
                with cut_after(GRACE, self._pulse.end):
                    dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    def _diagnose(self, error: Exception) -> Lost:
        """What was told or found; if nothing was, what the first rank to notice anything heard."""
        try:
            self._board.limit(PATIENCE)
            words = self._board.first("noticed", str(error).splitlines()[0])
            self._links.cut()  # so that the others notice too
            failure = self._pulse.cause() or self._pulse.tell(Failure(f"the ranks lost touch: {words}"))
        except Exception:
            failure = self._pulse.without_server()
        self._leave()
        return failure.lost()


_runs = itertools.count()


def _attempt(place: Place) -> str:
    """torchrun's restarts may share a store, whose old keys must not be read; agents of several nodes do not count
    alike, but there the launchers give every attempt a store of its own."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if place.one_machine else "0"


def connect(place: Place | None, topology: Topology, comm: Communication, stop: StopRequest) -> Comm:
    return Alone(topology) if place is None else Cluster(place, topology, comm, stop)


def host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
