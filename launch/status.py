"""How far runs are, read from their folders, their logs and Slurm's queue.

python -m launch.status [RUN ...]
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds

import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_dist.common.words import duration, message
from fl_dist.monitor.console import STARTING
from fl_dist.storage.folder import METRICS, RunFolder, locked, runs_below
from fl_dist.storage.metrics import parsed
from fl_dist.tasks import Headline

RECENT = 10
"""Rounds from whose duration the time left is estimated."""
TAIL = 1000
"""Lines at the end of a log among which its last attempt is looked for."""
ERRORS = ("error: ", "launch.task.RunFailed: ", "slurmstepd", "srun: error: ")
"""Beginnings of lines that say why a run failed, the best first."""


@dataclass
class Status:
    name: str
    state: str
    round: str = ""
    accuracy: str = ""
    left: str = ""
    reason: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = terminal.Parser(prog="python -m launch.status", description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="*", type=Path, default=[Path("runs")], help="run folders, or folders of them (default runs)"
    )
    runs = [run for given in parser.parse_args(argv).runs for run in runs_below(given)]
    if not runs:
        terminal.complain("no run there; a run's folder has a config.yaml")
        return 1
    print(table([_of_folder(run) for run in runs]))
    return 0


def _of_folder(run: Path) -> Status:
    try:
        rounds = RunFolder(run).rounds()
    except (ValueError, OSError) as e:
        return Status(str(run), "unreadable", reason=message(e))
    log = run / "logs" / "launch.log"
    return status(str(run), run, rounds, None, log if log.exists() else None)


def queue() -> dict[str, str]:
    """The state of every job of this user that is waiting or running, by job id; empty without Slurm."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return {}
    return dict(line.split() for line in answer.stdout.splitlines() if line.strip())


def status(name: str, run: Path, rounds: int, queued: str | None, log: Path | None) -> Status:
    """One line of the table, which a damaged folder must not hide."""
    try:
        return _status(name, run, rounds, queued, log)
    except (ValueError, OSError) as e:
        return Status(name, "unreadable", reason=message(e))


def _status(name: str, run: Path, rounds: int, queued: str | None, log: Path | None) -> Status:
    rows = _last_rows(run / METRICS)
    known = Status(name, "finished" if RunFolder(run).finished(rounds) else _state(run, queued, log, bool(rows)))
    if rows:
        done = rows[-1]["round"]
        known.round, known.accuracy = f"{done}/{rounds}", _score(run, rows)
        if known.state == "running":
            known.left = duration(sum(row["seconds"]["total"] for row in rows) / len(rows) * (rounds - done))
    if known.state == "failed":
        known.reason = reason(log) or ""
    return known


def _state(run: Path, queued: str | None, log: Path | None, begun: bool) -> str:
    if queued is not None:
        return "pending" if queued in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else "running"
    if locked(run):
        return "running"
    if reason(log) is not None:
        return "failed"
    return "interrupted" if begun else "new"


def reason(log: Path | None) -> str | None:
    """Why the last attempt failed: its first error, for those that follow are consequences."""
    if log is None or not log.exists():
        return None
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in deque(file, TAIL)]
    attempts = [k for k, line in enumerate(lines) if line.startswith(f"{STARTING} ")]
    last = lines[attempts[-1] :] if attempts else lines
    found = [line for start in ERRORS for line in last if line.startswith(start)]
    return found[0].removeprefix("error: ").removeprefix("launch.task.RunFailed: ") if found else None


def _last_rows(metrics: Path) -> list[dict[str, Any]]:
    try:
        with open(metrics, "rb") as file:
            lines = list(deque(file, RECENT))
    except FileNotFoundError:
        return []
    rows = [parsed(line) for line in lines if line.endswith(b"\n")]
    if None in rows:
        raise ValueError(f"{metrics} has a line that is not a row of a run")
    return [row for row in rows if row is not None]


def _score(run: Path, rows: list[dict[str, Any]]) -> str:
    """The last value of the metric by which the run is judged."""
    told = RunFolder(run).facts().get("headline")
    headline = Headline(**told) if told else Headline("accuracy", "max", percent=True)
    found = next((value for row in reversed(rows) if (value := row.get(f"test_{headline.name}")) is not None), None)
    if found is None:
        return ""
    return headline.shown(found) if headline.name == "accuracy" else f"{headline.name} {headline.shown(found)}"


def so_far(run: Path) -> tuple[int, str]:
    """The rounds that a run has done and its last score; what cannot be read counts as nothing."""
    try:
        rows = _last_rows(run / METRICS)
        return (rows[-1]["round"], _score(run, rows)) if rows else (0, "")
    except (ValueError, OSError):
        return 0, ""


def table(states: list[Status]) -> str:
    """Columns as wide as they need to be; a reason ends its line."""
    head = Status("run", "state", "round", "accuracy", "left", "")
    rows = [list(vars(line).values()) for line in [head, *states]]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join([*map(str.ljust, row[:5], widths), row[5]]).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
