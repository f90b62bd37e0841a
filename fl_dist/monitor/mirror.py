"""The W&B mirror: fed from a queue by a thread of its own, so that it can neither stop nor slow training."""

import logging
import netrc
import os
import queue
import secrets
import threading
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from fl_dist.config import Config, Wandb, dump

log = logging.getLogger("fl_dist")
FINISH_SECONDS = {"online": 60.0, "offline": 15.0}


class Mirror(Protocol):
    def row(self, row: dict[str, Any]) -> None: ...
    def close(self, summary: dict[str, Any]) -> None: ...


class NoMirror:
    def row(self, row: dict[str, Any]) -> None:
        pass

    def close(self, summary: dict[str, Any]) -> None:
        pass


def open_mirror(config: Config, folder: Path, earlier: list[dict[str, Any]]) -> Mirror:
    """The mirror that the configuration asks for; rows of before an interruption are brought up to date."""
    mode = resolve(config.monitor.wandb)
    return NoMirror() if mode == "disabled" else WandbMirror(config, folder, mode, earlier)


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
    def __init__(self, config: Config, folder: Path, mode: str, earlier: list[dict[str, Any]]) -> None:
        self.config, self.folder, self.mode = config, folder, mode
        self._queue: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        for row in earlier:
            self.row(row)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def row(self, row: dict[str, Any]) -> None:
        self._queue.put(("row", row))

    def close(self, summary: dict[str, Any]) -> None:
        self._queue.put(("close", summary))
        self._thread.join(FINISH_SECONDS[self.mode])
        if self._thread.is_alive():
            log.warning("W&B did not finish in time; metrics.jsonl is complete, the mirror may not be")

    def _run(self) -> None:
        try:
            run = self._open()
            while (item := self._queue.get())[0] == "row":
                run.log(flatten(item[1]), step=item[1]["round"])
            run.summary.update(item[1])
            run.finish()
        except Exception as e:
            log.warning("the W&B mirror stopped (%s: %s); training goes on", type(e).__name__, str(e).split("\n")[0])

    def _open(self) -> Any:
        place = self.folder / "wandb"
        place.mkdir(exist_ok=True)
        for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
            if self.mode == "offline":
                os.environ.setdefault(name, str((place / "local").resolve()))
        import wandb  # here, because the import takes a second that training need not wait for

        settings = self.config.monitor.wandb
        return wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            name=self.folder.name,
            id=self._identity(),
            resume="allow",
            mode="online" if self.mode == "online" else "offline",
            dir=str(self.folder),
            config=dump(self.config),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=10),
        )

    def _identity(self) -> str:
        """One id for all attempts at this run."""
        path = self.folder / "wandb" / "id"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        return path.read_text().strip()


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    flat = {k: v for k, v in row.items() if isinstance(v, int | float)}
    return flat | {f"seconds/{k}": v for k, v in row["seconds"].items()}
