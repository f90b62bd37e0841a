"""Heartbeats decide which rank is lost, not the duration of a round."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from fl_dist.distributed import failure_detector
from fl_dist.distributed.failure_detector import FailureDetector, HeartbeatMonitor
from fl_dist.distributed.failures import Failure, RankLostError
from fl_dist.distributed.key_value_store import KeyValueStore
from tests.support.marks import timing
from tests.support.waiting import free_port, wait_for

pytestmark = timing


def nothing() -> None:
    pass


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


class TestTwoRanks:
    """Two ranks in one process, connected by a real store."""

    @pytest.fixture
    def pair(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FailureDetector, FailureDetector]]:
        monkeypatch.setattr(failure_detector, "HEARTBEAT_INTERVAL_SECONDS", 0.02)
        monkeypatch.setattr(failure_detector, "HEARTBEAT_TIMEOUT_SECONDS", 1.5)
        monkeypatch.setattr(failure_detector, "MAX_DELAY_SECONDS", 0.5)
        port, timeout = free_port(), timedelta(seconds=5)
        store = dist.TCPStore("127.0.0.1", port, 2, True, timeout, wait_for_workers=False)
        other = dist.TCPStore("127.0.0.1", port, 2, False, timeout, wait_for_workers=False)
        self.aborts: list[int] = []
        detectors = (
            FailureDetector(KeyValueStore(store, port), 0, 2, 1e6, lambda: self.aborts.append(0), nothing),
            FailureDetector(KeyValueStore(other, port), 1, 2, 1e6, lambda: self.aborts.append(1), nothing),
        )
        for each in detectors:
            each.send_heartbeat()
        wait_for(
            lambda: store.check(["heartbeat/0", "heartbeat/1"]), "the first heartbeats"
        )  # the store does not confirm writes
        yield detectors
        for each in detectors:
            each.stop()

    def wait_for_failure(self, detector: FailureDetector) -> str:
        wait_for(lambda: detector.failure is not None, "a failure")
        assert detector.failure is not None
        return detector.failure.message

    def test_a_rank_without_heartbeats_is_lost(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        pair[0].start()
        assert self.wait_for_failure(pair[0]) == "rank 1 on an unknown host was lost (killed, out of memory or hung)"
        wait_for(lambda: self.aborts, "the abort")
        assert set(self.aborts) == {0}
        with pytest.raises(RankLostError, match="rank 1 on"):
            pair[0].progress()

    def test_a_rank_that_stops_regularly_is_not_lost(
        self, pair: tuple[FailureDetector, FailureDetector], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checks = record_intervals(pair[0], monkeypatch)
        for each in pair:
            each.start()
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
            return wait(2.0 if len(waits) == 4 else seconds)

        monkeypatch.setattr(pair[0]._stopped, "wait", wait_longer)
        pair[0].start()
        wait_for(lambda: len(waits) > 5, "a check")  # it has checked since the pause
        pair[1].start()
        wait_for(lambda: len(waits) > 20, "more checks")
        assert pair[0].failure is None

    def test_the_first_reported_failure_reaches_all_ranks(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        for each in pair:
            each.start()
        pair[1].report(Failure("rank 1 on there failed: its disk is full", 2, False))
        assert pair[0].report(Failure("rank 0 on here failed: it is tired")).code == 2
        assert (
            self.wait_for_failure(pair[0])
            == self.wait_for_failure(pair[1])
            == "rank 1 on there failed: its disk is full"
        )
        start_time = time.monotonic()
        pair[0].wait_for_acknowledgements(30.0)
        assert time.monotonic() - start_time < 29

    def test_a_rank_that_asks_for_the_cause_has_not_acknowledged_it(
        self, pair: tuple[FailureDetector, FailureDetector], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rank 0 would close the store and be reported as lost."""
        monkeypatch.setattr(failure_detector, "DIAGNOSIS_TIMEOUT_SECONDS", 60.0)
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(pair[1].find_cause)
            wait_for(lambda: pair[1]._has_noticed, "the request for the cause")
            start_time = time.monotonic()
            pair[0].wait_for_acknowledgements(0.5)
            assert time.monotonic() - start_time >= 0.5
            failure = pair[0].report(Failure("the connection between the ranks broke: broken pipe"))
            pair[0].wait_for_acknowledgements(30.0)
            assert time.monotonic() - start_time < 29
            assert answer.result() == failure

    def test_acknowledgements_of_stopped_ranks_are_not_awaited(
        self, pair: tuple[FailureDetector, FailureDetector]
    ) -> None:
        for each in pair:
            each.start()
        start_time = time.monotonic()
        pair[0].wait_for_acknowledgements(0.5)
        assert time.monotonic() - start_time >= 0.5, "the other rank is still running"
        pair[0]._acknowledgement_deadline = None
        pair[1].stop()
        pair[0].wait_for_acknowledgements(60.0)
        assert time.monotonic() - start_time < 50

    def test_a_known_failure_outlives_the_store(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        failure = pair[1].report(Failure("rank 1 on there failed: its disk is full"))
        assert pair[1].record_server_loss() == failure
        assert pair[0].record_server_loss().message == "rank 0, the server, was lost (killed, out of memory or hung)"

    def test_ranks_waiting_for_each_other_are_a_deadlock(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        for each in pair:
            each.timeout = 0.3
        with pair[0].waiting(), pair[1].waiting():
            for each in pair:
                each.start()
            assert "all ranks have been waiting for each other" in self.wait_for_failure(pair[1])

    def test_waiting_for_a_working_rank_is_no_failure(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        for each in pair:
            each.timeout = 4.0
            each.start()
        with pair[0].waiting(), pair[1].activity("round 1"):
            for _ in range(60):
                time.sleep(0.1)
                pair[1].progress()
        assert pair[0].failure is None

    def test_disarmed_detectors_ignore_lost_ranks(self, pair: tuple[FailureDetector, FailureDetector]) -> None:
        for each in pair:
            each.disarm()
        pair[0].start()
        self.wait_for_failure(pair[0])
        pair[0].progress()
        assert not self.aborts


def test_an_activity_ends_with_its_context_and_leaves_the_outer_one() -> None:
    """Without a thread, as in a single process."""
    detector = FailureDetector(KeyValueStore(dist.HashStore()), 0, 1, 1e6, nothing, nothing)
    with contextlib.suppress(KeyError), detector.activity("outer"):
        with detector.activity("inner"):
            assert detector._activity == "inner"
        assert detector._activity == "outer"
        raise KeyError
    assert (detector._activity, detector.failure_message) == ("", "")


def test_silence_is_counted_from_the_last_change() -> None:
    monitor = HeartbeatMonitor()
    assert monitor.find_silent({1: "1", 2: "1"}, 0.05) == []
    time.sleep(0.06)
    assert monitor.find_silent({1: "2", 2: "1"}, 0.05) == [2]
    assert monitor.find_silent({1: "2", 2: failure_detector.FINAL_HEARTBEAT}, 0.0) == [1]


def test_a_slow_store_is_not_polled_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes as long as a pause of this process, and all ranks send heartbeats."""
    now = [0.0]

    def advance(seconds: float) -> None:
        now[0] += seconds
        assert now[0] < 100

    class SlowStore(KeyValueStore):
        def get(self, key: str) -> str | None:
            advance(1.5)
            return "1 0.0" if key.startswith("heartbeat/") else None

        def get_all(self, keys: list[str]) -> list[str]:
            advance(1.5)
            return [f"{now[0]} 0.0" for _ in keys]

    monkeypatch.setattr(failure_detector, "time", mock.Mock(monotonic=lambda: now[0], sleep=advance))
    assert FailureDetector(SlowStore(dist.HashStore()), 0, 3, 1e6, nothing, nothing).find_cause() is None


def test_a_paused_monitor_restarts_its_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(failure_detector, "time", mock.Mock(monotonic=lambda: now[0]))
    monitor = HeartbeatMonitor()
    assert monitor.find_silent({1: "1"}, 4.0) == [] and monitor.seconds == 0.0
    now[0] += 2.0
    assert monitor.find_silent({1: "1"}, 4.0) == [] and monitor.seconds == 2.0
    now[0] += 5.0
    assert monitor.find_silent({1: "1"}, 4.0) == [] and monitor.seconds == 0.0
    for _ in range(2):
        now[0] += 2.0
        silent = monitor.find_silent({1: "1"}, 4.0)
    assert silent == [1] and monitor.seconds == 4.0
