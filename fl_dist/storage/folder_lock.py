"""The lock of a run folder: at most one job writes there."""

import contextlib
import fcntl
import io
import os
import random
import secrets
import socket
import time
from pathlib import Path

from fl_dist.common.errors import ConfigError, FlDistError
from fl_dist.common.files import check_regular, read_file
from fl_dist.common.formatting import shorten

LOCK = "lock"
LOCK_TIMEOUT_SECONDS = 10.0
"""How long a starting job waits for processes that call `is_locked`."""


class FolderInUseError(ConfigError):
    """Another job holds the lock of the run folder."""


class FolderLostError(FlDistError):
    """This job no longer holds the lock of the run folder."""


def is_locked(run: Path) -> bool:
    """Whether a job holds the lock of the run now. (This takes a shared lock for a moment; a starting job waits.)"""
    with contextlib.suppress(OSError):
        check_regular(run / LOCK)
        with open(run / LOCK, "rb", buffering=0) as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    return False


class FolderLock:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self._file: io.FileIO | None = None
        self._content = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}\n".encode()

    def acquire(self) -> None:
        """Lock the file at the path; someone may replace it while this job waits."""
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while self._file is None or not self._is_at_path(self._file):
            self.release()
            self._file = io.FileIO(self.path, "a+")  # unbuffered: closing it on a full disk must not fail
            if time.monotonic() > deadline or not _lock_exclusively(self._file, deadline):
                owner = _read_owner(self._file)
                self.release()
                raise FolderInUseError(f"the run folder {self.folder} is in use by {owner}; choose another run.dir")
        self._file.truncate(0)
        self._file.write(self._content)

    def check(self) -> None:
        """FolderLostError if another job may have locked the folder; an error of the file system is no evidence."""
        with contextlib.suppress(OSError):
            # Where every lock succeeds, as on NFS with local locks, another job has written its own content.
            if self._file is not None and (not self._is_at_path(self._file) or self._is_overwritten()):
                raise FolderLostError(
                    f"the lock file of {self.folder} was removed or replaced, so another job may write there; "
                    "this job stops: start it again to resume from the last checkpoint"
                )

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_at_path(self, file: io.FileIO) -> bool:
        """Whether the file at the path is still the one that this job locked."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _is_overwritten(self) -> bool:
        """A full disk leaves the file empty or its line incomplete."""
        return not self._content.startswith(read_file(self.path))


def _read_owner(file: io.FileIO) -> str:
    file.seek(0)
    return shorten(file.read(200).decode(errors="replace").rpartition(", ")[0].strip()) or "another job"


def _lock_exclusively(file: io.FileIO, deadline: float) -> bool:
    """Wait for shared locks, which `is_locked` takes; return False at once if another job has the exclusive lock."""
    while not _try_lock(file, fcntl.LOCK_EX):
        if not _try_lock(file, fcntl.LOCK_SH) or time.monotonic() > deadline:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(random.uniform(0, 0.01))  # noqa: S311 (jitter)
    return True


def _try_lock(file: io.FileIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
