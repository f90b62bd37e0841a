"""Heartbeats: a thread on each rank shows that the rank is alive, watches other ranks and its own main thread.

The length of a round does not tell who is lost. A killed or stopped process sends no heartbeats; a stuck one sends
them, but its main thread reports no progress. Rank 0 watches all ranks, and all ranks watch rank 0.
"""

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from fl_dist.common.terminal import print_error
from fl_dist.distributed import hardware_errors
from fl_dist.distributed.failures import Failure, RankLostError
from fl_dist.distributed.key_value_store import KeyValueStore

log = logging.getLogger(__name__)
HEARTBEAT_INTERVAL_SECONDS = 0.5
HEARTBEAT_TIMEOUT_SECONDS = 7.0
"""Without a heartbeat for so long, a rank is lost."""
DIAGNOSIS_TIMEOUT_SECONDS = 4.0
"""The same when a connection has broken and the survivors look for the missing rank; also how long they wait for each
other."""
MAX_DELAY_SECONDS = 2.0
"""By which a heartbeat may be late; if it is later, this process was suspended."""
EXIT_TIMEOUT_SECONDS = 5.0
"""In which the main thread has to notice a failure; in an endless kernel or loop it cannot."""
FINAL_HEARTBEAT = "gone"
LOSS_CAUSES = "(killed, out of memory or hung)"


