"""W&B, seen from rank 0: a process that follows metrics.jsonl and can neither stop nor slow training."""

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
from typing import Any
from urllib.parse import urlparse

from fl_dist.callbacks.base import Callback, RunContext
from fl_dist.common.files import parse_lines, parse_object
from fl_dist.metrics.summary import Summary
from fl_dist.metrics.wandb_process import FINISH_SECONDS, IGNORED_SIGNALS

log = logging.getLogger(__name__)
LOG = "wandb.log"


def resolve_mode(mode: str) -> str:
    if mode != "auto":
        return mode
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


class WandbMirror(Callback):
    """What W&B prints, tracebacks included, goes to logs/wandb.log; a mirror that fails is a warning."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def on_run_begin(self, context: RunContext) -> None:
        """Start the process, which begins with the existing records."""
        wandb, self._log = context.config.monitor.wandb, context.folder / "logs" / LOG
        self._mode = resolve_mode(wandb.mode)
        if self._mode == "disabled":
            return
        order = {"mode": self._mode, "config": context.config.model_dump(), "about": _last_attempt(context.folder)}
        order |= {"primary_metric": context.primary_metric._asdict()} | wandb.model_dump(exclude={"mode"})
        command = [sys.executable, "-m", "fl_dist.metrics.wandb_process", str(context.folder)]
        try:
            with open(self._log, "ab") as output, _block_signals(IGNORED_SIGNALS):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    text=True,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # launchers end a rank's whole group, and this one still has to finish
                )
        except OSError as e:
            log.warning("the W&B mirror could not be started: %s; training continues", e)
        else:
            _send(self._process, order)

    def on_run_end(self, summary: Summary, context: RunContext) -> None:
        """Let it finish; the first call counts."""
        process, self._process = self._process, None
        if process is None:
            return
        _send(process, {"summary": summary if summary["finished"] else {}, "code": 0})
        _close_input(process)
        try:
            failed = process.wait(FINISH_SECONDS[self._mode])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            log.warning("W&B did not finish in time; metrics.jsonl is complete, the mirror may not be")
        else:
            if failed:
                log.warning("the W&B mirror stopped, see %s; training continued", self._log)

    def close(self) -> None:
        """After an error the process learns that rank 0 is gone, and nobody waits for it."""
        if self._process is not None:
            _close_input(self._process)


@contextlib.contextmanager
def _block_signals(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """They are held back; in a process that is started here, until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended; on_run_end says so
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _close_input(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def _last_attempt(folder: Path) -> dict[str, Any]:
    """Versions, hosts and what else a run notes of its attempts."""
    attempts: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        attempts, _ = parse_lines(folder / "attempts.jsonl", parse_object)
    return attempts[-1] if attempts else {}
