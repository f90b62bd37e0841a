"""The run folder: who may use it, what it already holds, and files that are whole or absent."""

import contextlib
import fcntl
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import IO, Any

import yaml

from fl_dist.config import Config, ConfigError, differences, dump, read_yaml

MODEL, CONFIG, METRICS, CHECKPOINT = "model.safetensors", "config.yaml", "metrics.jsonl", "checkpoint"


class FolderInUse(ConfigError):
    """Another job holds the run folder."""


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by rename, after its bytes are on disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.logs = self.path / "logs"
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINT

    @property
    def finished(self) -> bool:
        return (self.path / MODEL).exists()

    def claim(self, config: Config) -> bool:
        """Rank 0, at the start: lock the folder and check or write its config. True if a run is to be resumed."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o755)
            self._take_lock()
            return self._check(config)
        except ConfigError:
            raise
        except OSError as e:
            raise ConfigError(
                f"cannot use the run folder {self.path}: {e.strerror}; choose another with run.dir"
            ) from None

    def _take_lock(self) -> None:
        self._lock = open(self.path / "lock", "a+")  # noqa: SIM115 (held until the process ends)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another job"
            raise FolderInUse(f"the run folder {self.path} is in use by {holder}; choose another run.dir") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()

    def _check(self, config: Config) -> bool:
        existing = self.path / CONFIG
        if not existing.exists():
            write_atomically(existing, yaml.safe_dump(dump(config), sort_keys=False).encode())
            return False
        changed = differences(read_yaml(existing), dump(config))
        if changed:
            shown = "; ".join(changed[:5]) + ("; ..." if len(changed) > 5 else "")
            raise ConfigError(f"the run folder {self.path} belongs to another config ({shown}); choose another run.dir")
        if self.finished:
            raise ConfigError(f"the run in {self.path} is finished; choose another run.dir or remove the folder")
        return True

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A whole row, or None."""
    with contextlib.suppress(ValueError):
        return json.loads(line) if line.endswith(b"\n") else None
    return None


class MetricsFile:
    """`metrics.jsonl`, one object a line, on disk after every line; lines that do not fit yet are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []

    def cut(self, rounds: int) -> list[dict[str, Any]]:
        """Keep the rows of the first `rounds` rounds, cut the rest off (a torn last line too), and return them."""
        if not self.path.exists():
            return []
        rows, end = [], 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            row = _parsed(line)
            if row is None or row["round"] > rounds:
                break
            rows.append(row)
            end += len(line)
        os.truncate(self.path, end)
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Raises OSError if the line cannot be written now; it goes out with a later one."""
        self._waiting.append(json.dumps(row) + "\n")
        with open(self.path, "a") as file:
            start = file.tell()
            try:
                file.write("".join(self._waiting))
                file.flush()
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, start)
                raise
        self._waiting.clear()
