"""What a launcher and the ranks of its node share, as files in a folder: process ids, a stop request, exit codes."""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from fl_dist.distributed.signals import EXIT_BAD_CONFIG, EXIT_REQUEUE, handle_signals

NODE_FOLDER = "FL_DIST_NODE"
"""Environment variable of ranks: the folder."""
CHILD_LAUNCHER = "FL_DIST_CHILD_LAUNCHER"
"""Environment variable of a launcher that another launcher started, and that ends with it."""
NO_RESTART_CODES = (0, EXIT_BAD_CONFIG, EXIT_REQUEUE)
"""Exit codes of ranks that must not be started again."""
STRAGGLER_SECONDS = 5.0
"""How long other ranks may take to notice that one has failed; they need less than one."""


class Node:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop, self._fatal = path / "stop", path / "fatal"

    @property
    def is_stopping(self) -> bool:
        """A stop was requested: start nothing again."""
        return self._stop.exists()

    @property
    def has_fatal_error(self) -> bool:
        """A rank failed in a way that no restart can fix."""
        return self._fatal.exists()

    def register(self, rank: int) -> None:
        (self.path / f"{rank}.code").unlink(missing_ok=True)
        (self.path / f"{rank}.pid").write_text(str(os.getpid()))

    def record_exit(self, rank: int, code: int, is_fatal: bool) -> None:
        if is_fatal:
            self._fatal.touch()
        (self.path / f"{rank}.code").write_text(str(code))

    def has_exit_code(self, rank: int) -> bool:
        """Whether the rank is done; only its interpreter may still be shutting down."""
        return (self.path / f"{rank}.code").exists()

    def has_left_silently(self, rank: int) -> bool:
        """Whether it has ended without recording an exit code."""
        return rank in self._pids() and not self.has_exit_code(rank) and not self.is_rank_alive(rank)

    def is_rank_alive(self, rank: int) -> bool:
        """Whether the rank's process exists, even if SIGSTOP suspended it."""
        return is_process_alive(self._pids().get(rank, 0))

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler: pass the signal to the ranks, because torchrun would kill them while they save."""
        self._stop.touch()
        self._send_signal(number)

    def _send_signal(self, number: int) -> None:
        for rank, pid in self._pids().items():
            with contextlib.suppress(ProcessLookupError):
                if not self.has_exit_code(rank):
                    os.kill(pid, number)

    def terminate(self, timeout_seconds: float) -> None:
        """Ask ranks whose launcher process is gone to end; kill those that exceed the timeout."""
        self._send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_seconds
        while any(map(is_process_alive, self._pids().values())) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._send_signal(signal.SIGKILL)

    def kill_stragglers(self) -> None:
        """Kill ranks that still run some time after another has failed: their code may hold the interpreter lock."""
        failed = self._first_failure()
        if failed is None or time.time() < failed + STRAGGLER_SECONDS:
            return
        for rank, pid in self._pids().items():
            was_there = (self.path / f"{rank}.pid").stat().st_mtime < failed  # it is no rank of the next attempt
            if was_there and not self.has_exit_code(rank) and is_process_alive(pid):
                self.record_exit(rank, 1, is_fatal=False)
                os.kill(pid, signal.SIGKILL)

    def _first_failure(self) -> float | None:
        """When the first rank recorded that it failed; each rank finds a bad configuration by itself."""
        others = set(map(str, NO_RESTART_CODES))
        return min((f.stat().st_mtime for f in self.path.glob("*.code") if f.read_text() not in others), default=None)

    def _pids(self) -> dict[int, int]:
        """The process of each rank."""
        pids = {}
        for file in self.path.glob("*.pid"):
            with contextlib.suppress(ValueError):  # the rank is just writing it
                pids[int(file.stem)] = int(file.read_text())
        return pids

    def exit_code(self, has_failed: bool, is_finished: bool) -> int:
        """The launcher's exit code, from the ranks' own codes, then the run folder, then what started the ranks."""
        codes = {int(file.read_text()) for file in self.path.glob("*.code")}
        if EXIT_BAD_CONFIG in codes:
            return EXIT_BAD_CONFIG
        # torchrun stops the other ranks when one is lost: their "interrupted" is not the user's.
        if self.has_fatal_error or (has_failed and not self.is_stopping):
            return 1
        return 0 if is_finished else EXIT_REQUEUE


@contextlib.contextmanager
def create_node() -> Iterator[Node]:
    """Context of a launcher: its ranks find the node in the environment, and get the signals that it receives."""
    with tempfile.TemporaryDirectory(prefix="fl_dist-", ignore_cleanup_errors=True) as folder:
        node = Node(Path(folder))
        os.environ[NODE_FOLDER] = folder
        try:
            with handle_signals(node.stop, is_stopping=lambda: node.is_stopping):
                yield node
        finally:
            del os.environ[NODE_FOLDER]


def find_node() -> Node:
    return Node(Path(os.environ[NODE_FOLDER]))


def is_process_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