class HeartbeatMonitor:
    """When each rank's heartbeat last changed."""

    def __init__(self) -> None:
        self._last_change: dict[int, tuple[str, float]] = {}
        self._last_look = self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has monitored without a break."""
        return self._last_look - self._start

    def find_silent(self, heartbeats: dict[int, str], seconds: float) -> list[int]:
        """The ranks whose heartbeat has not changed for so long, without those that have left."""
        now = time.monotonic()
        if now - self._last_look > HEARTBEAT_INTERVAL_SECONDS + MAX_DELAY_SECONDS:  # this process was suspended
            self._last_change.clear()
            self._start = now
        self._last_look = now
        for rank, heartbeat in heartbeats.items():
            if self._last_change.get(rank, ("", 0.0))[0] != heartbeat:
                self._last_change[rank] = (heartbeat, now)
        present = [rank for rank, heartbeat in heartbeats.items() if heartbeat != FINAL_HEARTBEAT]
        return [rank for rank in present if now - self._last_change[rank][1] >= seconds]


class FailureDetector:
    """One process alone has one too, whose thread never starts."""

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        timeout: float,
        shut_down: Callable[[], None],
        abort: Callable[[], None],
    ) -> None:
        """`timeout`: seconds without progress after which a rank is stuck; `shut_down` closes the sockets of the
        group from any thread, `abort` ends the group from the main thread."""
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._shut_down, self._abort = shut_down, abort
        # Set by the main thread, each in a single write, and read by the heartbeat thread: no lock. (After a suspension
        # the heartbeat thread sets the last progress, to the present time as the main thread would.)
        self.is_connecting = False
        """While ranks connect they wait for each other, however long that takes."""
        self._activity, self._last_progress, self._waiting_since = "", 0.0, 0.0
        self._has_noticed = self._is_disarmed = False
        self._round: tuple[int, dict[int, int]] = 0, {}
        self._server = "rank 0"
        # Set by either thread under the lock, once; reading needs no lock.
        self.failure: Failure | None = None
        self._lock = threading.Lock()
        self._acknowledgement_deadline: float | None = None
        self._stopped, self._heartbeat_numbers = threading.Event(), itertools.count(1)
        self._thread = threading.Thread(target=self._run, daemon=True)

    # The main thread.

    @property
    def failure_message(self) -> str:
        """Why the job ends; empty while it does not."""
        return "" if self.failure is None else self.failure.message

    def start(self) -> None:
        """When every rank has sent its first heartbeat."""
        self._server = self._describe_rank(0)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin_round(self, index: int, assignment: dict[int, int]) -> None:
        """Which rank trains which clients, for the message about a lost rank."""
        self._round = index + 1, assignment

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Within it the main thread has to make progress."""
        outer = self._activity
        self._last_progress = time.monotonic()  # first: the thread may look in between
        self._activity = name
        try:
            yield
        finally:
            self._last_progress = time.monotonic()
            self._activity = outer

    def progress(self) -> None:
        """The main thread makes progress. RankLostError if the job has failed meanwhile."""
        self._last_progress = time.monotonic()
        if self.failure is not None and not self._is_disarmed:
            self._has_noticed = True
            raise self.failure.to_error()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Callable[[], None]]:
        """Within it the main thread waits for other ranks; a connection that breaks becomes a RankLostError."""
        self._waiting_since = time.monotonic()
        try:
            yield self.progress
        except RankLostError:
            self._abort()
            raise
        except RuntimeError as e:
            if hardware_errors.is_local_failure(e):  # report it before its end makes the others report a lost rank
                raise
            raise self._diagnose(e) from e
        finally:
            self._waiting_since = 0.0

    def disarm(self) -> None:
        """The last round is over: a lost rank no longer ends the others."""
        self._is_disarmed = True

    def report(self, failure: Failure) -> Failure:
        """Tell all ranks why the job ends; returns the failure that was reported first."""
        self._has_noticed = True
        return self._acknowledge(self._publish(failure))

    def find_cause(self) -> Failure | None:
        """After a connection broke: the failure that was reported, or the rank without heartbeats."""
        self._has_noticed = True
        monitor, others = HeartbeatMonitor(), self._active_ranks()
        deadline = time.monotonic() + 4 * DIAGNOSIS_TIMEOUT_SECONDS  # however often this process was suspended
        seconds = DIAGNOSIS_TIMEOUT_SECONDS + HEARTBEAT_INTERVAL_SECONDS
        while self.failure is None and monitor.seconds < seconds and time.monotonic() < deadline:
            if (failure := self._read_failure()) is not None:
                return self._acknowledge(failure)
            if silent := monitor.find_silent(self._heartbeats(others), DIAGNOSIS_TIMEOUT_SECONDS):
                return self.report(self._loss_of(silent))
            time.sleep(0.05)
        return self.failure

    def record_server_loss(self) -> Failure:
        """The store is gone with rank 0; so that was lost, unless this rank knows another failure."""
        return self._record(self._loss_of([0]))

    def wait_for_acknowledgements(self, seconds: float) -> None:
        """Until the others know why this rank ends, or have left: the store ends with rank 0. The first call decides
        how long all calls together may take."""
        lost = () if self.failure is None else self.failure.ranks
        self._acknowledgement_deadline = self._acknowledgement_deadline or time.monotonic() + seconds
        while time.monotonic() < self._acknowledgement_deadline and any(
            rank not in lost and self.store.get(f"acknowledgement/{rank}") is None for rank in self._active_ranks()
        ):
            time.sleep(0.02)

    def _diagnose(self, error: Exception) -> RankLostError:
        """The known cause; without one, the error of the first rank that noticed anything."""
        try:
            self.store.set_timeout(DIAGNOSIS_TIMEOUT_SECONDS)
            first = self.store.compare_set("first error", str(error).splitlines()[0])
            self._shut_down()  # so that the others notice too
            failure = self.find_cause() or self.report(Failure(f"the connection between the ranks broke: {first}"))
        except Exception:
            failure = self.record_server_loss()
        self._abort()
        return failure.to_error()

    # The heartbeat thread.

    def _run(self) -> None:
        monitor, last = HeartbeatMonitor(), time.monotonic()
        while self.failure is None and not self._stopped.wait(HEARTBEAT_INTERVAL_SECONDS):
            if time.monotonic() - last > HEARTBEAT_INTERVAL_SECONDS + MAX_DELAY_SECONDS:  # suspended, not stuck
                self._last_progress = time.monotonic()
            try:
                self.send_heartbeat()
                if failure := self._read_failure() or self._detect(monitor):
                    self._record(failure)
            except RuntimeError:
                self.record_server_loss()
            last = time.monotonic()
        if self.failure is not None and not self._is_disarmed:
            self._interrupt_main_thread()
        self._try_set("heartbeat", FINAL_HEARTBEAT)

    def _detect(self, monitor: HeartbeatMonitor) -> Failure | None:
        """What this rank sees itself: its stuck main thread, silent ranks, ranks that all wait."""
        if self._activity and time.monotonic() - self._last_progress > self.timeout:
            reason = f"no progress for {self.timeout:g} s (comm.timeout) in {self._activity}"
            return self._publish(Failure(f"{self._describe_rank(self.rank)} is stuck: {reason}"))
        if self._is_disarmed and self.rank:
            return None
        heartbeats = self._heartbeats(list(range(1, self.size)) if self.rank == 0 else [0])
        if silent := monitor.find_silent(heartbeats, HEARTBEAT_TIMEOUT_SECONDS):
            return self._publish(self._loss_of(silent))
        waits = [float(text.split()[1]) for text in heartbeats.values() if text != FINAL_HEARTBEAT]
        if self.rank == 0 and waits and min([*waits, self._seconds_waiting()]) > self.timeout:
            message = f"all ranks have been waiting for each other for {min(waits):.0f} s: the network hangs"
            return self._publish(Failure(message))
        return None

    def _interrupt_main_thread(self) -> None:
        """Make what it waits for fail. If it does not wait for other ranks, end the process."""
        self._try_set("acknowledgement", "1")
        deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
        while True:
            if not self._has_noticed:
                self._shut_down()  # repeatedly: it may just be connecting
            if self._stopped.wait(HEARTBEAT_INTERVAL_SECONDS / 5):
                return
            self._try_set("heartbeat", f"{next(self._heartbeat_numbers)} 0")  # others still look for the missing rank
            is_busy = self._activity or self._waiting_since
            if time.monotonic() > deadline and not self._has_noticed and is_busy:
                self.exit_process()

    def exit_process(self) -> NoReturn:
        """End the process, whose main thread does not return."""
        failure = self.failure or Failure("the connection between the ranks broke")
        line = f"{failure.message}{f'; this rank was in {self._activity}' if self._activity else ''}"
        log.error("%s", line)
        if self.rank == 0:
            print_error(line)
        os._exit(failure.code)

    def send_heartbeat(self) -> None:
        text = f"{next(self._heartbeat_numbers)} {self._seconds_waiting():.1f}"
        self.store.set(f"heartbeat/{self.rank}", text)

    def _try_set(self, key: str, text: str) -> None:
        """The store may be gone with rank 0."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{key}/{self.rank}", text)

    def _seconds_waiting(self) -> float:
        since = self._waiting_since
        return time.monotonic() - since if since and not self.is_connecting else 0.0

    # Both threads.

    def _acknowledge(self, failure: Failure) -> Failure:
        """From here on this rank no longer needs the store."""
        first = self._record(failure)
        self._try_set("acknowledgement", "1")
        return first

    def _record(self, failure: Failure) -> Failure:
        """The first failure that this rank learns of, from whichever thread, stays."""
        with self._lock:
            self.failure = self.failure or failure
            return self.failure

    def _read_failure(self) -> Failure | None:
        text = self.store.get("failure")
        return None if text is None else _parse_failure(text)

    def _publish(self, failure: Failure) -> Failure:
        return _parse_failure(self.store.compare_set("failure", json.dumps(failure)))

    def _active_ranks(self) -> list[int]:
        """The other ranks that have joined and not left."""
        heartbeats = {r: self.store.get(f"heartbeat/{r}") for r in range(self.size) if r != self.rank}
        return [r for r, text in heartbeats.items() if text not in (None, FINAL_HEARTBEAT)]

    def _heartbeats(self, ranks: list[int]) -> dict[int, str]:
        return dict(zip(ranks, self.store.get_all([f"heartbeat/{r}" for r in ranks]), strict=True))

    def _loss_of(self, ranks: list[int]) -> Failure:
        names = " and ".join(map(self._describe_rank, ranks)) if ranks != [0] else f"{self._server}, the server,"
        number, assignment = self._round
        clients = ", ".join(str(client) for client, rank in assignment.items() if rank in ranks)
        when = f" in round {number}" if number else ""
        whose = f", whose clients were {clients}" if clients else ""
        verb = "was" if len(ranks) == 1 else "were"
        return Failure(f"{names} {verb} lost {LOSS_CAUSES}{when}{whose}", ranks=tuple(ranks))

    def _describe_rank(self, rank: int) -> str:
        return f"rank {rank} on {self.store.get(f'host/{rank}') or 'an unknown host'}"


def _parse_failure(text: str) -> Failure:
    message, code, is_transient, ranks = json.loads(text)
    return Failure(message, code, is_transient, tuple(ranks))
