"""What submitit starts: one rank of a run, which goes back to the queue when it is interrupted."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from submitit import JobEnvironment
from submitit.helpers import DelayedSubmission

from fl_dist.common import terminal
from fl_dist.machine.place import port_of
from fl_dist.machine.signals import REQUEUE, end_with_parent
from fl_dist.storage.folder import RunFolder
from launch.node import FirstError, Node, alive, find_node
from launch.rank import run_main

COURTESY = 8.0
"""Seconds that the other ranks of a failed run leave rank 0 to say why; its end ends them."""
PAUSES = (1, 2, 4, 8)
"""Seconds after which a controller is asked again that was too busy to answer."""


class RunFailed(Exception):
    """A run that ended with an error; the message is its one line."""


@dataclass
class Task:
    """`fl_dist.main` with these arguments; run_dir is where it writes the model of so many rounds."""

    arguments: list[str]
    run_dir: str
    rounds: int
    launcher: int | None = None
    """The process that waits for the run, here; it ends with that."""

    def __call__(self) -> None:
        terminal.prepare()  # the job's log may lie on a disk that is full
        environment = JobEnvironment()
        if self._finished:
            return
        os.environ.update(rank_variables(environment))
        end_with_parent()
        with FirstError() as error:
            code = self._run() if self.launcher is None else self._run_with(self.launcher, environment.global_rank)
        # Only rank 0 knows that the model is written; a signal that missed it reached another rank.
        if code == REQUEUE or (code == 0 and environment.global_rank == 0 and not self._finished):
            requeue(environment)
        elif code:
            fail(environment.global_rank, error.message or f"the run ended with exit code {code}")

    def _run(self) -> int:
        # submitit wants to hear of SIGUSR2 and the run wants to save first: while main runs, signals are its own.
        from fl_dist.main import main

        return main(self.arguments)

    def _run_with(self, launcher: int, rank: int) -> int:
        node = find_node()
        assert node is not None
        node.enter(rank)
        threading.Thread(target=stop_with, args=(launcher, node), daemon=True).start()
        code = REQUEUE if node.stopped else run_main(self.arguments)
        node.leave(rank, code, final=code not in (0, REQUEUE))
        return code

    @property
    def _finished(self) -> bool:
        return RunFolder(self.run_dir).finished(self.rounds)

    def checkpoint(self) -> DelayedSubmission:
        """The same again: main resumes by itself."""
        return DelayedSubmission(self)


def rank_variables(environment: JobEnvironment) -> dict[str, str]:
    """The variables by which fl_dist finds its rank, as torchrun would set them."""
    tasks, nodes = environment.num_tasks, environment.num_nodes
    local = environment.cluster == "local"
    return {
        "RANK": str(environment.global_rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(environment.local_rank),
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "MASTER_ADDR": "127.0.0.1" if local else environment.hostnames[0],
        "MASTER_PORT": str(port_of(int(environment.raw_job_id))),
    }


def requeue(environment: JobEnvironment) -> None:
    """The run is saved: do now what submitit does on its signal. Rank 0 does it for all."""
    if environment.global_rank == 0 and still_wanted(environment):
        signal.raise_signal(JobEnvironment._usr_sig())
    # No exception, and no code that srun would take for a failure: rank 0 may still be at it.
    sys.exit(0)


def still_wanted(environment: JobEnvironment) -> bool:
    """A job that was cancelled, or that Slurm is requeueing itself, no longer counts as running; here is no queue."""
    if environment.cluster != "slurm":
        return False
    query = ["squeue", "--noheader", f"--jobs={environment.raw_job_id}", "--format=%T"]
    for pause in (*PAUSES, 0):
        asked = subprocess.run(query, capture_output=True, text=True)
        if asked.returncode == 0:
            break
        time.sleep(pause)
    return asked.stdout.strip() == "RUNNING"


def stop_with(launcher: int, node: Node) -> None:
    """Stop the ranks when their launcher ends: it is not their parent, of whose end the kernel would tell."""
    while alive(launcher):
        time.sleep(0.2)
    node.stop(signal.SIGTERM)


def fail(rank: int, reason: str) -> None:
    if rank != 0:
        time.sleep(COURTESY)
    sys.tracebacklimit = 0
    raise RunFailed(reason)
