"""Heartbeats decide which rank is lost, not the duration of a round. A rank that learns of a failure leaves."""

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from fl_dist.distributed import failure_detector, heartbeats
from fl_dist.distributed.failure_detector import FailureDetector
from fl_dist.distributed.failures import Failure
from fl_dist.distributed.heartbeats import FINAL_HEARTBEAT, HeartbeatMonitor
from fl_dist.distributed.key_value_store import KeyValueStore
from fl_dist.distributed.signals import StopRequest
from tests.support.marks import timing
from tests.support.waiting import free_port, wait_for

pytestmark = timing


def record_intervals(detector: FailureDetector, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the intervals between the detector's checks."""
    wait, intervals = detector._stopped.wait, list[float]()

    def wait_and_record(seconds: float) -> bool:
        start_time = time.monotonic()
        stopped = wait(seconds)
        intervals.append(time.monotonic() - start_time)
        return stopped

    monkeypatch.setattr(detector._stopped, "wait", wait_and_record)
    return intervals


class SilentStore(KeyValueStore):
    """A store whose process can be stopped: requests then wait."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.answers = threading.Event()
        self.answers.set()

    def set(self, key: str, text: str) -> None:
        self.answers.wait()
        super().set(key, text)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
class TestTwoRanks:
    """Two ranks in one process, connected by a real store. A rank that leaves is recorded with its exit code."""

    @pytest.fixture
    def pair(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FailureDetector, FailureDetector]]:
        for module in (failure_detector, heartbeats):
            monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_SECONDS", 0.02)
        monkeypatch.setattr(heartbeats, "MAX_DELAY_SECONDS", 0.5)
        monkeypatch.setattr(failure_detector, "HEARTBEAT_TIMEOUT_SECONDS", 1.5)
        monkeypatch.setattr(failure_detector, "DIAGNOSIS_TIMEOUT_SECONDS", 0.8)
        self.exits: dict[int, int] = {}
        port, timeout = free_port(), timedelta(seconds=5)
        store = dist.TCPStore("127.0.0.1", port, 2, True, timeout, wait_for_workers=False)
        other = dist.TCPStore("127.0.0.1", port, 2, False, timeout, wait_for_workers=False)
        self.stores = SilentStore(store), SilentStore(other)
        self.stops = StopRequest(0.0), StopRequest(0.0)
        detectors = (
            FailureDetector(self.stores[0], 0, 2, 1e6, self.stops[0]),
            FailureDetector(self.stores[1], 1, 2, 1e6, self.stops[1]),
        )
        monkeypatch.setattr(failure_detector, "exit_rank", lambda code: self.exit(detectors, code))
        for each in detectors:
            each.send_heartbeat()
        wait_for(
            lambda: store.check(["heartbeat/0", "heartbeat/1"]), "the first heartbeats"
        )  # the store does not confirm writes
        yield detectors
        for each, silent in zip(detectors, self.stores, strict=True):
            silent.answers.set()
            if each._thread.is_alive():
                each.stop()

    def exit(self, detectors: tuple[FailureDetector, FailureDetector], code: int) -> None:
        """Instead of the process, the calling thread ends."""
        threads = [(d.rank, thread) for d in detectors for thread in (d._thread, d._store_watcher)]
        (rank,) = [rank for rank, thread in threads if thread is threading.current_thread()]
        self.exits[rank] = detectors[rank]._announce_exit(code)
        raise SystemExit

    def start(self, *detectors: FailureDetector) -> None:
        for each in detectors:
            each.start()
            with each.connecting(1e6):
                pass

    def wait_for_exit(self, detector: FailureDetector) -> str:
        wait_for(lambda: detector.rank in self.exits, "the exit")
        return detector.failure_message

    def test_a_rank_without_heartbeats_is_lost(
        self, pair: tuple[FailureDetector, FailureDetector], capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.start(pair[0])
        message = "rank 1 on an unknown host was lost (killed, out of memory or hung)"
        assert self.wait_for_exit(pair[0]) == message
        assert (self.exits, capsys.readouterr().err) == ({0: 1}, f"error: {message}\n")

    def test_a_failure_after_a_signal_can_be_resumed(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        self.stops[0].was_requested = True
        self.start(pair[0])
        self.wait_for_exit(pair[0])
        assert self.exits == {0: 75}

    def test_a_rank_that_stops_regularly_is_not_lost(
        self, pair: tuple[FailureDetector, FailureDetector], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checks = record_intervals(pair[0], monkeypatch)
        self.start(*pair)
        pair[1].stop()
        before = len(checks)
        wait_for(
            lambda: sum(checks[before:]) > 2 * failure_detector.HEARTBEAT_TIMEOUT_SECONDS,
            "checks for twice the heartbeat timeout",
        )
        assert pair[0].failure is None

    def test_a_paused_rank_does_not_count_its_pause_against_others(
        self, pair: tuple[FailureDetector, FailureDetector], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when a whole job is suspended and resumed."""
        wait, waits = pair[0]._stopped.wait, list[float]()

        def wait_longer(seconds: float) -> bool:
            waits.append(seconds)
            return wait(1.0 if len(waits) == 4 else seconds)

        monkeypatch.setattr(pair[0]._stopped, "wait", wait_longer)
        self.start(pair[0])
        wait_for(lambda: len(waits) > 5, "a check")  # it has checked since the pause
        self.start(pair[1])
        wait_for(lambda: len(waits) > 20, "more checks")
        assert pair[0].failure is None

    def test_a_failure_ends_all_ranks_with_its_code(
        self, pair: tuple[FailureDetector, FailureDetector], capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.start(*pair)
        pair[1].report(Failure("rank 1 on there failed: its disk is full", 2, False))
        assert self.wait_for_exit(pair[0]) == "rank 1 on there failed: its disk is full"
        assert (self.exits, capsys.readouterr().err) == ({0: 2}, "error: rank 1 on there failed: its disk is full\n")

    def test_the_first_of_two_failures_counts(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        pair[1].report(Failure("rank 1 on there failed: its disk is full", 2, False))
        assert pair[0]._publish(Failure("rank 0 on here failed: it is tired")).code == 2

    def test_a_rank_leaves_after_rank_0_which_stays_until_the_others_know(
        self, pair: tuple[FailureDetector, FailureDetector], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(failure_detector, "DIAGNOSIS_TIMEOUT_SECONDS", 60.0)
        ends = [threading.Thread(target=each._announce_exit, args=(1,), daemon=True) for each in pair]
        ends[1].start()
        wait_for(lambda: self.stores[0].get("heartbeat/1") == FINAL_HEARTBEAT, "the last heartbeat of rank 1")
        assert ends[1].is_alive()
        ends[0].start()
        for thread in ends:
            thread.join(30)
            assert not thread.is_alive()

    def test_nobody_waits_for_a_rank_that_does_not_leave(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        start_time = time.monotonic()
        assert pair[0]._announce_exit(1) == 1
        assert 0.8 <= time.monotonic() - start_time < 30

    def test_a_store_that_does_not_answer_is_a_lost_server(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        """Rank 0 is stopped, so that the heartbeat thread waits forever."""
        self.start(*pair)
        pair[1].begin_round(4, {7: 0, 8: 1})
        self.stores[1].answers.clear()
        message = "rank 0 on an unknown host, the server, was lost (killed, out of memory or hung) in round 5"
        assert self.wait_for_exit(pair[1]) == f"{message}, whose clients were 7"
        assert self.exits[1] == 1

    def test_a_failure_of_the_main_thread_is_not_replaced(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        self.start(*pair)
        pair[1].report(Failure("rank 1 on there failed: its disk is full"))
        self.wait_for_exit(pair[0])
        assert 1 not in self.exits, "its main thread is about to leave"

    def test_a_broken_connection_without_a_lost_rank_is_reported(
        self, pair: tuple[FailureDetector, FailureDetector]
    ) -> None:
        self.start(*pair)
        with pytest.raises(RuntimeError), pair[1].waiting():
            raise RuntimeError("NCCL error: remote process exited\nand more")
        message = "the connection between the ranks broke: NCCL error: remote process exited"
        assert self.wait_for_exit(pair[0]) == self.wait_for_exit(pair[1]) == message

    def test_a_hardware_error_is_no_broken_connection(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        self.start(*pair)
        with pytest.raises(RuntimeError), pair[1].waiting():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert not pair[1]._connection_error

    def test_ranks_waiting_for_each_other_are_a_deadlock(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        for each in pair:
            each.timeout = 0.3
        with pair[0].waiting(), pair[1].waiting():
            self.start(*pair)
            assert "all ranks have been waiting for each other" in self.wait_for_exit(pair[1])

    def test_ranks_that_cannot_connect_are_stuck(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        self.start(*pair)
        with pair[1].connecting(0.3):
            message = "is stuck: no progress for 0.3 s (comm.rendezvous_timeout) in connecting to the other ranks"
            assert message in self.wait_for_exit(pair[0])

    def test_waiting_for_a_working_rank_is_no_failure(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        for each in pair:
            each.timeout = 4.0
        self.start(*pair)
        with pair[0].waiting(), pair[1].activity("round 1"):
            for _ in range(60):
                time.sleep(0.1)
                pair[1].progress()
        assert pair[0].failure is None

    def test_after_the_last_round_rank_0_ignores_lost_ranks(
        self, pair: tuple[FailureDetector, FailureDetector]
    ) -> None:
        pair[0].disarm()
        self.start(pair[0])
        wait_for(lambda: pair[0].failure is not None, "the loss of rank 1")
        assert not self.exits

    def test_after_the_last_round_a_worker_does_not_wait_for_a_lost_server(
        self, pair: tuple[FailureDetector, FailureDetector]
    ) -> None:
        pair[1].disarm()
        self.start(pair[1])
        self.wait_for_exit(pair[1])
        assert self.exits == {1: 0}, "its work is done"


def test_an_activity_ends_with_its_context_and_leaves_the_outer_one() -> None:
    """Without a thread, as in a single process."""
    detector = FailureDetector(KeyValueStore(dist.HashStore()), 0, 1, 1e6, StopRequest(0.0))
    with contextlib.suppress(KeyError), detector.activity("outer"):
        with detector.activity("inner"):
            assert detector._main_thread.current_activity == "inner"
        assert detector._main_thread.current_activity == "outer"
        raise KeyError
    assert (detector._main_thread.current_activity, detector.failure_message) == ("", "")


def test_silence_is_counted_from_the_last_change() -> None:
    monitor = HeartbeatMonitor()
    assert monitor.find_silent({1: "1", 2: "1"}, 0.05) == []
    time.sleep(0.06)
    assert monitor.find_silent({1: "2", 2: "1"}, 0.05) == [2]
    assert monitor.find_silent({1: "2", 2: FINAL_HEARTBEAT}, 0.0) == [1]


def test_a_paused_monitor_restarts_its_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(heartbeats, "time", mock.Mock(monotonic=lambda: now[0]))
    monitor = HeartbeatMonitor()
    for seconds in (0.0, 2.0, 5.0, 2.0):  # it was paused before the third look
        now[0] += seconds
        assert monitor.find_silent({1: "1"}, 4.0) == []
    now[0] += 2.0
    assert monitor.find_silent({1: "1"}, 4.0) == [1]
