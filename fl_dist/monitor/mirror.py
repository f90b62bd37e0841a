"""The W&B mirror, seen from rank 0: a process that follows metrics.jsonl and can neither stop nor slow training."""

import contextlib
import json
import logging
import netrc
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from fl_dist.config import Config, Wandb, dump
from fl_dist.monitor.follower import FINISH_SECONDS, NOT_MEANT
from fl_dist.storage.folder import ATTEMPTS
from fl_dist.tasks import Headline

log = logging.getLogger("fl_dist")
LOG = "wandb.log"


class Mirror(Protocol):
    def close(self, summary: dict[str, Any]) -> None: ...


class NoMirror:
    def close(self, summary: dict[str, Any]) -> None:
        pass


def open_mirror(config: Config, folder: Path, headline: Headline) -> Mirror:
    """The mirror that the configuration asks for; it begins with the rows that are there."""
    mode = resolve(config.monitor.wandb)
    return NoMirror() if mode == "disabled" else WandbMirror(config, folder, mode, headline)


def resolve(wandb: Wandb) -> str:
    if wandb.mode != "auto":
        return wandb.mode
    return "online" if has_account() else "offline"


def has_account() -> bool:
    """Whether an API key is configured, without reading it into this program."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlparse(base).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbMirror:
    """What W&B prints, tracebacks included, goes to logs/wandb.log; a mirror that fails is a warning."""

    def __init__(self, config: Config, folder: Path, mode: str, headline: Headline) -> None:
        self.mode, self.log = mode, folder / "logs" / LOG
        self._process: subprocess.Popen[str] | None = None
        order = {"mode": mode, "config": dump(config), "headline": headline._asdict(), "about": _last_attempt(folder)}
        order |= config.monitor.wandb.model_dump(exclude={"mode"})
        command = [sys.executable, "-m", "fl_dist.monitor.follower", str(folder)]
        try:
            with open(self.log, "ab") as output, _blocked(NOT_MEANT):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    text=True,
                    env=_environment(),
                    start_new_session=True,  # launchers end a rank's whole group, and this is to have the last rows
                )
        except OSError as e:
            log.warning("the W&B mirror could not be started: %s; training goes on", e)
        else:
            _tell(self._process, order)

    def close(self, summary: dict[str, Any]) -> None:
        """Let it finish; the first call counts."""
        process, self._process = self._process, None
        if process is None:
            return
        _tell(process, {"summary": summary, "code": 0}, last=True)
        try:
            failed = process.wait(FINISH_SECONDS[self.mode])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            log.warning("W&B did not finish in time; metrics.jsonl is complete, the mirror may not be")
        else:
            if failed:
                log.warning("the W&B mirror stopped, see %s; training went on", self.log)


@contextlib.contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """They wait; for a process that is started here, until it says otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell(process: subprocess.Popen[str], words: dict[str, Any], last: bool = False) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended; close() says so
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.close() if last else process.stdin.flush()


def _last_attempt(folder: Path) -> dict[str, Any]:
    """Versions, hosts and the rest of what a run remembers of its attempts."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return json.loads((folder / ATTEMPTS).read_text().splitlines()[-1])
    return {}


def _environment() -> dict[str, str]:
    """Where this program was found, its mirror is too."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
