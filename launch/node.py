"""What a launcher and the ranks of its node know of each other: process ids, a stop, exit codes; files in a folder."""

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from fl_dist.machine.signals import HANDLED, REQUEUE

FOLDER = "FL_DIST_NODE"
"""Environment variable of ranks: the folder."""
OWNED = "FL_DIST_OWNED"
"""Environment variable of a launcher that another one started, and that ends with it."""
BAD_CONFIG = 2


class Node:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop, self._final = path / "stop", path / "final"

    @property
    def stopped(self) -> bool:
        """A stop was asked for: nothing is to be started again."""
        return self._stop.exists()

    @property
    def final(self) -> bool:
        """A rank failed in a way that no restart mends."""
        return self._final.exists()

    def enter(self, rank: int) -> None:
        (self.path / f"{rank}.code").unlink(missing_ok=True)
        (self.path / f"{rank}.pid").write_text(str(os.getpid()))

    def leave(self, rank: int, code: int, final: bool) -> None:
        if final:
            self._final.touch()
        (self.path / f"{rank}.code").write_text(str(code))

    def has_code(self, rank: int | str) -> bool:
        """Whether the rank had its say; what is left of it is the end of its interpreter."""
        return (self.path / f"{rank}.code").exists()

    def lives(self, rank: int) -> bool:
        """Whether the process of the rank is there, though it may have been stopped."""
        return alive(self._pids().get(str(rank), 0))

    def stop(self, number: int) -> None:
        """The ranks hear the signal themselves: what started them would kill them while they save."""
        self._stop.touch()
        self._signal(number)

    def _signal(self, number: int) -> None:
        for rank, pid in self._pids().items():
            with contextlib.suppress(ProcessLookupError):
                if not self.has_code(rank):
                    os.kill(pid, number)

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        def forward(number: int, frame: FrameType | None) -> None:
            self.stop(number)

        old = {number: signal.signal(number, forward) for number in HANDLED}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def end(self, seconds: float) -> None:
        """Let ranks that lost what started them end by themselves for so long."""
        self._signal(signal.SIGTERM)
        end = time.monotonic() + seconds
        while any(map(alive, self._pids().values())) and time.monotonic() < end:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)

    def _pids(self) -> dict[str, int]:
        found = {}
        for file in self.path.glob("*.pid"):
            with contextlib.suppress(ValueError):  # the rank is just writing it
                found[file.stem] = int(file.read_text())
        return found

    def code(self, failed: bool, finished: bool) -> int:
        """The launcher's exit code: what ranks say of themselves, then the run folder, then what started them."""
        codes = {int(file.read_text()) for file in self.path.glob("*.code")}
        if BAD_CONFIG in codes or self.final:
            return BAD_CONFIG if BAD_CONFIG in codes else 1
        # torchrun stops the ranks beside a lost one: their "interrupted" is not the user's.
        if failed and not self.stopped:
            return 1
        return 0 if finished else REQUEUE


@contextlib.contextmanager
def node_folder() -> Iterator[Node]:
    """A launcher's node; whatever it starts finds it in the environment."""
    with tempfile.TemporaryDirectory(prefix="fl_dist-", ignore_cleanup_errors=True) as folder:
        os.environ[FOLDER] = folder
        try:
            yield Node(Path(folder))
        finally:
            del os.environ[FOLDER]


def find_node() -> Node | None:
    return Node(Path(os.environ[FOLDER])) if FOLDER in os.environ else None


def alive(pid: int) -> bool:
    """Whether the process runs: one that has ended may keep its number until somebody asks for its code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class FirstError(logging.Handler):
    """Context: remembers the first error that fl_dist logged, and whether a restart may mend it."""

    message: str | None = None
    passes = False
    ranks: Sequence[int] = ()
    """Those that were lost."""

    def __enter__(self) -> "FirstError":
        self.setLevel(logging.ERROR)
        logging.getLogger("fl_dist").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fl_dist").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self.message is None:
            self.message, self.passes = record.getMessage().splitlines()[0], getattr(record, "passes", False)
            self.ranks = getattr(record, "ranks", ())
