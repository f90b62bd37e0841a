"""Short runs of the configuration: the same bits on any number of workers, and after a worker was killed."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fl_dist.common.formatting import format_duration, pluralize
from fl_dist.config import Config
from fl_dist.doctor.checks import Check, Status
from fl_dist.doctor.jobs import Outcome
from fl_dist.storage.run_folder import MODEL

BITS, KILLED = "same bits", "killed worker"
ROUNDS, MAX_STEPS = 2, 10
REPEATS = 2
TRIAL_TIMEOUT_SECONDS = 120.0


class Trial(NamedTuple):
    """The same run, several times on a number of ranks."""

    size: int
    hashes: list[str]
    problem: str = ""

    @property
    def name(self) -> str:
        return "one process" if self.size == 1 else pluralize(self.size, "rank")


def trial_sizes(size: int) -> list[int]:
    """Ranks: one process alone, then a server and 1, 2 and all workers."""
    return sorted({ranks for ranks in (1, 2, 3, size) if ranks <= size})


def trial_rounds(config: Config) -> int:
    return min(ROUNDS, config.rounds)


def trial_words(words: Sequence[str], config: Config, folder: Path) -> list[str]:
    """The configuration with few rounds and steps, and nothing beside them."""
    steps = min(config.local.steps or MAX_STEPS, MAX_STEPS)
    return [
        *words,
        f"rounds={trial_rounds(config)}",
        f"local.steps={steps}",
        "checkpoint.every=1",
        "monitor.wandb.mode=disabled",
        "callbacks=[]",
        "diagnostics={}",
        "comm.rendezvous_timeout=60",
        f"run.dir={folder}",
    ]


def train(file: Path, runs: Sequence[Sequence[str]]) -> int:
    """In a child process: these runs, one after the other."""
    from fl_dist.main import main

    return max(main(words) for words in runs)


def model_hash(run: Path) -> str:
    """SHA-256 of the model; empty if there is none."""
    model = run / MODEL
    return hashlib.sha256(model.read_bytes()).hexdigest() if model.exists() else ""


def first_problem(outcomes: Sequence[Outcome]) -> str:
    """Why a job failed, by rank; empty if it did not."""
    problems = [f"rank {rank}: {outcome.problem}" for rank, outcome in enumerate(outcomes) if outcome.problem]
    return problems[0] if problems else ""


def check_bits(trials: Sequence[Trial]) -> Check:
    for trial in trials:
        if trial.problem:
            advice = "fl-dist run --check CONFIG checks the configuration; a run of two rounds shows the whole error"
            return Check(BITS, Status.FAILED, f"on {trial.name} the run failed: {trial.problem}", advice)
    first = trials[0].hashes[0]
    if all(sha256 == first for trial in trials for sha256 in trial.hashes):
        names = ", ".join(trial.name for trial in trials)
        return Check(BITS, Status.OK, f"{names}, twice each: all have the model {first[:12]}")
    found = "; ".join(f"{trial.name}: {', '.join(h[:8] for h in trial.hashes)}" for trial in trials)
    return Check(BITS, Status.FAILED, f"models differ: {found}", _bits_advice(trials))


def _bits_advice(trials: Sequence[Trial]) -> str:
    if any(len(set(trial.hashes)) > 1 for trial in trials):
        return "a run does not repeat itself: your own code may use randomness or clocks, or a device computes wrongly"
    return "ranks compute differently: compare devices and versions above; comm.reduce has to be exact"


def check_killed(outcomes: Sequence[Outcome], resumed: Sequence[Outcome], sha256: str, expected: str) -> Check:
    """`outcomes` of a job whose last rank was killed in its last round; then it was resumed."""
    lost = len(outcomes) - 1
    if outcomes[lost].code != -9:
        return Check(KILLED, Status.FAILED, f"rank {lost} was not killed: {outcomes[lost].problem or 'it finished'}")
    late = [f"rank {rank}" for rank, outcome in enumerate(outcomes) if outcome.code is None]
    if late:
        measured = f"after rank {lost} was killed, {', '.join(late)} did not end"
        return Check(KILLED, Status.FAILED, measured, "start runs with srun --kill-on-bad-exit=1; report this")
    if lost and not re.search(rf"\brank {lost}\b", outcomes[0].output):
        return Check(KILLED, Status.FAILED, f"rank 0 did not name the lost rank {lost}", "report this")
    if problem := first_problem(resumed):
        return Check(KILLED, Status.FAILED, f"the run did not resume: {problem}", "see the error")
    if sha256 != expected:
        return Check(KILLED, Status.FAILED, "the resumed run has another model", "compare with the same bits above")
    seconds = max(outcome.seconds for outcome in outcomes) - outcomes[lost].seconds
    named = f"rank {lost} was named, all ended {format_duration(seconds)} later" if lost else "killed in mid-round"
    return Check(KILLED, Status.OK, f"{named}, the run resumed with the same bits")
