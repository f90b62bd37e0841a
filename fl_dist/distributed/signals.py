"""A signal asks the run to end after the current round; after the grace period it ends at once."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from fl_dist import PARENT
from fl_dist.common.terminal import print_error

EXIT_BAD_CONFIG = 2
EXIT_REQUEUE = 75
"""Exit code of an interrupted run that can be resumed (EX_TEMPFAIL)."""
HANDLED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
log = logging.getLogger(__name__)


def end_with_parent(parent: int = PARENT) -> None:
    """Ask the kernel for SIGTERM when the parent dies: no rank outlives its launcher."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has died already
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
    numbers: Sequence[signal.Signals] = HANDLED_SIGNALS,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """A program that `is_stopping` ends after the context; a repeated signal then does not change its exit code."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, signal.SIG_IGN if is_stopping() else previous_handler)


class StopRequest:
    """Within it, signals set `is_requested`. A thread receives them: the main thread may be waiting for other ranks."""

    def __init__(self, grace: float, restores_handlers: bool = True) -> None:
        """Without `restores_handlers` the process ends with the run, and ignores repeated signals meanwhile."""
        self.grace, self._restores_handlers = grace, restores_handlers
        # Each is a single write, by the listener or by `disarm`, so they need no lock.
        self.is_requested = False
        self.was_requested = False
        """Stays set when the run has ended by itself since."""
        self._timer: threading.Timer | None = None
        self._is_active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "StopRequest":
        if self._is_active:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._previous_handlers = {s: signal.signal(s, lambda *_: None) for s in HANDLED_SIGNALS}
            self._listener = threading.Thread(target=self._listen, args=(self._read,), daemon=True)
            self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_active:
            signal.set_wakeup_fd(self._previous_fd)
            ignores = self.was_requested and not self._restores_handlers
            for number, handler in self._previous_handlers.items():
                signal.signal(number, signal.SIG_IGN if ignores else handler)
            os.close(self._write)
            # A thread that frees a tensor while the interpreter ends would abort the process.
            self._listener.join()
            if self._timer is not None:
                self._timer.cancel()
                self._timer.join()

    def _listen(self, pipe: int) -> None:
        handled = {int(s) for s in HANDLED_SIGNALS}
        while received := os.read(pipe, 1):
            if received[0] in handled:
                self._request(signal.Signals(received[0]).name)
        os.close(pipe)

    def _request(self, name: str) -> None:
        if self.is_requested:
            return
        self.is_requested = self.was_requested = True
        log.warning("%s received: the run ends after this round, or after %g s at the latest", name, self.grace)
        self._timer = threading.Timer(self.grace, self._exit_now)
        self._timer.daemon = True
        self._timer.start()

    def _exit_now(self) -> None:
        if self.is_requested:
            log.warning("the round did not end within checkpoint.grace: it is lost, the last checkpoint stays")
            os._exit(EXIT_REQUEUE)

    def disarm(self) -> None:
        """The run has ended by itself: the grace period no longer matters."""
        self.is_requested = False

    def exit_code(self, code: int) -> int:
        """Of a run that failed with this code: one that was asked to end can be resumed all the same."""
        return EXIT_REQUEUE if self.was_requested and code == 1 else code


class ExitOnSignal(StopRequest):
    """For a process that has nothing to save: a signal ends it; rank 0 prints the consequence."""

    def __init__(self, consequence: str, prints_errors: bool) -> None:
        super().__init__(0.0)
        self._consequence, self._prints_errors = consequence, prints_errors

    def _request(self, name: str) -> None:
        if self._prints_errors:
            print_error(f"{name} received: {self._consequence}")
        os._exit(128 + signal.Signals[name])
