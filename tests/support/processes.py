"""Start real processes and ranks; none outlives its test."""

import contextlib
import ctypes
import fcntl
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

from tests.support.waiting import TIMEOUT_SECONDS, free_port

ROOT = Path(__file__).parents[2]
NO_WANDB = ("monitor.wandb.mode=disabled",)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without the variables of a surrounding job."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC", "SLURM", "FL_DIST_", "WANDB_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return (
        inherited | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more
    )


def torchrun(ranks: int, *flags: str) -> list[str]:
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={ranks}", *flags]


@contextlib.contextmanager
def start_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own session; kill the session at the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **(pipes | {"env": environment()} | options))
    try:
        yield process
    finally:
        kill_process_group(process)


def kill_process_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run(command: Sequence[str], timeout: float = TIMEOUT_SECONDS, **options: Any) -> tuple[int, str]:
    """Exit code and output of a command."""
    with start_process(command, **options) as process:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output


class RankProcess:
    """A rank in its own process, forked from a fork server that has imported torch and so starts quickly."""

    def __init__(self, runs: Sequence[Sequence[str]], env: dict[str, str]) -> None:
        _start_forkserver()
        handle, self._output = tempfile.mkstemp(prefix="rank-")
        os.close(handle)
        self._process = _FORKSERVER.Process(target=_run_rank, args=([list(run) for run in runs], env, self._output))
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
    def is_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, or gone."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in ("T", "Z")

    def wait(self, timeout: float = TIMEOUT_SECONDS) -> int | None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self.returncode

    def communicate(self, timeout: float = TIMEOUT_SECONDS) -> tuple[str, None]:
        self.wait(timeout)
        return self.output(), None

    def output(self) -> str:
        """Its output so far."""
        return Path(self._output).read_text()

    def kill(self) -> None:
        # A rank killed before it created its own session has no process group.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        self._process.join()
        os.unlink(self._output)


def _run_rank(runs: list[list[str]], env: dict[str, str], output: str) -> None:
    from fl_dist.distributed import fault_injection
    from fl_dist.main import main

    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if "FL_DIST_FAULT" in env:
        fault_injection.point = fault_injection.parse_faults(env["FL_DIST_FAULT"])
    if "EVERY_LOCK_SUCCEEDS" in env:  # as on NFS with local locks
        setattr(fcntl, "flock", lambda *_: None)  # noqa: B010 (mypy refuses the assignment)
    if "SIMULATED_GPU" in env:
        from tests.support import simulated_gpu

        main = simulated_gpu.with_report(main, env["SIMULATED_GPU"])
    with contextlib.ExitStack() as stack:
        if "SYNCHRONOUS_CHECKPOINTS" in env:  # so that a run that is killed has one to resume from
            from tests.support.harness import synchronous_checkpoints

            stack.enter_context(synchronous_checkpoints())
        code = max(main(arguments) for arguments in runs)
    if (
        "FULL_INTERPRETER_EXIT" in env
    ):  # exit as a program does, not as a fork: remaining threads and tensors may crash it
        ctypes.pythonapi.Py_Exit(code)
    sys.exit(code)


def _start_forkserver() -> None:
    """Start it with this copy of the program, whatever the test's working folder and environment are."""
    with contextlib.chdir(ROOT), mock.patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}):
        forkserver.ensure_running()


_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["fl_dist.run_command"])


@contextlib.contextmanager
def start_ranks(
    ranks: int, *runs: Sequence[str], rank_env: Sequence[dict[str, str]] = (), **env: str
) -> Iterator[list[RankProcess]]:
    """Start the ranks of a job without an agent that would end or restart them; each executes these runs in turn.

    `rank_env`: variables of each rank in addition to `env`.
    """
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            job_env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            job_env |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            processes.append(RankProcess(runs, environment(**job_env | env | (rank_env[rank] if rank_env else {}))))
            stack.callback(processes[-1].kill)
        yield processes


def run_ranks(
    ranks: int,
    *runs: Sequence[str],
    timeout: float = TIMEOUT_SECONDS,
    rank_env: Sequence[dict[str, str]] = (),
    **env: str,
) -> tuple[list[int | None], list[str]]:
    """Exit codes and outputs of the ranks of a job."""
    with start_ranks(ranks, *runs, rank_env=rank_env, **env) as processes:
        outputs = [process.communicate(timeout)[0] for process in processes]
        return [process.returncode for process in processes], outputs


@contextlib.contextmanager
def pause_processes(pids: list[int]) -> Iterator[None]:
    """Stop these processes for the duration of the context."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def listening_addresses(pids: list[int]) -> set[str]:
    """The addresses on which these processes listen, as in /proc."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process may have ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].split(":")[0])
    return addresses
