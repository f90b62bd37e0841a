"""What the main thread of a rank is doing, as the threads see that watch it."""

import contextlib
import time
from collections.abc import Iterator


class MainThreadState:
    """The main thread sets each value in a single write, and others read it: no lock.

    After a suspension the heartbeat thread reports progress too, as the main thread would.
    """

    def __init__(self) -> None:
        self.current_activity = ""
        self._last_progress = self._waiting_since = 0.0

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Within it the main thread has to make progress."""
        outer = self.current_activity
        self.progress()  # first: a thread may look in between
        self.current_activity = name
        try:
            yield
        finally:
            self.progress()
            self.current_activity = outer

    def progress(self) -> None:
        self._last_progress = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it the main thread waits for other ranks."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = 0.0

    def seconds_waiting(self) -> float:
        since = self._waiting_since
        return time.monotonic() - since if since else 0.0

    def seconds_without_progress(self) -> float:
        """Outside of an activity none is expected."""
        return time.monotonic() - self._last_progress if self.current_activity else 0.0
