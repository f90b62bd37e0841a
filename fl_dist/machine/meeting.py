"""Where the ranks of a job find each other: a store in rank 0. No wait for it is without a word or an end."""

import contextlib
import errno
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from fl_dist.machine.place import Place
from fl_dist.machine.signals import REQUEUE, StopRequest

VOICE = 10.0
"""Seconds between two lines about ranks that have not come."""
ATTEMPT = 5.0
"""Seconds that rank 0 has to answer a rank that connects, before that tries again."""
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of disks and networks that may be gone a minute later."""


class Lost(RuntimeError):
    """The job cannot go on: the message names the rank that failed, the code is the one it ended with."""

    def __init__(self, message: str, code: int = 1, ranks: Sequence[int] = (), passes: bool = True) -> None:
        super().__init__(message)
        self.code, self.ranks, self.passes = code, ranks, passes


def passes(error: Exception) -> bool:
    """Whether a restart may mend it: a process, a machine or a connection failed, and not the run itself."""
    return error.passes if isinstance(error, Lost) else isinstance(error, OSError) and error.errno in PASSING


class Board:
    """Texts that every rank can read and write. Whoever holds them may have been killed or stopped."""

    def __init__(self, store: dist.Store, port: int) -> None:
        self.store, self._port, self._silent = store, port, False

    def of(self, run: str) -> "Board":
        return Board(dist.PrefixStore(run, self.store), self._port)

    def limit(self, seconds: float) -> None:
        """Let no question wait longer for its answer; torch's own time-out does not hold for all of them."""
        span = struct.pack("ll", *divmod(max(1, round(seconds * 1e6)), 10**6))
        for end in _connections(self._port):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)

    def post(self, key: str, text: str) -> None:
        with self._asking():
            self.store.set(key, text)

    def read(self, key: str) -> str | None:
        with self._asking():
            return self.store.get(key).decode() if self.store.check([key]) else None

    def read_all(self, keys: list[str]) -> list[str]:
        """Texts that are there: of others this would wait."""
        with self._asking():
            return [text.decode() for text in self.store.multi_get(keys)] if keys else []

    def first(self, key: str, text: str) -> str:
        """The text that was posted first under that key; this one, if there was none."""
        with self._asking():
            return self.store.compare_set(key, "", text).decode()

    def forget(self, key: str) -> None:
        with self._asking():
            self.store.delete_key(key)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        if self._silent:
            raise RuntimeError("rank 0 did not answer")
        try:
            yield
        except RuntimeError:
            # An answer that comes too late would be taken for that to the next question.
            self._silent = True
            raise


class Wait:
    """The wait for ranks that have not come: it says for whom, and ends with a signal or after its time."""

    def __init__(self, place: Place, seconds: float, stop: StopRequest) -> None:
        self.place, self.seconds, self.stop = place, seconds, stop
        self._began = time.monotonic()
        self._next = VOICE

    def moment(self, missing: Callable[[], list[int]]) -> None:
        """A short sleep; Lost if the wait is over."""
        waited = time.monotonic() - self._began
        if self.stop.requested:
            self._give_up(missing(), "interrupted while waiting for {}; nothing had begun", REQUEUE)
        if waited > self.seconds:
            self._give_up(missing(), f"{{}} did not come within {self.seconds:g} s (comm.meeting)", 1)
        if waited > self._next:
            self._next += VOICE
            self._say(missing, waited)
        time.sleep(0.05 + self.place.size / 2000)  # all of them ask rank 0

    def _say(self, missing: Callable[[], list[int]], waited: float) -> None:
        """Rank 0 speaks for all, and rank 1 of rank 0."""
        if self.place.rank == 0 or (self.place.rank == 1 and missing() == [0]):
            print(f"waiting for {self._named(missing())} ({waited:.0f} s)", file=sys.stderr, flush=True)

    def _give_up(self, missing: list[int], why: str, code: int) -> None:
        message = why.format(self._named(missing))
        if self.place.rank != 0 and missing == [0]:  # who would say it otherwise
            print(f"error: {message}", file=sys.stderr, flush=True)
        raise Lost(message, code, missing)

    def _named(self, ranks: list[int]) -> str:
        names = ", ".join(map(str, ranks)) or "the others"
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {names} of {self.place.size}"


_boards: dict[Place, Board] = {}


def board(place: Place, wait: Wait) -> Board:
    """The board of a job; kept, because a process may run several configurations in turn."""
    if place not in _boards:
        _boards[place] = Board(_store(place, wait), place.port)
    return _boards[place]


def _store(place: Place, wait: Wait) -> dist.Store:
    if _is_here(place):
        # All ranks are on this machine: nothing needs to listen on any other address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if place.rank != 0 or _of_agent():
        return _reach(place, wait)
    listener = socket.create_server(("127.0.0.1", place.port)).detach() if _is_here(place) else None
    timeout = timedelta(seconds=wait.seconds)
    return dist.TCPStore(
        _address(place), place.port, place.size, True, timeout, wait_for_workers=False, master_listen_fd=listener
    )


def _of_agent() -> bool:
    """torchrun listens already."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_here(place: Place) -> bool:
    return place.one_machine and not _of_agent()


def _address(place: Place) -> str:
    return "127.0.0.1" if _is_here(place) else place.host


def another(place: Place, seconds: float) -> dist.Store:
    """A second connection to the store, for those who wait in it: a thread that asks over the first does not."""
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(_address(place), place.port, place.size, False, timeout, wait_for_workers=False)


def _reach(place: Place, wait: Wait) -> dist.Store:
    """Connect as soon as there is somebody to connect to."""
    while True:
        try:
            # torch's own attempts cannot be interrupted.
            socket.create_connection((_address(place), place.port), timeout=1.0).close()
            with cut_after(ATTEMPT, partial(_cut, place.port)):
                return another(place, ATTEMPT)
        except (OSError, RuntimeError):
            wait.moment(lambda: [0])


@contextlib.contextmanager
def cut_after(seconds: float, cut: Callable[[], None]) -> Iterator[None]:
    """A call that may wait for an answer that never comes has so long; then `cut` ends what it waits for."""
    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _cut(port: int) -> None:
    for end in _connections(port):
        _shut(end)


def _shut(end: socket.socket) -> None:
    """Other threads, and the other end, may do it in the same moment."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _connections(port: int) -> Iterator[socket.socket]:
    """This process's ends of its connections to that port, whichever library made them."""
    return (link.end for link in _connected() if link.there == port)


class Links:
    """The connections that libraries make within the context. Those to the store's port are among them as long as it
    lasts, for that is where a library waits that connects ranks; and not afterwards."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._others: set[int] | None = None
        """Those of before; None outside of the context."""
        self._own: set[int] = set()

    def __enter__(self) -> "Links":
        self._others = {link.inode for link in _connected()}
        return self

    def __exit__(self, *_: object) -> None:
        others, self._others = self._others or set(), None
        self._own |= {k.inode for k in _connected() if k.inode not in others and self._port not in (k.here, k.there)}

    def cut(self) -> None:
        """Whatever waits for them fails at once, on both ends; the library itself would wait for what is under way."""
        others = self._others
        for link in _connected():
            new = others is not None and link.inode not in others and link.here != self._port
            if new or link.inode in self._own:
                _shut(link.end)


class Link(NamedTuple):
    """One of this process's connections, whichever library made it."""

    inode: int
    end: socket.socket
    here: int
    there: int
    """Ports."""


def _connected() -> Iterator[Link]:
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with contextlib.suppress(OSError):
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6):
                        yield Link(found.st_ino, end, end.getsockname()[1], end.getpeername()[1])
