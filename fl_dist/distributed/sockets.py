"""This process's own sockets, whichever library opened them: how to end a library call that waits on one of them."""

import contextlib
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Connection(NamedTuple):
    inode: int
    socket: socket.socket
    local_port: int
    remote_port: int


def list_connections() -> Iterator[Connection]:
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as s:
                    if s.family in (socket.AF_INET, socket.AF_INET6):
                        yield Connection(status.st_ino, s, s.getsockname()[1], s.getpeername()[1])


def set_timeout(port: int, seconds: float) -> None:
    """Limit every send and receive on this process's connections to that port."""
    interval = struct.pack("ll", *divmod(max(1, round(seconds * 1e6)), 10**6))
    for connection in list_connections():
        if connection.remote_port == port:
            with contextlib.suppress(OSError):
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


def shut_down_connections(port: int) -> None:
    """Shut down this process's connections to that port."""
    for connection in list_connections():
        if connection.remote_port == port:
            _shut_down(connection)


def _shut_down(connection: Connection) -> None:
    with contextlib.suppress(OSError):  # another thread or the peer may do it at the same moment
        connection.socket.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def call_after(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call the function from another thread unless the context ends within so many seconds."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class GroupConnections:
    """The connections that libraries open within the context.

    Connections to the store's port count only while the context lasts: a library waits there while it connects ranks.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._earlier: set[int] | None = None
        """Inodes of the connections from before; None outside of the context."""
        self._own: set[int] = set()

    def __enter__(self) -> "GroupConnections":
        self._earlier = {c.inode for c in list_connections()}
        return self

    def __exit__(self, *_: object) -> None:
        earlier, self._earlier = self._earlier or set(), None
        new = (c for c in list_connections() if c.inode not in earlier)
        self._own |= {c.inode for c in new if self._store_port not in (c.local_port, c.remote_port)}

    def shut_down(self) -> None:
        """Whatever waits on them fails at once, on both ends; the library itself would let it finish."""
        earlier = self._earlier
        for c in list_connections():
            is_new = earlier is not None and c.inode not in earlier and c.local_port != self._store_port
            if is_new or c.inode in self._own:
                _shut_down(c)
