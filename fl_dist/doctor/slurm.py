"""Slurm's signals reach every rank, and a job that asks for it comes back from the queue."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from fl_dist.doctor.checks import Check, Status
from fl_dist.doctor.ranks import Ranks

SIGNALS, REQUEUE = "Slurm's signals", "Slurm's requeue"
SIGNAL_TIMEOUT_SECONDS = 20.0
REQUEUE_TIMEOUT_SECONDS = 90.0
COMMAND_TIMEOUT_SECONDS = 30.0


def receives_signals(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this rank itself: other launchers forward signals in their own way."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and "TORCHELASTIC_RUN_ID" not in environ


def check_signals(ranks: Ranks) -> list[Check]:
    """Send SIGUSR1 to this step, as Slurm does before a time limit. On all ranks; the check is rank 0's."""
    if not ranks.broadcast(receives_signals()):
        return []
    with _count_signals() as count:
        ranks.gather(True, SIGNAL_TIMEOUT_SECONDS)  # every rank is ready
        problem = ranks.broadcast(_signal_step() if ranks.rank == 0 else "")
        deadline = time.monotonic() + SIGNAL_TIMEOUT_SECONDS
        while not problem and not count() and time.monotonic() < deadline:
            time.sleep(0.05)
        arrived = ranks.gather(bool(count()), SIGNAL_TIMEOUT_SECONDS + COMMAND_TIMEOUT_SECONDS)
    return [check_arrivals(arrived, problem)] if ranks.rank == 0 else []


def _signal_step() -> str:
    """scancel belongs to the step, too: it inherits the mask, and so survives its own signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        return run_slurm("scancel", "--signal=USR1", f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_arrivals(arrived: Sequence[bool | None], problem: str) -> Check:
    if problem:
        return Check(SIGNALS, Status.WARNING, f"none could be sent: {problem}", "runs save at checkpoint.every anyway")
    if missing := [str(rank) for rank, has_arrived in enumerate(arrived) if not has_arrived]:
        advice = "a run could not save before its time limit: start ranks with srun, without a shell in between"
        return Check(SIGNALS, Status.FAILED, f"SIGUSR1 did not reach rank {', '.join(missing)}", advice)
    return Check(SIGNALS, Status.OK, "SIGUSR1 reached every rank")


@contextlib.contextmanager
def _count_signals() -> Iterator[Callable[[], int]]:
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        yield lambda: len(received)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes late


def check_requeue(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Requeue this job, once: it ends here, and its next attempt reports it."""
    if ranks.broadcast(int(environ.get("SLURM_RESTART_COUNT", "0"))):
        return [Check(REQUEUE, Status.OK, "the job was requeued and started again")]
    advice = "submit with sbatch --requeue; whether jobs may be requeued is the cluster's choice (JobRequeue)"
    problem = _requeue(environ) if ranks.rank == 0 else ""
    return [Check(REQUEUE, Status.FAILED, ranks.broadcast(problem), advice)]


def _requeue(environ: Mapping[str, str]) -> str:
    """Does not return if it succeeds; otherwise, why not."""
    if "SLURM_JOB_ID" not in environ:
        return "this is no job of Slurm"
    if problem := run_slurm("scontrol", "requeue", environ["SLURM_JOB_ID"]):
        return problem
    time.sleep(REQUEUE_TIMEOUT_SECONDS)
    return f"the job was not ended within {REQUEUE_TIMEOUT_SECONDS:.0f} s of scontrol requeue"


def run_slurm(*command: str) -> str:
    """Why a command of Slurm failed; empty if it did not."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{command[0]}: {getattr(e, 'strerror', None) or 'no answer'}"
    return "" if result.returncode == 0 else " ".join(result.stderr.split()) or f"{command[0]} failed"
