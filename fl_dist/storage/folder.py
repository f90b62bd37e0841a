"""The run folder: who may use it, what it already holds, and files that are whole or absent."""

import contextlib
import fcntl
import io
import json
import logging
import os
import random
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_dist.common.paths import expand
from fl_dist.common.reading import ConfigError, as_yaml, read_yaml
from fl_dist.common.words import shortened
from fl_dist.config import Config, differences, dump

MODEL, CONFIG, METRICS, CHECKPOINT = "model.safetensors", "config.yaml", "metrics.jsonl", "checkpoint"
REMAINS = (METRICS, CHECKPOINT, MODEL)
"""Of what a run leaves, what cannot be made again in a moment."""
RECORD, LOCK, SUMMARY, DIAGNOSTICS = "run.json", "lock", "summary.json", "diagnostics.jsonl"
ATTEMPTS, CLIENTS = "attempts.jsonl", "clients.json"
CODE = "code"
"""Among the contents of a run: the hash of the user's own source files."""
log = logging.getLogger("fl_dist")
PATIENCE = 10.0
"""Seconds in which those who only look at a lock let go of it."""


@dataclass
class Record:
    """What a run remembers of itself beside its configuration."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    contents: dict[str, str] = field(default_factory=dict)
    """What its inputs held, as hashes."""
    saved: bool = False
    """Whether it has ever made a whole save."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a reader needs to know of the run without its data: shapes, normalisation, by what it is judged."""


class FolderInUse(ConfigError):
    """Another job holds the run folder."""


class FolderLost(RuntimeError):
    """The lock of the run folder is no longer this job's."""


