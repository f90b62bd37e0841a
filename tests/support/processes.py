"""Start real ranks, and be sure that they end."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.waiting import PATIENCE, free_port

ROOT = Path(__file__).parents[2]
QUIET = ("monitor.wandb.mode=disabled",)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without traces of a surrounding job."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC", "SLURM", "FL_DIST_", "WANDB_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return kept | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def torchrun(ranks: int, *flags: str) -> list[str]:
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={ranks}", *flags]


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, which is ended with everything in it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **(pipes | {"env": environment()} | options))
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run(command: Sequence[str], timeout: float = PATIENCE, **options: Any) -> tuple[int, str]:
    """Exit code and output of a command."""
    with started(command, **options) as process:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output


class Rank:
    """A process of its own, forked from one that has imported torch: it starts in no time, and is as real as any."""

    def __init__(self, runs: Sequence[Sequence[str]], env: dict[str, str]) -> None:
        _start_zygote()
        handle, self._output = tempfile.mkstemp(prefix="rank-")
        os.close(handle)
        self._process = _ZYGOTE.Process(target=_be_rank, args=([list(run) for run in runs], env, self._output))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    @property
    def stopped(self) -> bool:
        """As by SIGSTOP; or not there any more."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in ("T", "Z")

    def wait(self, timeout: float = PATIENCE) -> int | None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self.returncode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, None]:
        self.wait(timeout)
        return self.output(), None

    def output(self) -> str:
        """What it has said so far."""
        return Path(self._output).read_text()

    def end(self) -> None:
        # A rank that was ended before it had its own session is the only process of its name.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        self._process.join()
        os.unlink(self._output)


def _be_rank(runs: list[list[str]], env: dict[str, str], output: str) -> None:
    from fl_dist.machine import faults
    from fl_dist.main import main

    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if "FL_DIST_FAULT" in env:
        faults.point = faults.armed(env["FL_DIST_FAULT"])
    if "PRETENDED_GPU" in env:
        from tests.support import gpu

        main = gpu.reporting(main, env["PRETENDED_GPU"])
    code = max(main(arguments) for arguments in runs)
    if "WHOLE_END" in env:  # as of a program, and not of a fork: threads and tensors that are left may end it otherwise
        ctypes.pythonapi.Py_Exit(code)
    sys.exit(code)


def _start_zygote() -> None:
    """From this copy of the program, whatever a test has done to its working folder and environment."""
    with contextlib.chdir(ROOT), mock.patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}):
        forkserver.ensure_running()


_ZYGOTE = multiprocessing.get_context("forkserver")
_ZYGOTE.set_forkserver_preload(["fl_dist.main"])


@contextlib.contextmanager
def started_ranks(
    ranks: int, *runs: Sequence[str], own: Sequence[dict[str, str]] = (), **env: str
) -> Iterator[list[Rank]]:
    """The ranks of a job, with no agent that would end or restart them; each makes these runs in turn.

    `own`: what each rank has in its environment beside `env`.
    """
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            place |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            processes.append(Rank(runs, environment(**place | env | (own[rank] if own else {}))))
            stack.callback(processes[-1].end)
        yield processes


def run_ranks(
    ranks: int, *runs: Sequence[str], timeout: float = PATIENCE, own: Sequence[dict[str, str]] = (), **env: str
) -> tuple[list[int | None], list[str]]:
    """Exit codes and outputs of the ranks of a job."""
    with started_ranks(ranks, *runs, own=own, **env) as processes:
        outputs = [process.communicate(timeout)[0] for process in processes]
        return [process.returncode for process in processes], outputs


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes that do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def listening(pids: list[int]) -> set[str]:
    """Addresses on which these processes listen, as /proc shows them."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it may have ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found
