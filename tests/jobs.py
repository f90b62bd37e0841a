"""Start real ranks, and be sure that they end."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
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


def run(command: Sequence[str], timeout: float = 120, **options: Any) -> tuple[int, str]:
    """Exit code and output of a command."""
    with started(command, **options) as process:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def started_ranks(ranks: int, arguments: Sequence[str], **env: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a job as processes of our own, with no agent that would end or restart them."""
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            place |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, "-m", "fl_dist.main", *arguments]
            processes.append(stack.enter_context(started(command, env=environment(**place, **env))))
        yield processes


def model_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def results(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what may differ between two runs of one config: times."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in metrics(folder)]
