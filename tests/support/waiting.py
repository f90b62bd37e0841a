"""Waiting, with bounds that a slow machine keeps too; ports that nobody else uses."""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 120.0
"""Seconds within which everything that is waited for has to happen, on a machine with other things to do."""


def wait_for(condition: Callable[[], object], what: str, seconds: float = PATIENCE, every: float = 0.02) -> None:
    """Return when the condition is true; fail, saying what did not happen, if it is not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(every)


class Hold:
    """Keeps a rank at a point of FL_DIST_FAULT until it is released: a run that cannot be over too soon."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.touch()

    def at(self, point: str) -> str:
        return f"{point}=hold:{self._file}"

    @property
    def held(self) -> bool:
        """Whether the rank is there."""
        return self._file.stat().st_size > 0

    def release(self) -> None:
        self._file.unlink()


def free_port(count: int = 1) -> int:
    """The first of so many free ports in a row, from a range of this test process.

    The ranges lie below those that systems give to whoever connects.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    run = int(os.environ.get("PYTEST_XDIST_TESTRUNUID", "0")[:8], 16)  # somebody else may test here too
    lowest = 10_000 + 1_000 * ((run + worker) % 22)
    for first in random.SystemRandom().sample(range(lowest, lowest + 1_000 - count), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free port")
