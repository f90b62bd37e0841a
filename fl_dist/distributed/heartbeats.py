"""Heartbeats in the store, and which of them have stopped, as a process sees it that may have been suspended itself."""

import itertools
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from fl_dist.distributed.key_value_store import KeyValueStore

HEARTBEAT_INTERVAL_SECONDS = 0.5
MAX_DELAY_SECONDS = 2.0
"""By which a heartbeat may be late; if it is later, this process was suspended."""
FINAL_HEARTBEAT = "gone"


class HeartbeatContent(NamedTuple):
    """What a heartbeat says of its rank."""

    seconds_waiting: float
    """How long its main thread has been waiting for other ranks."""
    has_broken_connection: bool


class Heartbeats:
    """This rank's heartbeats, and those of others."""

    def __init__(self, store: KeyValueStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._numbers, self._sending, self._is_final = itertools.count(1), threading.Lock(), False

    def send(self, content: HeartbeatContent) -> None:
        """From any thread; none follows the final one. Each has another number, so that it differs."""
        with self._sending:
            if not self._is_final:
                self._write(f"{next(self._numbers)} {content.seconds_waiting:.1f} {content.has_broken_connection:d}")

    def send_final(self) -> None:
        """This rank leaves, and is not lost."""
        with self._sending:
            self._is_final = True
            self._write(FINAL_HEARTBEAT)

    def _write(self, text: str) -> None:
        self._store.set(self._key(self._rank), text)

    def read(self, ranks: Sequence[int]) -> dict[int, str]:
        return dict(zip(ranks, self._store.get_all([self._key(rank) for rank in ranks]), strict=True))

    def wait_for_final(self, ranks: Sequence[int], seconds: float) -> None:
        """Until all these ranks have left, if they ever came; not for longer than so many seconds."""
        deadline = time.monotonic() + seconds
        keys = [self._key(rank) for rank in ranks]
        while any(self._store.get(key) not in (None, FINAL_HEARTBEAT) for key in keys) and time.monotonic() < deadline:
            time.sleep(0.02)

    @staticmethod
    def _key(rank: int) -> str:
        return f"heartbeat/{rank}"


def parse_heartbeat(text: str) -> HeartbeatContent:
    """Of a heartbeat that is not the final one."""
    _, seconds, is_broken = text.split()
    return HeartbeatContent(float(seconds), is_broken == "1")


class SuspensionClock:
    """Asked once per interval, it notices when this process could do nothing for a while."""

    def __init__(self) -> None:
        self._last_call = time.monotonic()

    def was_suspended(self) -> bool:
        """Since the last call."""
        last, self._last_call = self._last_call, time.monotonic()
        return self._last_call - last > HEARTBEAT_INTERVAL_SECONDS + MAX_DELAY_SECONDS


class HeartbeatMonitor:
    """When each rank's heartbeat last changed."""

    def __init__(self) -> None:
        self._last_change: dict[int, tuple[str, float]] = {}
        self._clock = SuspensionClock()

    def find_silent(self, heartbeats: dict[int, str], seconds: float) -> list[int]:
        """The ranks whose heartbeat has not changed for so long, without those that have left."""
        if self._clock.was_suspended():
            self._last_change.clear()
        now = time.monotonic()
        for rank, heartbeat in heartbeats.items():
            if self._last_change.get(rank, ("", 0.0))[0] != heartbeat:
                self._last_change[rank] = (heartbeat, now)
        present = [rank for rank, heartbeat in heartbeats.items() if heartbeat != FINAL_HEARTBEAT]
        return [rank for rank in present if now - self._last_change[rank][1] >= seconds]
