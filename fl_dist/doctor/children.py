"""Child processes of the doctor: they have torch imported when they start, and a time limit."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

from fl_dist.distributed import fault_injection
from fl_dist.distributed.signals import HANDLED_SIGNALS, end_with_parent

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_PROCID")
"""Beginnings of the variables that tell a process its rank; children have ranks of their own."""
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


def prepare_children() -> None:
    """Start the process that children are forked from; it ignores the signals that a check sends to the whole job."""
    _context.set_forkserver_preload(["fl_dist.run_command", "fl_dist.doctor.probe"])
    with _ignore_signals():
        forkserver.ensure_running()


@contextlib.contextmanager
def _ignore_signals() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        code = None if is_late else process.exitcode
        return Outcome(code, time.monotonic() - start, text, read_result(result))


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
    if faults := variables.get("FL_DIST_FAULT"):
        fault_injection.point = fault_injection.parse_faults(faults)
    code = target(Path(result), argument)
    sys.stdout.flush()
    sys.exit(code)


def write_result(file: Path, values: dict[str, Any]) -> None:
    """Whole or absent, because the process may crash in its next step."""
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(values))
    temporary.replace(file)


def read_result(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return values


def rank_variables(rank: int, hosts: Sequence[str], address: str, port: int) -> dict[str, str]:
    """The variables of a rank among `hosts`, the host of each rank; none for one process alone."""
    if len(hosts) == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
        "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
