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
from fl_dist.paths import expand

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
        self.path = expand(path)
        self.logs = self.path / "logs"
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINT

    def finished(self, rounds: int) -> bool:
        """Whether the model of so many rounds, or more, is written."""
        return (self.path / MODEL).exists() and rounds <= self._recorded().get("rounds", rounds)

    def refuse_finished(self, rounds: int) -> None:
        if self.finished(rounds):
            raise ConfigError(
                f"the run in {self.path} is finished; raise rounds to go on from its last round, "
                "choose another run.dir, or remove the folder"
            )

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
        recorded = self._recorded()
        if not recorded:
            self._record(config)
            return False
        changed = differences(recorded, dump(config))
        if changed:
            shown = "; ".join(changed[:5]) + ("; ..." if len(changed) > 5 else "")
            raise ConfigError(f"the run folder {self.path} belongs to another config ({shown}); choose another run.dir")
        self.refuse_finished(config.rounds)
        if recorded["rounds"] < config.rounds:
            self._extend(config, recorded["rounds"])
        return True

    def _extend(self, config: Config, rounds: int) -> None:
        """Make room for more rounds: a finished run goes on from its last save, its model so far keeps another name."""
        model = self.path / MODEL
        if model.exists():
            if not (self.checkpoints / "latest").exists():
                raise ConfigError(
                    f"the run in {self.path} ended after {rounds} rounds and kept no checkpoint to go on from; "
                    "choose another run.dir"
                )
            os.replace(model, model.with_stem(f"{model.stem}-{rounds}"))
        self._record(config)

    def _recorded(self) -> dict[str, Any]:
        """The configuration that the folder belongs to; empty if it holds none."""
        return read_yaml(self.path / CONFIG) if (self.path / CONFIG).exists() else {}

    def _record(self, config: Config) -> None:
        write_atomically(self.path / CONFIG, yaml.safe_dump(dump(config), sort_keys=False).encode())

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
