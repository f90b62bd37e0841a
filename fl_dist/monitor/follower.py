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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fl_dist.drawing import clients, surfaces

FINISH_SECONDS = {"online": 60.0, "offline": 90.0}
OPEN_SECONDS = {"online": 10.0, "offline": 60.0}
"""A record on the disk only takes that long where many processes share a processor."""
INTERVAL = 0.5
SIGNALS = 2
"""That may end W&B's own process, when a job ends: Slurm sends one, and a launcher passes one on."""
FOLDERS = ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR")


NOT_MEANT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to a whole job, blocked from the start: rank 0 decides when the run ends, and its end ends this process."""


def main() -> int:
    for number in NOT_MEANT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_MEANT)
    os.nice(5)  # training comes first
    folder, order = Path(sys.argv[1]), json.loads(sys.stdin.readline())
    for _ in range(SIGNALS):
        try:
            _follow(folder, order)
        except Exception:  # once more, from the first row on
            _forget()
        else:
            return 0
    _follow(folder, order)
    return 0


def _follow(folder: Path, order: dict[str, Any]) -> None:
    """All rows, until rank 0 has said its last words."""
    run, rows, pictures = _open(folder, order), Rows(folder / "metrics.jsonl"), Pictures(folder)
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], INTERVAL)[0])
        for row in rows.new():
            run.log(named(row) | pictures.of(row), step=row["round"])
    with _at_most(FINISH_SECONDS[order["mode"]]):
        run.summary.update(_last_words()["summary"])
        run.finish(exit_code=_last_words()["code"])


def _forget() -> None:
    """The W&B of this process, as if it had not been used yet."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown()


@cache
def _last_words() -> dict[str, Any]:
    """Rank 0's; if it has none, it is gone."""
    return json.loads(sys.stdin.readline() or '{"summary": {}, "code": 1}')


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """This process ends if what is within takes longer."""
    limit = threading.Timer(seconds, os._exit, [1])
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()


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
    os.environ.setdefault("MPLCONFIGDIR", str((place / "local").resolve()))
    if order["mode"] == "offline":
        for name in FOLDERS:
            os.environ.setdefault(name, str((place / "local").resolve()))
    import wandb

    run = wandb.init(
        project=order["project"],
        entity=order["entity"],
        group=order["group"],
        job_type=order["job_type"],
        tags=order["tags"],
        name=folder.name,
        id=_identity(place / "id"),
        resume="allow",
        mode=order["mode"],
        dir=str(folder),
        config=order["config"] | {"about": order["about"]},
        # Its statistics of a process are to be those of rank 0, which started this one.
        settings=wandb.Settings(
            silent=True, console="off", init_timeout=OPEN_SECONDS[order["mode"]], x_stats_pid=os.getppid()
        ),
    )
    run.define_metric("round", hidden=True)
    run.define_metric("*", step_metric="round")
    metric = f"1_test/{order['headline']['name']}"
    run.define_metric(metric, step_metric="round", summary=f"{order['headline']['best']},last")
    return run


def _identity(path: Path) -> str:
    """One id for all attempts at this run."""
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


SECTIONS = {
    "train_loss": "2_train/loss",
    "lr": "2_train/lr",
    "clients": "5_clients/trained",
    "bytes_down": "7_cost/bytes_down",
    "bytes_up": "7_cost/bytes_up",
    "messages": "7_cost/messages",
    "forwards": "7_cost/forwards",
    "backwards": "7_cost/backwards",
}
GROUPS = {"diagnostics": "3_diagnostics", "method": "4_method", "spread": "5_clients", "norms": "6_norms"}
GROUPS |= {"seconds": "8_seconds", "workers": "9_workers"}
"""W&B orders sections by their names: the numbers put the results first, and the machine last."""


def named(row: dict[str, Any]) -> dict[str, Any]:
    """A row's numbers by the names that they have on W&B; docs/monitoring.md lists them."""
    found: dict[str, Any] = {"round": row["round"], "5_clients/dropped": len(row.get("dropped", ()))}
    for name, value in row.items():
        if name.startswith("test_") and value is not None:
            found[f"1_test/{name.removeprefix('test_')}"] = value
        elif name in SECTIONS:
            found[SECTIONS[name]] = value
        elif name in GROUPS:
            found |= {f"{GROUPS[name]}/{'/'.join(path)}": number for path, number in _numbers(value)}
    return found


def _numbers(
    node: dict[str, Any], path: tuple[str, ...] = (), drawn: bool = False
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Lists are numbers by their places, unless they are long or a picture shows them."""
    drawn = drawn or surfaces.can_draw(node)
    for name, value in node.items():
        if isinstance(value, list) and not drawn and len(value) <= LONGEST:
            value = {str(place): entry for place, entry in enumerate(value)}
        if isinstance(value, dict):
            yield from _numbers(value, (*path, name), drawn)
        elif isinstance(value, int | float):
            yield (*path, name), value


LONGEST = 100
"""Entries of a list that is repeated on W&B."""


class Pictures:
    """Who has what, once; surfaces and lines of the rows that have them. A mirror does without what cannot be drawn."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown = folder, False

    def of(self, row: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            made |= self._who_has_what()
        for label, values in row.get("diagnostics", {}).items():
            file = self._file(f"{label}-{row['round']}")
            with contextlib.suppress(Exception):  # diagnostics may be the user's own, and say anything
                if surfaces.draw({self._folder.name: [{"values": values}]}, file):
                    made[f"3_diagnostics/{label}"] = _image(file)
        return made

    def _who_has_what(self) -> dict[str, Any]:
        if self._shown:
            return {}
        self._shown, file = True, self._file("clients")
        counts = json.loads((self._folder / "clients.json").read_bytes())["classes"]
        if counts is None:
            return {}
        clients.draw(np.array(counts), file, self._folder.name)
        return {"5_clients/classes": _image(file)}

    def _file(self, name: str) -> Path:
        return self._folder / "wandb" / "pictures" / f"{name}.png"


def _image(file: Path) -> Any:
    import wandb

    return wandb.Image(str(file))


if __name__ == "__main__":
    sys.exit(main())
