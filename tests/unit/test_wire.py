"""Small messages on one machine: the same sums as any, nobody else's, and no wait without an end."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fl_dist.machine import wire
from fl_dist.machine.wire import MOST, PIECE, Wire
from tests.support.marks import timing

pytestmark = timing

Ranks = list[Wire]


class Note:
    """What rank 0 says to all, among threads."""

    def __init__(self) -> None:
        self._said, self._text = threading.Event(), ""

    def share(self, key: str, text: str | None) -> str:
        if text is not None:
            self._text = text
            self._said.set()
        assert self._said.wait(20)
        return self._text


def connected(size: int, before: Callable[[str], None] = lambda text: None) -> Ranks:
    """Ranks that are threads; `before` hears what rank 0 said before the others do."""
    note = Note()

    def late(key: str, text: str | None) -> str:
        told = note.share(key, text)
        before(told)
        return told

    with ThreadPoolExecutor(size) as threads:
        others = [threads.submit(Wire, rank, size, late, lambda: None) for rank in range(1, size)]
        return [Wire(0, size, note.share, lambda: None), *(other.result(20) for other in others)]


@pytest.fixture
def four() -> Iterator[Ranks]:
    ranks = connected(4)
    yield ranks
    for rank in ranks:
        rank.close()


def each(ranks: Ranks, call: Callable[[Wire], object]) -> None:
    with ThreadPoolExecutor(len(ranks)) as threads:
        for done in [threads.submit(call, rank) for rank in ranks]:
            done.result(20)


@pytest.mark.parametrize("length", [1, 1000, PIECE // 8, PIECE // 8 + 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_what_rank_0_has_all_get_and_what_all_have_rank_0_gets(four: Ranks, dtype: torch.dtype, length: int) -> None:
    first = torch.arange(length).to(dtype)
    messages = [first.clone() if rank == 0 else torch.zeros_like(first) for rank in range(4)]
    each(four, lambda rank: rank.broadcast(messages[rank.rank]))
    assert all(torch.equal(message, first) for message in messages)
    each(four, lambda rank: rank.reduce(messages[rank.rank]))
    assert torch.equal(messages[0], first + first + first + first)


def test_a_table_is_added_too(four: Ranks) -> None:
    tables = [torch.full((3, 4), rank) for rank in range(4)]
    each(four, lambda rank: rank.reduce(tables[rank.rank]))
    assert torch.equal(tables[0], torch.full((3, 4), 6))


def test_large_messages_are_not_carried(four: Ranks) -> None:
    assert four[0].carries(torch.empty(MOST // 3, dtype=torch.uint8))
    assert not four[0].carries(torch.empty(MOST // 3 + 1, dtype=torch.uint8))


@pytest.mark.parametrize("words", [b"", b"short", b"x" * 40, b"\xff" * 100])
def test_who_does_not_know_the_key_is_not_let_in(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GLANCE", 0.2)
    strangers = []

    def knock(text: str) -> None:
        strangers.append(socket.create_connection(("127.0.0.1", json.loads(text)[0])))
        strangers[-1].sendall(words)

    ranks = connected(2, knock)
    message = torch.ones(3)
    each(ranks, lambda rank: rank.reduce(message if rank.rank == 0 else torch.ones(3)))
    assert message.tolist() == [2.0, 2.0, 2.0]
    for open_end in [*ranks, *strangers]:
        open_end.close()


def test_a_rank_may_take_its_time_to_say_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GLANCE", 0.05)

    class Slow(socket.socket):
        def sendall(self, words: bytes, *flags: int) -> None:  # type: ignore[override]
            for letter in words:
                time.sleep(0.02)
                super().sendall(bytes([letter]))

    def slowly(address: tuple[str, int]) -> socket.socket:
        link = Slow(socket.AF_INET)
        link.connect(address)
        return link

    monkeypatch.setattr(socket, "create_connection", slowly)
    ranks = connected(3)
    assert len(ranks[0]._links) == 2
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_connection_that_ends_is_an_error_as_torch_has_it(rank: int) -> None:
    ranks = connected(2)
    ranks[1 - rank].close()
    with pytest.raises(RuntimeError, match="closed|reset|Broken pipe|Bad file"):
        ranks[rank].reduce(torch.ones(1000)) if rank == 0 else ranks[rank].broadcast(torch.ones(1000))
    ranks[rank].close()


def test_a_rank_that_is_lost_meanwhile_ends_the_wait() -> None:
    def lost() -> None:
        raise RuntimeError("rank 1 was lost")

    with pytest.raises(RuntimeError, match="rank 1 was lost"):
        Wire(0, 2, lambda key, text: text or "", lost)
