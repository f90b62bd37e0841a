"""The run folder: its files, and the checks before a run may use it."""

import contextlib
import json
import logging
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_dist.common.errors import ConfigError
from fl_dist.common.files import read_file, write_atomically
from fl_dist.common.formatting import shorten
from fl_dist.common.paths import expand_path
from fl_dist.common.yaml_reader import to_yaml
from fl_dist.config import Config
from fl_dist.config.comparison import differences
from fl_dist.config.overrides import read_recorded_config
from fl_dist.storage.folder_lock import LOCK, FolderLock

MODEL, CONFIG, METRICS, CHECKPOINT = "model.safetensors", "config.yaml", "metrics.jsonl", "checkpoint"
RUN_FILES = (METRICS, CHECKPOINT, MODEL)
"""What a run must never overwrite: it takes long to compute again."""
RUN_INFO, SUMMARY, DIAGNOSTICS = "run.json", "summary.json", "diagnostics.jsonl"
ATTEMPTS, CLIENTS = "attempts.jsonl", "clients.json"
CODE = "code"
"""Key of `RunInfo.contents`: the hash of the user's own source files."""
log = logging.getLogger(__name__)


@dataclass
class RunInfo:
    """`run.json`: what is known of a run beside its configuration."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    contents: dict[str, str] = field(default_factory=dict)
    """Hashes of its inputs."""
    saved: bool = False
    """Whether it has ever committed a checkpoint."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a reader needs to know without loading the data: shapes, normalisation, the primary metric."""


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, otherwise all runs below it."""
    return [folder] if (folder / CONFIG).exists() else sorted(file.parent for file in folder.rglob(CONFIG))


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = expand_path(path)
        self.logs = self.path / "logs"
        self.info = RunInfo()
        self.checkpoints = self.path / CHECKPOINT
        self.lock = FolderLock(self.path)

    def is_finished(self, rounds: int) -> bool:
        """Whether the model after at least `rounds` rounds is written."""
        return (self.path / MODEL).exists() and rounds <= self._read_config().get("rounds", rounds)

    def is_finished_record(self, rounds: int) -> bool:
        """Whether only the records of a finished run were kept, without its model and its checkpoints."""
        summary = self._read_summary()
        has_all = "stopped" in summary or summary.get("rounds", 0) >= rounds
        return not self.checkpoints.exists() and summary.get("finished") is True and has_all

    def check_not_finished(self, rounds: int) -> None:
        if self.is_finished(rounds):
            raise ConfigError(
                f"the run in {self.path} is finished; raise rounds to continue from its last round, "
                "choose another run.dir, or remove the folder"
            )

    def acquire(self, config: Config) -> bool:
        """On rank 0: lock the folder and check or write its configuration. True if there is a run to resume."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o755)
            self._refuse_links()
            self.lock.acquire()
            return self._check_config(config)
        except OSError as e:
            raise ConfigError(
                f"cannot use the run folder {shorten(self.path)}: {e.strerror}; choose another with run.dir"
            ) from None

    def _refuse_links(self) -> None:
        """Files that are written in place, not replaced, must not be links: what they point to would be overwritten."""
        files = [self.path / name for name in (LOCK, METRICS, ATTEMPTS)]
        for file in (*files, *self.logs.glob("*.log")):
            if file.is_symlink() or file.exists() and not file.is_file():
                kind = "a symbolic link" if file.is_symlink() else "not a regular file"
                raise ConfigError(
                    f"{file} is {kind}, and a run would write to it; remove it, or choose another run.dir"
                )

    def _check_config(self, config: Config) -> bool:
        existing, run_files = self._read_config(), [n for n in RUN_FILES if os.path.lexists(self.path / n)]
        if not existing:
            if run_files:  # they would be overwritten
                raise ConfigError(
                    f"{self.path} holds {', '.join(run_files)} of a run, but not its {CONFIG}; restore it, "
                    "or choose another run.dir"
                )
            self._write_info()
            self._write_config(config)
            return False
        self.info = self.read_info()
        changed = differences(existing, config.model_dump())
        if changed and not self.info.contents and not run_files:  # the old configuration never ran
            self._write_config(config)
            return False
        if changed:
            changes = "; ".join(changed[:5]) + ("; ..." if len(changed) > 5 else "")
            raise ConfigError(
                f"the run folder {self.path} belongs to another config ({changes}); choose another run.dir"
            )
        self.check_not_finished(config.rounds)
        if (self.path / MODEL).exists() and not self.info.saved:
            raise ConfigError(
                f"the run in {self.path} ended after {self.model_round()} rounds and left no checkpoint to resume; "
                "choose another run.dir"
            )
        return True

    def compare_contents(self, contents: dict[str, str], facts: dict[str, Any]) -> None:
        """Check that the inputs are those that the run started with; changed code is only a warning."""
        changed = [name for name, sha256 in self.info.contents.items() if contents.get(name) != sha256]
        if CODE in changed:
            changed.remove(CODE)
            log.warning("your source files have changed since this run started; the next rounds use the new ones")
        if changed:
            raise ConfigError(
                f"the run in {self.path} started with a different {' and '.join(changed)}; "
                "restore the old files, or choose another run.dir"
            )
        if not self.info.contents:
            self.info.contents, self.info.facts = contents, facts
            self._write_info()

    def mark_has_checkpoint(self) -> None:
        if not self.info.saved:
            self.info.saved = True
            self._write_info()

    def _write_info(self) -> None:
        write_atomically(self.path / RUN_INFO, json.dumps(asdict(self.info), indent=1).encode())

    def read_info(self) -> RunInfo:
        try:
            info = RunInfo(**json.loads(read_file(self.path / RUN_INFO)))
            if "headline" in info.facts:  # its key in older run folders
                info.facts["primary_metric"] = info.facts.pop("headline")
            return info
        except (OSError, ValueError, TypeError) as e:
            raise ConfigError(
                f"{self.path / RUN_INFO} is missing or damaged ({e}); restore it, or choose another run.dir"
            ) from None

    def read_facts(self) -> dict[str, Any]:
        """`RunInfo.facts`; empty before the run has started."""
        return self.read_info().facts if (self.path / RUN_INFO).exists() else {}

    def read_rounds(self) -> int:
        """The `rounds` of its configuration."""
        config = self._read_config()
        if not config:
            raise ConfigError(f"{self.path} is not a run: it has no {CONFIG}")
        return int(config["rounds"])

    def model_round(self) -> int:
        """The round after which a finished run wrote its model: a callback may have ended it early."""
        rounds, recorded = self._read_summary().get("rounds"), self.read_rounds()
        return min(rounds, recorded) if type(rounds) is int else recorded

    def stop_reason(self) -> str:
        """Why a callback ended the run; empty if none did."""
        return str(self._read_summary().get("stopped", ""))

    def _read_summary(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            summary = json.loads(read_file(self.path / SUMMARY))
            return summary if isinstance(summary, dict) else {}
        return {}

    def extend_rounds(self, config: Config) -> None:
        """If `rounds` has grown: rename the model of a finished run, and write the new configuration."""
        model = self.path / MODEL
        if self.read_rounds() < config.rounds:
            if model.exists():
                self._refuse_to_stop_again(config)
                os.replace(model, model.with_stem(f"{model.stem}-{self.model_round()}"))
            self._write_config(config)

    def _refuse_to_stop_again(self, config: Config) -> None:
        """A callback that ended the run would end it again at once."""
        reason = self.stop_reason()
        if reason and self._read_config().get("callbacks") == config.model_dump()["callbacks"]:
            raise ConfigError(
                f"a callback ended the run in {self.path} after round {self.model_round()}: {reason}; to continue it, "
                "remove that callback or change its settings"
            )

    def _read_config(self) -> dict[str, Any]:
        """The configuration in the folder; empty if there is none."""
        path = self.path / CONFIG
        if not path.exists():
            return {}
        config = read_recorded_config(path)
        if not isinstance(config, dict) or type(config.get("rounds")) is not int:
            raise ConfigError(f"{path} is not the configuration of a run; restore it, or choose another run.dir")
        return config

    def _write_config(self, config: Config) -> None:
        write_atomically(self.path / CONFIG, to_yaml(config.model_dump()).encode())

    def release(self) -> None:
        self.lock.release()
