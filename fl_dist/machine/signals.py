"""A signal asks the run to end after the current round; after the grace time it ends at once."""

import ctypes
import logging
import os
import signal
import sys
import threading
from types import TracebackType

from fl_dist import PARENT
from fl_dist.common.terminal import complain

REQUEUE = 75
"""Exit code of an interrupted run that can be resumed (EX_TEMPFAIL)."""
HANDLED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
log = logging.getLogger("fl_dist")


def end_with_parent(parent: int = PARENT) -> None:
    """Ask the kernel for SIGTERM when the parent dies: no rank outlives its launcher."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before it could be asked
        os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """Context: signals set `requested`. A thread listens, for the main one may be waiting for other ranks."""

    def __init__(self, grace: float) -> None:
        self.grace, self.requested, self.asked = grace, False, False
        """`requested`: end soon; `asked`: that was so, though the run may have ended by itself since."""
        self._timer: threading.Timer | None = None
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopRequest":
        if self._active:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._old = {s: signal.signal(s, lambda *_: None) for s in HANDLED}
            self._listener = threading.Thread(target=self._listen, args=(self._read,), daemon=True)
            self._listener.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._active:
            signal.set_wakeup_fd(self._old_fd)
            for number, handler in self._old.items():
                signal.signal(number, handler)
            os.close(self._write)
            # A thread left behind may be the one that frees a tensor when the interpreter ends, which aborts.
            self._listener.join()
            if self._timer is not None:
                self._timer.cancel()
                self._timer.join()

    def _listen(self, pipe: int) -> None:
        handled = {int(s) for s in HANDLED}
        while received := os.read(pipe, 1):
            if received[0] in handled:
                self._request(signal.Signals(received[0]).name)
        os.close(pipe)

    def _request(self, name: str) -> None:
        if self.requested:
            return
        self.requested = self.asked = True
        log.warning("%s received: the run ends after this round, or in %g s without it", name, self.grace)
        self._timer = threading.Timer(self.grace, self._abandon)
        self._timer.daemon = True
        self._timer.start()

    def _abandon(self) -> None:
        if self.requested:
            log.warning("the round did not end within the grace time; it is abandoned, the last checkpoint stays")
            os._exit(REQUEUE)

    def settle(self) -> None:
        """The run has ended by itself: the grace time no longer counts."""
        self.requested = False


class EndAtOnce(StopRequest):
    """For a process that has nothing to save: a signal ends it, with a line if it is one that speaks."""

    def __init__(self, what: str, speaks: bool) -> None:
        super().__init__(0.0)
        self.what, self.speaks = what, speaks

    def _request(self, name: str) -> None:
        if self.speaks:
            complain(f"{name} received: {self.what}")
        os._exit(128 + signal.Signals[name])
