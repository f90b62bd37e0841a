"""Progress of runs, read from their folders, their logs and Slurm's queue."""

import subprocess
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from fl_dist.callbacks.always_on.console import STARTING
from fl_dist.common.errors import UserError, error_message
from fl_dist.common.files import check_regular
from fl_dist.common.formatting import align_columns, format_duration
from fl_dist.metrics.record import RoundRecord, parse_record
from fl_dist.storage.folder_lock import is_locked
from fl_dist.storage.run_folder import METRICS, RunFolder
from fl_dist.tasks import PrimaryMetric

RECENT_ROUNDS = 10
"""Rounds whose mean duration gives the remaining time."""
LOG_TAIL_LINES = 1000
"""Lines at the end of a log that are searched for its last attempt."""
ERROR_PREFIXES = ("error: ", "launch.task.RunFailedError: ", "slurmstepd", "srun: error: ")
"""Starts of lines that say why a run failed, the most informative first."""
LOGGED_START, LOGGED_ERROR = " INFO fl_dist ", " ERROR "
"""In lines of a rank's log: the first of an attempt, and what ended it."""


@dataclass
class Status:
    name: str
    state: str
    round: str = ""
    accuracy: str = ""
    left: str = ""
    reason: str = ""


def read_queue() -> dict[str, str]:
    """The state of every pending or running job of this user, by job id; empty without Slurm."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except (FileNotFoundError, PermissionError):
        return {}
    return dict(line.split() for line in answer.stdout.splitlines() if line.strip())


def read_status(name: str, run: Path, rounds: int | None, queue_state: str | None, log: Path | None) -> Status:
    """One line of the table, even of a damaged folder; without `rounds`, the folder says how many there are."""
    try:
        return _read_status(name, run, RunFolder(run).read_rounds() if rounds is None else rounds, queue_state, log)
    except (ValueError, OSError) as e:
        return Status(name, "unreadable", reason=error_message(e))


def read_submitted_status(run: Path, queue: dict[str, str]) -> Status:
    """The same of a run by itself, with the state of the job that `launch.submit` submitted last for it."""
    names = [script.name.removesuffix("_submission.sh") for script in (run / "jobs").glob("*_submission.sh")]
    job = max(filter(str.isdecimal, names), key=int, default=None)
    return read_status(str(run), run, None, queue.get(job or ""), latest_log(run, run, job))


def latest_log(run: Path, folder: Path, job: str | None) -> Path | None:
    """The log of the latest attempt: a local one, or that of a job whose files are in the folder."""
    logs = [run / "logs" / "launch.log", *([job_log(folder, job)] if job is not None else [])]
    return max((log for log in logs if log.exists()), key=lambda log: log.stat().st_mtime, default=None)


def job_log(folder: Path, job: str) -> Path:
    return folder / "jobs" / f"{job}_0_log.out"


def _read_status(name: str, run: Path, rounds: int, queue_state: str | None, log: Path | None) -> Status:
    records = _read_last_records(run / METRICS)
    is_finished = RunFolder(run).is_finished(rounds)
    reason = failure_reason(log) or _logged_failure(RunFolder(run).logs / "rank0.log")
    state = _state(run, queue_state, has_failed=reason is not None, has_records=bool(records))
    status = Status(name, "finished" if is_finished else state)
    if records:
        completed = records[-1].round
        status.round, status.accuracy = f"{completed}/{rounds}", _format_score(run, records)
        if status.state == "running":
            mean_seconds = sum(record.seconds.total for record in records) / len(records)
            status.left = format_duration(mean_seconds * (rounds - completed))
    if status.state == "failed":
        status.reason = reason or ""
    return status


def _state(run: Path, queue_state: str | None, has_failed: bool, has_records: bool) -> str:
    if queue_state is not None:
        return "pending" if queue_state in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else "running"
    if is_locked(run):
        return "running"
    if has_failed:
        return "failed"
    return "interrupted" if has_records else "new"


def failure_reason(log: Path | None) -> str | None:
    """The first error of the last attempt; later ones are its consequences."""
    lines = _read_tail(log)
    attempt_start = max((k for k, line in enumerate(lines) if line.startswith(f"{STARTING} ")), default=0)
    for prefix in ERROR_PREFIXES:
        for line in lines[attempt_start:]:
            if line.startswith(prefix):
                return line.removeprefix(ERROR_PREFIXES[0]).removeprefix(ERROR_PREFIXES[1])
    return None


def _logged_failure(log: Path) -> str | None:
    """The error that ended the last attempt, by the log of rank 0."""
    lines = _read_tail(log)
    attempt_start = max((k for k, line in enumerate(lines) if LOGGED_START in line), default=0)
    errors = [line.partition(LOGGED_ERROR)[2] for line in lines[attempt_start:] if LOGGED_ERROR in line]
    return errors[0] if errors else None


def _read_tail(log: Path | None) -> list[str]:
    if log is None or not log.exists():
        return []
    check_regular(log)
    with open(log, encoding="utf-8", errors="replace") as file:
        return [line.strip() for line in deque(file, LOG_TAIL_LINES)]


def _read_last_records(metrics: Path) -> list[RoundRecord]:
    try:
        check_regular(metrics)
        with open(metrics, "rb") as file:
            lines = list(deque(file, RECENT_ROUNDS))
    except FileNotFoundError:
        return []
    parsed = [parse_record(line) for line in lines if line.endswith(b"\n")]
    records = [record for record in parsed if record is not None]
    if len(records) < len(parsed):
        raise UserError(f"{metrics} has a line that is not the record of a round")
    return records


def _format_score(run: Path, records: list[RoundRecord]) -> str:
    """The last value of the primary metric."""
    facts = RunFolder(run).read_facts().get("primary_metric")
    metric = PrimaryMetric(**facts) if facts else PrimaryMetric("accuracy", "max", percent=True)
    values = [value for record in records if (value := record.test.get(metric.name)) is not None]
    if not values:
        return ""
    return f"{'' if metric.name == 'accuracy' else f'{metric.name} '}{metric.format(values[-1])}"


def read_progress(run: Path) -> tuple[int, str]:
    """The completed rounds of a run and its last score; none if they cannot be read."""
    try:
        records = _read_last_records(run / METRICS)
        return (records[-1].round, _format_score(run, records)) if records else (0, "")
    except (ValueError, OSError):
        return 0, ""


def format_table(statuses: list[Status]) -> str:
    """Aligned columns; a reason ends its line."""
    header = Status("run", "state", "round", "accuracy", "left", "")
    return "\n".join(align_columns([list(vars(status).values()) for status in [header, *statuses]]))
