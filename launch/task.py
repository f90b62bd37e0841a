"""What submitit starts: one rank of a run, which goes back to the queue when it is interrupted."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from submitit import JobEnvironment
from submitit.core import utils
from submitit.helpers import DelayedSubmission

from fl_dist.common import terminal
from fl_dist.common.errors import FlDistError
from fl_dist.distributed.rank_exit import call_before_exit
from fl_dist.distributed.rank_info import RankInfo, rendezvous_port
from fl_dist.distributed.signals import EXIT_REQUEUE, end_with_parent
from fl_dist.storage.run_folder import RunFolder
from launch.node import Node, find_node, is_process_alive
from launch.rank import FirstErrorHandler, run_main
from launch.requeue import is_job_running

SERVER_ERROR_DELAY_SECONDS = 8.0
"""How long the other ranks of a failed run wait for rank 0 to report the reason; when it exits, they end too."""


class RunFailedError(FlDistError):
    """A run that ended with an error; the message is its one line."""


@dataclass
class Task:
    """`fl_dist.main` with these arguments; after so many rounds it writes the model to run_dir."""

    arguments: list[str]
    run_dir: str
    rounds: int
    launcher_pid: int | None = None
    """The process on this machine that waits for the run; the run ends with it."""

    def __call__(self) -> None:
        terminal.prepare_terminal()  # the job's log may be on a full disk
        environment = JobEnvironment()
        rank = environment.global_rank
        if self._is_finished:
            return
        os.environ.update(read_rank(environment).to_environment())
        end_with_parent()
        requeue = partial(_requeue, environment, signal.getsignal(JobEnvironment._usr_sig()))
        with FirstErrorHandler() as error, call_before_exit(partial(self._leave, environment, requeue, error)):
            code = self._run() if self.launcher_pid is None else self._run_locally(self.launcher_pid, rank)
        # Only rank 0 knows that the model is written; a signal that missed it may have reached another rank.
        if code == EXIT_REQUEUE or (code == 0 and rank == 0 and not self._is_finished):
            requeue()
            # No exception and no failure code for srun to act on: rank 0 may still be requeueing.
            sys.exit(0)
        elif code:
            _raise_failure(rank, error.message or f"the run ended with exit code {code}")

    def _run(self) -> int:
        # Both submitit and the run handle SIGUSR2, and the run must save first: main replaces submitit's handlers.
        from fl_dist.main import main

        return main(self.arguments)

    def _run_locally(self, launcher_pid: int, rank: int) -> int:
        node = find_node()
        node.register(rank)
        threading.Thread(target=_stop_with_launcher, args=(launcher_pid, node), daemon=True).start()
        code = EXIT_REQUEUE if node.is_stopping else run_main(self.arguments)
        _record_exit(rank, code)
        return code

    def _leave(
        self, environment: JobEnvironment, requeue: Callable[[], None], error: FirstErrorHandler, code: int
    ) -> int:
        """What a rank of a failing job, which does not return, leaves to submitit: a queued job, or a result."""
        if self.launcher_pid is not None:
            _record_exit(environment.global_rank, code)
        if code == EXIT_REQUEUE:
            requeue()
            return 0
        with utils.temporary_save_path(environment.paths.result_pickle) as path:
            utils.cloudpickle_dump(("error", str(error.message)) if code else ("success", None), path)
        return code

    @property
    def _is_finished(self) -> bool:
        return RunFolder(self.run_dir).is_finished(self.rounds)

    def checkpoint(self) -> DelayedSubmission:
        """The same task again: main resumes by itself."""
        return DelayedSubmission(self)


@dataclass
class DoctorTask:
    """One rank of `fl-dist doctor` with these arguments."""

    arguments: list[str]

    def __call__(self) -> None:
        from launch.doctor import main

        terminal.prepare_terminal()
        environment = JobEnvironment()
        os.environ.update(read_rank(environment).to_environment())
        if code := main(self.arguments):
            _raise_failure(environment.global_rank, f"fl-dist doctor ended with exit code {code}")


def read_rank(environment: JobEnvironment) -> RankInfo:
    tasks = environment.num_tasks
    host = "127.0.0.1" if environment.cluster == "local" else environment.hostnames[0]
    port = rendezvous_port(int(environment.raw_job_id))
    local_size = tasks // environment.num_nodes
    return RankInfo(environment.global_rank, tasks, environment.local_rank, local_size, host, port)


def _requeue(environment: JobEnvironment, handler: Any) -> None:
    """The run is saved: rank 0 calls submitit's handler of the signal on which it requeues the job."""
    if environment.global_rank == 0 and environment.cluster == "slurm" and is_job_running(environment.raw_job_id):
        with contextlib.suppress(SystemExit):
            handler(JobEnvironment._usr_sig(), None)


def _record_exit(rank: int, code: int) -> None:
    find_node().record_exit(rank, code, is_fatal=code not in (0, EXIT_REQUEUE))


def _stop_with_launcher(launcher_pid: int, node: Node) -> None:
    """Stop the ranks when their launcher ends: it is not their parent, so the kernel sends them no signal."""
    while is_process_alive(launcher_pid):
        time.sleep(0.2)
    node.stop(signal.SIGTERM)


def _raise_failure(rank: int, reason: str) -> None:
    if rank != 0:
        time.sleep(SERVER_ERROR_DELAY_SECONDS)
    sys.tracebacklimit = 0
    raise RunFailedError(reason)
