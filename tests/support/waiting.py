"""Wait for conditions, hold ranks at a fault point, find free ports."""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_SECONDS = 120.0
"""The timeout of all waits; large enough for a busy machine."""


def wait_for(condition: Callable[[], object], what: str, seconds: float = TIMEOUT_SECONDS, every: float = 0.02) -> None:
    """Return when the condition is true; fail at the timeout, naming what did not happen."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(every)


class Hold:
    """Blocks a rank at a point of FL_DIST_FAULT until `release`, so that a run cannot finish too soon."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.touch()

    def at(self, point: str) -> str:
        return f"{point}=hold:{self._file}"

    @property
    def is_reached(self) -> bool:
        """Whether the rank has reached the point."""
        return self._file.stat().st_size > 0

    def release(self) -> None:
        self._file.unlink()


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive free ports, from a range of this test process.

    The ranges lie below the ephemeral ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    run = int(os.environ.get("PYTEST_XDIST_TESTRUNUID", "0")[:8], 16)  # other test runs may use this machine
    lowest = 10_000 + 1_000 * ((run + worker) % 22)
    for first in random.SystemRandom().sample(range(lowest, lowest + 1_000 - count), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free port")
