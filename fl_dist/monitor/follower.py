"""The W&B mirror itself: repeats the rows of metrics.jsonl to W&B as they appear.

python -m fl_dist.monitor.follower RUN

Standard input says what to open (a line of JSON), and later the summary (another). When it ends without the second,
rank 0 is gone: the mirror then finishes by itself, so that W&B too has every row.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FINISH_SECONDS = {"online": 60.0, "offline": 15.0}
INTERVAL = 0.5
FOLDERS = ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR")


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the run ends, and its end ends this process
    folder, order = Path(sys.argv[1]), json.loads(sys.stdin.readline())
    run, rows = _open(folder, order), Rows(folder / "metrics.jsonl")
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], INTERVAL)[0])
        for row in rows.new():
            run.log(flatten(row), step=row["round"])
    limit = threading.Timer(FINISH_SECONDS[order["mode"]], os._exit, [1])
    limit.daemon = True
    limit.start()
    last = json.loads(sys.stdin.readline() or '{"summary": {}, "code": 1}')
    run.summary.update(last["summary"])
    run.finish(exit_code=last["code"])
    limit.cancel()
    return 0


class Rows:
    """The rows of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines since the last call."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                if (row := _parsed(line)) is not None:
                    yield row


def _parsed(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        return json.loads(line)
    return None


def _open(folder: Path, order: dict[str, Any]) -> Any:
    place = folder / "wandb"
    place.mkdir(exist_ok=True)
    if order["mode"] == "offline":
        for name in FOLDERS:
            os.environ.setdefault(name, str((place / "local").resolve()))
    import wandb

    return wandb.init(
        project=order["project"],
        entity=order["entity"],
        group=order["group"],
        name=folder.name,
        id=_identity(place / "id"),
        resume="allow",
        mode=order["mode"],
        dir=str(folder),
        config=order["config"],
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=10),
    )


def _identity(path: Path) -> str:
    """One id for all attempts at this run."""
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    flat = {k: v for k, v in row.items() if isinstance(v, int | float)}
    return flat | {f"{group}/{k}": v for group in ("seconds", "method") for k, v in row.get(group, {}).items()}


if __name__ == "__main__":
    sys.exit(main())
