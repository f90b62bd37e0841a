"""Which heartbeats have stopped, seen from a process that may itself have been suspended."""

import time

HEARTBEAT_INTERVAL_SECONDS = 0.5
MAX_DELAY_SECONDS = 2.0
"""By which a heartbeat may be late; if it is later, this process was suspended."""
FINAL_HEARTBEAT = "gone"


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
