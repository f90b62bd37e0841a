"""Plain connections between rank 0 and the other ranks of its machine, for messages that are over before gloo begins.

A collective of gloo goes through several threads on each rank, which wake one another: milliseconds, for bytes that a
few system calls bring in a tenth of one. Here the thread that asks is the one that sends and receives. Large messages
are gloo's, which spreads the work over all ranks.
"""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

MOST = 1 << 22
"""Bytes that rank 0 sends or receives for one message, to or from all others together."""
PIECE = 1 << 18
"""Bytes that are received before they are added."""
GLANCE = 0.5
"""Seconds between two looks at the pulse while ranks connect."""
DIGITS = 8
"""Of a rank's number, which follows the key."""


class Wire:
    """Rank 0 has a connection to each other rank, and those have one to it."""

    def __init__(self, rank: int, size: int, share: Callable[[str, str | None], str], tick: Callable[[], None]) -> None:
        """`share` gives rank 0's text to all ranks; `tick` raises when a rank is lost."""
        self.rank, self._others = rank, size - 1
        if rank == 0:
            # Whoever else may be on this machine: only ranks know the key.
            key = secrets.token_hex(16)
            with socket.create_server(("127.0.0.1", 0), backlog=size) as door:
                share("wire", json.dumps([door.getsockname()[1], key]))
                self._links = _welcome(door, key, size, tick)
        else:
            port, key = json.loads(share("wire", None))
            self._links = [_knock(port, f"{key}{rank:0{DIGITS}d}".encode())]
        for link in self._links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._room = torch.empty(PIECE, dtype=torch.uint8)

    def carries(self, message: Tensor) -> bool:
        return message.nbytes * self._others <= MOST

    def broadcast(self, message: Tensor) -> None:
        """Rank 0's message, on every rank."""
        with _breaking():
            for link in self._links:
                if self.rank == 0:
                    link.sendall(_bytes(message))
                else:
                    _receive(link, _bytes(message))

    def reduce(self, message: Tensor) -> None:
        """The sum of all ranks' messages, on rank 0."""
        with _breaking():
            if self.rank:
                self._links[0].sendall(_bytes(message))
                return
            room = self._room.view(message.dtype)
            for link in self._links:
                for piece in message.view(-1).split(len(room)):
                    _receive(link, _bytes(room[: len(piece)]))
                    piece.add_(room[: len(piece)])

    def close(self) -> None:
        for link in self._links:
            link.close()


def _welcome(door: socket.socket, key: str, size: int, tick: Callable[[], None]) -> list[socket.socket]:
    """The connections of all other ranks, in their order, however long each takes to say who it is."""
    came: dict[int, socket.socket] = {}
    said: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(door, selectors.EVENT_READ)
        while len(came) < size - 1:
            tick()
            for event, _ in ready.select(GLANCE):
                link = cast(socket.socket, event.fileobj)
                if link is door:
                    link = door.accept()[0]
                    ready.register(link, selectors.EVENT_READ)
                    said[link] = b""
                elif _has_said_all(link, said, len(key) + DIGITS):
                    ready.unregister(link)
                    name, number = said[link][: len(key)], said[link][len(key) :]
                    if hmac.compare_digest(name, key.encode()) and len(number) == DIGITS:
                        came[int(number)] = link
    for stranger in said.keys() - set(came.values()):
        stranger.close()
    return [came[rank] for rank in sorted(came)]


def _has_said_all(link: socket.socket, said: dict[socket.socket, bytes], length: int) -> bool:
    """Add what has come to what it said before; True at its end, or when that is as long as it should be."""
    more = b""
    with contextlib.suppress(OSError):
        more = link.recv(length - len(said[link]))
    said[link] += more
    return not more or len(said[link]) == length


def _knock(port: int, words: bytes) -> socket.socket:
    with _breaking():
        link = socket.create_connection(("127.0.0.1", port))
        link.sendall(words)
        return link


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _receive(link: socket.socket, room: memoryview) -> None:
    while room:
        count = link.recv_into(room)
        if not count:
            raise ConnectionError("a connection was closed")
        room = room[count:]


@contextlib.contextmanager
def _breaking() -> Iterator[None]:
    """What breaks is told as torch tells it of its own connections."""
    try:
        yield
    except OSError as e:
        raise RuntimeError(str(e)) from e