def sync_folder(path: str | Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def runs_below(folder: Path) -> list[Path]:
    """The folder itself, if it is a run, or all runs below it."""
    return sorted(file.parent for file in folder.rglob(CONFIG)) if not (folder / CONFIG).exists() else [folder]


def locked(run: Path) -> bool:
    """Whether a run holds its folder at this moment. (A run that starts waits for those who look.)"""
    try:
        with open(run / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def write_atomically(path: str | Path, data: bytes, durable: bool = True) -> None:
    """Replace a file by rename; if it is to be `durable`, after its bytes are on disk, and so that its name is."""
    folder, name = os.path.split(path)
    torn = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
    handle = os.open(torn, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(handle, 0o644)
            if durable:
                os.fsync(handle)
        os.replace(torn, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(torn)
        raise
    if durable:
        sync_folder(folder or os.curdir)


def append_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    """Add JSON objects to a file, one a line, in one write."""
    data = "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()
    with open(path, "ab", buffering=0) as file:
        file.write(data)


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = expand(path)
        self.logs = self.path / "logs"
        self.record = Record()
        self._lock: io.FileIO | None = None

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
        except OSError as e:
            raise ConfigError(
                f"cannot use the run folder {shortened(self.path)}: {e.strerror}; choose another with run.dir"
            ) from None

    def _take_lock(self) -> None:
        """Lock the file that is at the path, which someone may have removed while this job waited."""
        end = time.monotonic() + PATIENCE
        while self._lock is None or not self._holds_lock():
            self.release()
            self._lock = io.FileIO(self.path / LOCK, "a+")  # unbuffered: closing it on a full disk must not fail
            if time.monotonic() > end or not _locked(self._lock, end):
                holder = self._holder()
                self.release()
                raise FolderInUse(f"the run folder {self.path} is in use by {holder}; choose another run.dir")
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def _holder(self) -> str:
        assert self._lock is not None
        self._lock.seek(0)
        return shortened(self._lock.read(200).decode(errors="replace").strip()) or "another job"

    def _holds_lock(self) -> bool:
        """Whether the file that this job locked is still the one at the path."""
        assert self._lock is not None
        try:
            return os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / LOCK))
        except FileNotFoundError:
            return False

    def check_lock(self) -> None:
        """Raise FolderLost if another job may have been let in; what the file system cannot answer now is no sign."""
        with contextlib.suppress(OSError):
            if self._lock is not None and not self._holds_lock():
                raise FolderLost(
                    f"the lock file of {self.path} was removed or replaced, another job may write there; "
                    "this one ends, start it again to go on from the last checkpoint"
                )

    def _check(self, config: Config) -> bool:
        recorded = self._recorded()
        if not recorded:
            self._refuse_remains()
            self._remember()
            self._record(config)
            return False
        self.record = self.remembered()
        changed = differences(recorded, dump(config))
        if changed and not self._begun():
            self._record(config)
            return False
        if changed:
            shown = "; ".join(changed[:5]) + ("; ..." if len(changed) > 5 else "")
            raise ConfigError(f"the run folder {self.path} belongs to another config ({shown}); choose another run.dir")
        self.refuse_finished(config.rounds)
        if (self.path / MODEL).exists() and not self.record.saved:
            raise ConfigError(
                f"the run in {self.path} ended after {recorded['rounds']} rounds and kept no checkpoint to go on from; "
                "choose another run.dir"
            )
        return True

    def _begun(self) -> bool:
        """Whether there was ever more than a configuration that could not be run."""
        return bool(self.record.contents) or any(os.path.lexists(self.path / name) for name in REMAINS)

    def _refuse_remains(self) -> None:
        """Without a configuration nothing else of a run may be there: it would be overwritten."""
        remains = [name for name in REMAINS if os.path.lexists(self.path / name)]
        if remains:
            raise ConfigError(
                f"{self.path} holds {', '.join(remains)} of a run, but not its {CONFIG}: put that back, "
                "or choose another run.dir"
            )

    def compare_contents(self, contents: dict[str, str], facts: dict[str, Any]) -> None:
        """What the inputs hold now must be what they held when the run began; of other code it is enough to warn."""
        changed = [name for name, told in self.record.contents.items() if contents.get(name) != told]
        if CODE in changed:
            changed.remove(CODE)
            log.warning(
                "your own source files have changed since this run began; the rounds from here on are the new ones'"
            )
        if changed:
            raise ConfigError(
                f"the run in {self.path} began with another {' and '.join(changed)} than there is now: "
                "put the old files back, or choose another run.dir"
            )
        if not self.record.contents:
            self.record.contents, self.record.facts = contents, facts
            self._remember()

    def mark_saved(self) -> None:
        if not self.record.saved:
            self.record.saved = True
            self._remember()

    def _remember(self) -> None:
        write_atomically(self.path / RECORD, json.dumps(asdict(self.record), indent=1).encode())

    def remembered(self) -> Record:
        """What the folder holds of it."""
        try:
            return Record(**json.loads((self.path / RECORD).read_bytes()))
        except (OSError, ValueError, TypeError) as e:
            raise ConfigError(
                f"{self.path / RECORD} is missing or damaged ({e}): put it back, or choose another run.dir"
            ) from None

    def facts(self) -> dict[str, Any]:
        """What the run remembers of itself for readers; nothing before it has begun."""
        return self.remembered().facts if (self.path / RECORD).exists() else {}

    def rounds(self) -> int:
        """How many the run is to have."""
        recorded = self._recorded()
        if not recorded:
            raise ConfigError(f"{self.path} is no run: it has no {CONFIG}")
        return recorded["rounds"]

    def extend(self, config: Config) -> None:
        """Make room for more rounds, if there are more now: the model so far of a finished run keeps another name."""
        rounds, model = self._recorded()["rounds"], self.path / MODEL
        if rounds < config.rounds:
            if model.exists():
                os.replace(model, model.with_stem(f"{model.stem}-{rounds}"))
            self._record(config)

    def _recorded(self) -> dict[str, Any]:
        """The configuration that the folder belongs to; empty if it holds none."""
        path = self.path / CONFIG
        if not path.exists():
            return {}
        recorded = read_yaml(path)
        if not isinstance(recorded, dict) or type(recorded.get("rounds")) is not int:
            raise ConfigError(f"{path} is not the configuration of a run; restore it, or choose another run.dir")
        return recorded

    def _record(self, config: Config) -> None:
        write_atomically(self.path / CONFIG, as_yaml(dump(config)).encode())

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _locked(file: io.FileIO, end: float) -> bool:
    """Whether the file is locked now; False at once if another job has it, while those who only look are waited for."""
    while not _flock(file, fcntl.LOCK_EX):
        if not _flock(file, fcntl.LOCK_SH) or time.monotonic() > end:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(random.uniform(0, 0.01))  # noqa: S311 (not in step with the others)
    return True


def _flock(file: io.FileIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
