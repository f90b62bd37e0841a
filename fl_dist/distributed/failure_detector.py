"""Heartbeats: a thread on each rank shows that the rank is alive, watches other ranks and its own main thread.

The length of a round does not tell who is lost. A killed or stopped process sends no heartbeats; a stuck one sends
them, but its main thread reports no progress. Rank 0 watches all ranks, and all ranks watch rank 0. Whoever learns that
the job is over says why and leaves, whatever its main thread waits for.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NoReturn

from fl_dist.common.errors import FlDistError
from fl_dist.common.terminal import print_error
from fl_dist.distributed import hardware_errors
from fl_dist.distributed.failures import Failure
from fl_dist.distributed.heartbeats import (
    FINAL_HEARTBEAT,
    HEARTBEAT_INTERVAL_SECONDS,
    HeartbeatContent,
    HeartbeatMonitor,
    Heartbeats,
    SuspensionClock,
    parse_heartbeat,
)
from fl_dist.distributed.key_value_store import KeyValueStore
from fl_dist.distributed.main_thread import MainThreadState
from fl_dist.distributed.rank_exit import call_before_exit, exit_rank
from fl_dist.distributed.signals import EXIT_REQUEUE, StopRequest

log = logging.getLogger(__name__)
HEARTBEAT_TIMEOUT_SECONDS = 7.0
"""Without a heartbeat for so long, a rank is lost."""
DIAGNOSIS_TIMEOUT_SECONDS = 4.0
"""The same when a connection has broken; also how long ranks that leave wait for each other."""
LOSS_CAUSES = "(killed, out of memory or hung)"


class FailureDetector:
    """One process alone has one too, whose threads never start."""

    def __init__(self, store: KeyValueStore, rank: int, size: int, timeout: float, stop: StopRequest) -> None:
        """`timeout`: seconds without progress after which a rank is stuck."""
        self.store, self.rank, self.size, self.timeout, self._stop = store, rank, size, timeout, stop
        self._main_thread, self._heartbeats = MainThreadState(), Heartbeats(store, rank)
        self._others = list(range(1, size)) if rank == 0 else [0]
        """The ranks that this one watches."""
        # Set by the main thread, each in a single write, and read by the other threads: no lock.
        self._connecting_timeout: float | None = None
        self._connection_error = ""
        self._watches_ranks = self._is_disarmed = False
        self._round: tuple[int, dict[int, int]] = 0, {}
        self._server = "rank 0"
        # Set by the other threads.
        self._last_answer = self._broken_since = 0.0
        self.failure: Failure | None = None
        """Why the job ends, as this rank knows it."""
        self._leaving = threading.Lock()
        """Held by the thread that ends this process."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._store_watcher = threading.Thread(target=self._watch_store, daemon=True)
        self._exit_functions = contextlib.ExitStack()

    # The main thread.

    @property
    def failure_message(self) -> str:
        """Why the job ends; empty while it does not."""
        return "" if self.failure is None else self.failure.message

    def start(self) -> None:
        """Send heartbeats, and leave when any rank reports a failure or rank 0 does not answer."""
        self._last_answer = time.monotonic()
        self._exit_functions.enter_context(call_before_exit(self._announce_exit))
        self._thread.start()
        self._store_watcher.start()

    def stop(self) -> None:
        """Rank 0, which holds the store, waits until the others have left it."""
        self._stopped.set()
        self._thread.join()
        self._store_watcher.join()
        self._exit_functions.close()
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):
                self._wait_for_others(DIAGNOSIS_TIMEOUT_SECONDS)

    def begin_round(self, index: int, assignment: dict[int, int]) -> None:
        """Which rank trains which clients, for the message about a lost rank."""
        self._round = index + 1, assignment

    def activity(self, name: str) -> AbstractContextManager[None]:
        """Within it the main thread has to make progress."""
        return self._main_thread.activity(name)

    def progress(self) -> None:
        """The main thread makes progress."""
        self._main_thread.progress()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it the main thread waits for other ranks."""
        with self._main_thread.waiting(), self._broken_connections():
            yield

    @contextlib.contextmanager
    def connecting(self, seconds: float) -> Iterator[None]:
        """Within it the ranks, of which every one is there, connect, for so long at most. From here on one without
        heartbeats is lost."""
        self._connecting_timeout = seconds
        with self.activity("connecting to the other ranks"), self._broken_connections():
            self._server = self._describe_rank(0)
            self._watches_ranks = True
            yield
        self._connecting_timeout = None

    @contextlib.contextmanager
    def _broken_connections(self) -> Iterator[None]:
        """The heartbeat thread finds out why one broke, and ends this process."""
        try:
            yield
        except RuntimeError as e:
            # A failure of this rank is reported before its end makes the others report a lost rank.
            if isinstance(e, FlDistError) or hardware_errors.is_local_failure(e):
                raise
            self._connection_error = (str(e) or type(e).__name__).splitlines()[0]
            if self._thread.is_alive():
                self._thread.join()
            raise

    def disarm(self) -> None:
        """The last round is over: a lost rank no longer ends the others."""
        self._is_disarmed = True

    def report(self, failure: Failure) -> None:
        """Tell all ranks why this one is about to leave. If another thread ends the process already, wait for that."""
        self._leaving.acquire()
        self.failure = self.failure or failure
        _call_with_timeout(DIAGNOSIS_TIMEOUT_SECONDS, lambda: self._publish(failure))

    # The heartbeat thread.

    def _run(self) -> None:
        monitor, clock = HeartbeatMonitor(), SuspensionClock()
        try:
            while True:
                self._check(monitor)
                self._last_answer = time.monotonic()
                if self._stopped.wait(HEARTBEAT_INTERVAL_SECONDS):
                    self._heartbeats.send_final()
                    return
                if clock.was_suspended():  # not stuck
                    self._main_thread.progress()
        except RuntimeError:  # the store is gone with rank 0
            self._end(self._loss_of([0]))

    def _check(self, monitor: HeartbeatMonitor) -> None:
        if self._connection_error:
            self.store.compare_set("connection error", self._connection_error)
        self.send_heartbeat()
        if self.failure is None and (failure := self._read_failure() or self._detect(monitor)) is not None:
            self._end(failure)

    def _detect(self, monitor: HeartbeatMonitor) -> Failure | None:
        """What this rank sees itself: its stuck main thread, and other ranks."""
        seconds, key = self.timeout, "comm.timeout"
        if (connecting := self._connecting_timeout) is not None:
            seconds, key = connecting, "comm.rendezvous_timeout"
        if self._main_thread.seconds_without_progress() > seconds:
            reason = f"no progress for {seconds:g} s ({key}) in {self._main_thread.current_activity}"
            return self._publish(Failure(f"{self._describe_rank(self.rank)} is stuck: {reason}"))
        failure = self._watch_others(monitor) if self._watches_ranks else None
        return None if failure is None else self._publish(failure)

    def _watch_others(self, monitor: HeartbeatMonitor) -> Failure | None:
        """Rank 0 watches all ranks, and decides why a connection has broken; the others watch rank 0."""
        heartbeats = self._heartbeats.read(self._others)
        present = [parse_heartbeat(text) for text in heartbeats.values() if text != FINAL_HEARTBEAT]
        if self._connection_error or any(content.has_broken_connection for content in present):
            self._broken_since = self._broken_since or time.monotonic()
        seconds = DIAGNOSIS_TIMEOUT_SECONDS if self._broken_since else HEARTBEAT_TIMEOUT_SECONDS
        if silent := monitor.find_silent(heartbeats, seconds):
            return self._loss_of(silent)
        if self.rank:
            return None
        if self._broken_since and time.monotonic() - self._broken_since > seconds + 2 * HEARTBEAT_INTERVAL_SECONDS:
            return Failure(f"the connection between the ranks broke: {self.store.get('connection error')}")
        waits = [content.seconds_waiting for content in present]
        if waits and min([*waits, self._main_thread.seconds_waiting()]) > self.timeout:
            return Failure(f"all ranks have been waiting for each other for {min(waits):.0f} s: the network hangs")
        return None

    def send_heartbeat(self) -> None:
        self._heartbeats.send(HeartbeatContent(self._main_thread.seconds_waiting(), bool(self._connection_error)))

    # The thread that watches the store.

    def _watch_store(self) -> None:
        """If rank 0 is stopped, the heartbeat thread waits for its answer forever."""
        clock = SuspensionClock()
        while self._thread.is_alive():
            self._thread.join(HEARTBEAT_INTERVAL_SECONDS)
            if clock.was_suspended():
                self._last_answer = time.monotonic()
            if time.monotonic() - self._last_answer > HEARTBEAT_TIMEOUT_SECONDS:
                self._end(self._loss_of([0]))

    # Any thread.

    def _end(self, failure: Failure) -> None:
        """This process ends, unless its main thread is about to end it or its work is done."""
        self.failure = self.failure or failure
        if not self._is_disarmed:
            if self._leaving.acquire(blocking=False):
                self._leave(failure)
        elif self.rank and 0 in failure.ranks:  # its main thread may wait for rank 0, which will not answer
            exit_rank(0)

    def _leave(self, failure: Failure) -> NoReturn:
        log.error("%s", failure.message, extra={"is_transient": failure.is_transient, "ranks": failure.ranks})
        if self.rank == 0:
            print_error(failure.message)
        exit_rank(self._stop.exit_code(failure.code))

    def _announce_exit(self, code: int) -> int:
        """Before this process ends after a failure. Whoever interrupts a run does not want to wait for it."""
        if self.failure is None or 0 not in self.failure.ranks:
            seconds = 1.0 if code == EXIT_REQUEUE else DIAGNOSIS_TIMEOUT_SECONDS
            _call_with_timeout(seconds, lambda: self._send_final_heartbeat(seconds))
        return code

    def _send_final_heartbeat(self, seconds: float) -> None:
        """Rank 0 has printed why the job ends and needs to stay until the others know; they wait for that line, because
        a launcher may kill rank 0 when the first rank has left."""
        self._stopped.set()
        self._heartbeats.send_final()
        self._wait_for_others(seconds)

    def _wait_for_others(self, seconds: float) -> None:
        lost = self.failure.ranks if self.failure else ()
        self._heartbeats.wait_for_final([rank for rank in self._others if rank not in lost], seconds)

    def _read_failure(self) -> Failure | None:
        text = self.store.get("failure")
        return None if text is None else Failure(*json.loads(text))

    def _publish(self, failure: Failure) -> Failure:
        """The failure that was reported first."""
        return Failure(*json.loads(self.store.compare_set("failure", json.dumps(failure))))

    def _loss_of(self, ranks: list[int]) -> Failure:
        names = " and ".join(map(self._describe_rank, ranks)) if ranks != [0] else f"{self._server}, the server,"
        number, assignment = self._round
        clients = ", ".join(str(client) for client, rank in assignment.items() if rank in ranks)
        when = f" in round {number}" if number else ""
        whose = f", whose clients were {clients}" if clients else ""
        verb = "was" if len(ranks) == 1 else "were"
        return Failure(f"{names} {verb} lost {LOSS_CAUSES}{when}{whose}", ranks=ranks)

    def _describe_rank(self, rank: int) -> str:
        return f"rank {rank} on {self.store.get(f'host/{rank}') or 'an unknown host'}"


def _call_with_timeout(seconds: float, function: Callable[[], object]) -> None:
    """Call a function of the store, which may be gone or never answer; go on after so long."""

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
