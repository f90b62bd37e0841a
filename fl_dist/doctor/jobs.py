"""Short jobs of the doctor: a child process on each of the first ranks, connected as the ranks of a run are.

Children have torch imported when they start, and a time limit: they may crash or hang.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

from fl_dist.common.files import write_atomically
from fl_dist.distributed import fault_injection
from fl_dist.distributed.rank_info import RankInfo
from fl_dist.distributed.signals import HANDLED_SIGNALS, end_with_parent, handle_signals
from fl_dist.doctor.ranks import Ranks

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_PROCID")
"""Beginnings of the variables that tell a process its rank; children have ranks of their own."""
ANSWER_MARGIN_SECONDS = 30.0
_context = multiprocessing.get_context("forkserver")

Target = Callable[[Path, Any], int]
"""Called in the child with a file for its results, and an argument; returns the exit code."""


class Outcome(NamedTuple):
    """How a child ended."""

    code: int | None
    """None: it exceeded its time limit and was killed."""
    seconds: float
    output: str
    result: dict[str, Any]

    @property
    def problem(self) -> str:
        """Why it failed, in one line; empty if it did not."""
        if self.code == 0:
            return ""
        if self.code is None:
            return f"it did not end within {self.seconds:.0f} s"
        if self.code < 0:
            return f"the process was ended by {signal.Signals(-self.code).name}"
        errors = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return errors[-1].removeprefix("error: ") if errors else f"exit code {self.code}"


NO_ANSWER = Outcome(None, 0.0, "", {})
"""Of a rank whose doctor did not answer."""


def prepare_children() -> None:
    """Start the process that children are forked from; it ignores the signals that a check sends to the whole job."""
    _context.set_forkserver_preload(["fl_dist.run_command", "fl_dist.doctor.probe"])
    with handle_signals(signal.SIG_IGN, [signal.SIGUSR1, signal.SIGUSR2]):
        forkserver.ensure_running()


def run_job(ranks: Ranks, size: int, target: Target, argument: Any, seconds: float, faults: str = "") -> list[Outcome]:
    """Run the target on the first `size` ranks. On rank 0, how each child ended; empty on other ranks."""
    port = ranks.broadcast(_free_port() if ranks.rank == 0 else None)
    outcome = None
    if ranks.rank < size:
        variables = {"FL_DIST_FAULT": faults} if faults else {}
        if size > 1:
            variables |= rank_in_job(ranks.rank, ranks.hosts[:size], ranks.info.host, port).to_environment()
        outcome = run_child(target, argument, variables, seconds)
    answers = ranks.gather(outcome, seconds + ANSWER_MARGIN_SECONDS)[:size]
    return [NO_ANSWER if answer is None else Outcome(*answer) for answer in answers]


def rank_in_job(rank: int, hosts: Sequence[str], address: str, port: int) -> RankInfo:
    """`hosts`: that of each rank of the job."""
    return RankInfo(rank, len(hosts), hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]), address, port)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def run_child(target: Target, argument: Any, variables: dict[str, str], seconds: float) -> Outcome:
    """Run the target with these variables instead of this process's rank; kill it after so many seconds."""
    with tempfile.TemporaryDirectory(prefix="fl_dist-doctor-", ignore_cleanup_errors=True) as folder:
        output, result = Path(folder, "output"), Path(folder, "result")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
        arguments = (target, argument, inherited | variables, str(output), str(result))
        process = _context.Process(target=_run, args=arguments)
        start = time.monotonic()
        process.start()
        try:
            process.join(seconds)
        finally:
            is_late = process.is_alive()
            process.kill()
            process.join()
        text = output.read_text(errors="replace") if output.exists() else ""
        values = json.loads(result.read_bytes()) if result.exists() else {}
        return Outcome(None if is_late else process.exitcode, time.monotonic() - start, text, values)


def _run(target: Target, argument: Any, variables: dict[str, str], output: str, result: str) -> None:
    """In the child."""
    end_with_parent(os.getppid())
    os.environ.clear()
    os.environ.update(variables)
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    fault_injection.point = fault_injection.parse_faults(variables.get("FL_DIST_FAULT", ""))
    code = target(Path(result), argument)
    sys.stdout.flush()
    sys.exit(code)


def write_result(file: Path, values: dict[str, Any]) -> None:
    """Whole or absent, because the process may crash in its next step."""
    write_atomically(file, json.dumps(values).encode(), durable=False)
