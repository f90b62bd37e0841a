"""Signs of life decide who is lost, and not how long a round takes."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from fl_dist.machine import pulse
from fl_dist.machine.meeting import Board, Lost
from fl_dist.machine.pulse import Failure, Heard, Pulse
from tests.support.marks import timing
from tests.support.waiting import free_port, wait_for

pytestmark = timing


def counted(of: Pulse, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between its looks, as they come."""
    wait, pauses = of._stopped.wait, list[float]()

    def noted(seconds: float) -> bool:
        began = time.monotonic()
        stopped = wait(seconds)
        pauses.append(time.monotonic() - began)
        return stopped

    monkeypatch.setattr(of._stopped, "wait", noted)
    return pauses


class TestTwoOfThem:
    """Two ranks in one process, with a real store between them."""

    @pytest.fixture
    def pair(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pulse, Pulse]]:
        monkeypatch.setattr(pulse, "BEAT", 0.02)
        monkeypatch.setattr(pulse, "SILENCE", 1.5)
        monkeypatch.setattr(pulse, "PAUSE", 0.5)
        port, limit = free_port(), timedelta(seconds=5)
        store = dist.TCPStore("127.0.0.1", port, 2, True, limit, wait_for_workers=False)
        other = dist.TCPStore("127.0.0.1", port, 2, False, limit, wait_for_workers=False)
        self.cuts: list[int] = []
        made = (
            Pulse(Board(store, port), 0, 2, 1e6, lambda: self.cuts.append(0)),
            Pulse(Board(other, port), 1, 2, 1e6, lambda: self.cuts.append(1)),
        )
        for each in made:
            each.begin()
        wait_for(lambda: store.check(["beat/0", "beat/1"]), "the first beats")  # a store takes texts without an answer
        yield made
        for each in made:
            each.stop()

    def failure_of(self, of: Pulse) -> str:
        wait_for(lambda: of.failure is not None, "a failure")
        assert of.failure is not None
        return of.failure.message

    def test_who_does_not_beat_is_lost(self, pair: tuple[Pulse, Pulse]) -> None:
        pair[0].start()
        assert self.failure_of(pair[0]) == "rank 1 on an unknown host was lost (killed, out of memory or hung)"
        wait_for(lambda: self.cuts, "the cut")
        assert set(self.cuts) == {0}
        with pytest.raises(Lost, match="rank 1 on"):
            pair[0].tick()

    def test_who_says_goodbye_is_not_missed(self, pair: tuple[Pulse, Pulse], monkeypatch: pytest.MonkeyPatch) -> None:
        looks = counted(pair[0], monkeypatch)
        for each in pair:
            each.start()
        pair[1].stop()
        before = len(looks)
        wait_for(lambda: sum(looks[before:]) > 2 * pulse.SILENCE, "looks for twice the silence of a lost rank")
        assert pair[0].failure is None

    def test_who_was_stopped_itself_does_not_count_that_time_against_others(
        self, pair: tuple[Pulse, Pulse], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when a whole job is suspended, and resumed."""
        wait, waits = pair[0]._stopped.wait, list[float]()

        def paused(seconds: float) -> bool:
            waits.append(seconds)
            return wait(2.0 if len(waits) == 4 else seconds)

        monkeypatch.setattr(pair[0]._stopped, "wait", paused)
        pair[0].start()
        wait_for(lambda: len(waits) > 5, "a look")  # it has looked since
        pair[1].start()
        wait_for(lambda: len(waits) > 20, "more looks")
        assert pair[0].failure is None

    def test_what_is_told_first_is_what_all_hear(self, pair: tuple[Pulse, Pulse]) -> None:
        for each in pair:
            each.start()
        pair[1].tell(Failure("rank 1 on there failed: its disk is full", 2, False))
        assert pair[0].tell(Failure("rank 0 on here failed: it is tired")).code == 2
        assert self.failure_of(pair[0]) == self.failure_of(pair[1]) == "rank 1 on there failed: its disk is full"
        began = time.monotonic()
        pair[0].linger(30.0)
        assert time.monotonic() - began < 29

    def test_who_still_asks_for_the_cause_has_not_heard_it(
        self, pair: tuple[Pulse, Pulse], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rank 0 would take the board with it, and be called lost."""
        monkeypatch.setattr(pulse, "PATIENCE", 60.0)
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(pair[1].cause)
            wait_for(lambda: pair[1]._noticed, "the question")
            began = time.monotonic()
            pair[0].linger(0.5)
            assert time.monotonic() - began >= 0.5
            told = pair[0].tell(Failure("the ranks lost touch: broken pipe"))
            pair[0].linger(30.0)
            assert time.monotonic() - began < 29
            assert answer.result() == told

    def test_who_has_gone_is_not_waited_for(self, pair: tuple[Pulse, Pulse]) -> None:
        for each in pair:
            each.start()
        began = time.monotonic()
        pair[0].linger(0.5)
        assert time.monotonic() - began >= 0.5, "the other one is there"
        pair[0]._until = None
        pair[1].stop()
        pair[0].linger(60.0)
        assert time.monotonic() - began < 50

    def test_what_was_heard_stays_when_the_board_is_gone(self, pair: tuple[Pulse, Pulse]) -> None:
        told = pair[1].tell(Failure("rank 1 on there failed: its disk is full"))
        assert pair[1].without_server() == told
        assert pair[0].without_server().message == "rank 0, the server, was lost (killed, out of memory or hung)"

    def test_all_that_wait_for_each_other(self, pair: tuple[Pulse, Pulse]) -> None:
        for each in pair:
            each.timeout = 0.3
            each.waits(True)
            each.start()
        assert "all ranks wait for each other" in self.failure_of(pair[1])

    def test_one_that_waits_for_another_that_works(self, pair: tuple[Pulse, Pulse]) -> None:
        for each in pair:
            each.timeout = 4.0
            each.start()
        pair[0].waits(True)
        pair[1].doing("round 1")
        for _ in range(60):
            time.sleep(0.1)
            pair[1].tick()
        assert pair[0].failure is None

    def test_at_the_end_nobody_is_held_by_a_lost_rank(self, pair: tuple[Pulse, Pulse]) -> None:
        for each in pair:
            each.leaves()
        pair[0].start()
        self.failure_of(pair[0])
        pair[0].tick()
        assert not self.cuts


def test_silence_is_counted_from_the_last_change() -> None:
    heard = Heard()
    assert heard.silent({1: "1", 2: "1"}, 0.05) == []
    time.sleep(0.06)
    assert heard.silent({1: "2", 2: "1"}, 0.05) == [2]
    assert heard.silent({1: "2", 2: pulse.GONE}, 0.0) == [1]


def test_a_slow_board_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes as long as if this process had been stopped meanwhile, and all ranks beat."""
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds
        assert now[0] < 100

    class Slow(Board):
        def read(self, key: str) -> str | None:
            takes(1.5)
            return "1 0.0" if key.startswith("beat/") else None

        def read_all(self, keys: list[str]) -> list[str]:
            takes(1.5)
            return [f"{now[0]} 0.0" for _ in keys]

    monkeypatch.setattr(pulse, "time", mock.Mock(monotonic=lambda: now[0], sleep=takes))
    assert Pulse(Slow(dist.HashStore(), 0), 0, 3, 1e6, lambda: None).cause() is None


def test_who_was_stopped_listens_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pulse, "time", mock.Mock(monotonic=lambda: now[0]))
    heard = Heard()
    assert heard.silent({1: "1"}, 4.0) == [] and heard.seconds == 0.0
    now[0] += 2.0
    assert heard.silent({1: "1"}, 4.0) == [] and heard.seconds == 2.0
    now[0] += 5.0
    assert heard.silent({1: "1"}, 4.0) == [] and heard.seconds == 0.0
    for _ in range(2):
        now[0] += 2.0
        silent = heard.silent({1: "1"}, 4.0)
    assert silent == [1] and heard.seconds == 4.0
