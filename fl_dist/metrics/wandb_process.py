"""The W&B mirror: a process that sends the records of metrics.jsonl to W&B as they appear.

python -m fl_dist.metrics.wandb_process RUN

Standard input gives the settings (a line of JSON), and later the summary (another). If it ends without the second,
rank 0 is gone: the mirror then finishes by itself, so that W&B too has every record.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fl_dist.metrics.record import RoundRecord, parse_record
from fl_dist.plots import clients, surfaces

FINISH_SECONDS = {"online": 20.0, "offline": 90.0}
"""In which W&B has to end after the run; what its server has not answered by then is lost to it."""
OPEN_SECONDS = {"online": 10.0, "offline": 60.0}
"""Offline it takes that long only where many processes share a processor."""
POLL_SECONDS = 0.5
RETRIES = 2
"""Signals that may end W&B's own process when a job ends: Slurm sends one, and a launcher passes one on."""
FOLDERS = ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR")
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to a whole job, blocked from the start: rank 0 decides when the run ends, and its end ends this process."""


def main() -> int:
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    os.nice(5)  # training comes first
    folder, settings = Path(sys.argv[1]), json.loads(sys.stdin.readline())
    for _ in range(RETRIES):
        run = None
        try:
            run = _open(folder, settings)
            _mirror(run, folder, settings["mode"])
        except Exception:  # again, from the first record
            if run is None and settings["mode"] == "online" and _has_run_ended():
                traceback.print_exc()
                os._exit(1)  # the server does not answer, and W&B's own exit would wait for it
            _teardown()
        else:
            return 0
    _mirror(_open(folder, settings), folder, settings["mode"])
    return 0


def _mirror(run: Any, folder: Path, mode: str) -> None:
    """All records, until rank 0 sends the summary or is gone."""
    tail, plots = RecordTail(folder / "metrics.jsonl"), Plots(folder)
    ended = False
    while not ended:
        ended = _has_run_ended(POLL_SECONDS)
        for record in tail.read_new():
            run.log({"round": record.round, **record.scalars(), **plots.draw(record)}, step=record.round)
    with _exit_after(FINISH_SECONDS[mode]):
        run.summary.update(_final_message()["summary"])
        run.finish(exit_code=_final_message()["code"])


def _has_run_ended(seconds: float = 0.0) -> bool:
    """Whether rank 0 sends its last message, or is gone, within so many seconds."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _teardown() -> None:
    """The W&B of this process, as if it had not been used yet."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown()


@cache
def _final_message() -> dict[str, Any]:
    """From rank 0; without one, it is gone."""
    message: dict[str, Any] = json.loads(sys.stdin.readline() or '{"summary": {}, "code": 1}')
    return message


@contextlib.contextmanager
def _exit_after(seconds: float) -> Iterator[None]:
    """This process ends if the body takes longer."""
    limit = threading.Timer(seconds, os._exit, [1])
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()


class RecordTail:
    """The records of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0

    def read_new(self) -> Iterator[RoundRecord]:
        """Whole lines since the last call."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if (record := parse_record(line)) is not None:
                    yield record


def _open(folder: Path, settings: dict[str, Any]) -> Any:
    own = folder / "wandb"
    own.mkdir(exist_ok=True)
    os.environ.setdefault("MPLCONFIGDIR", str((own / "local").resolve()))
    if settings["mode"] == "offline":
        for name in FOLDERS:
            os.environ.setdefault(name, str((own / "local").resolve()))
    import wandb

    run = wandb.init(
        project=settings["project"],
        entity=settings["entity"],
        group=settings["group"],
        job_type=settings["job_type"],
        tags=settings["tags"],
        name=folder.name,
        id=_run_id(own / "id"),
        resume="allow",
        mode=settings["mode"],
        dir=str(folder),
        config=settings["config"] | {"about": settings["about"]},
        # Its statistics of a process are to be those of rank 0, which started this one.
        settings=wandb.Settings(
            silent=True, console="off", init_timeout=OPEN_SECONDS[settings["mode"]], x_stats_pid=os.getppid()
        ),
    )
    run.define_metric("round", hidden=True)
    run.define_metric("*", step_metric="round")
    primary = settings["primary_metric"]
    metric = RoundRecord.dashboard_name("test", primary["name"])
    run.define_metric(metric, step_metric="round", summary=f"{primary['best']},last")
    return run


def _run_id(path: Path) -> str:
    """One id for all attempts at this run."""
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


class Plots:
    """Who has which classes, once; surfaces and lines of records that have them. What cannot be drawn is left out."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._has_clients = folder, False

    def draw(self, record: RoundRecord) -> dict[str, Any]:
        images: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            images |= self._draw_clients()
        for label, values in (record.diagnostics or {}).items():
            file = self._file(f"{label}-{record.round}")
            with contextlib.suppress(Exception):  # diagnostics may be the user's own, and hold anything
                if surfaces.draw({self._folder.name: [values]}, file):
                    images[record.dashboard_name("diagnostics", label)] = _image(file)
        return images

    def _draw_clients(self) -> dict[str, Any]:
        if self._has_clients:
            return {}
        self._has_clients, file = True, self._file("clients")
        counts = json.loads((self._folder / "clients.json").read_bytes())["classes"]
        if counts is None:
            return {}
        clients.draw(np.array(counts), file, self._folder.name)
        return {RoundRecord.dashboard_name("clients", "classes"): _image(file)}

    def _file(self, name: str) -> Path:
        return self._folder / "wandb" / "pictures" / f"{name}.png"


def _image(file: Path) -> Any:
    import wandb

    return wandb.Image(str(file))


if __name__ == "__main__":
    sys.exit(main())
