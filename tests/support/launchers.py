"""Start a small run on the embedded digits through the launchers."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.processes import ROOT
from tests.support.waiting import TIMEOUT_SECONDS

CONFIG = """
seed: 3
rounds: 30
clients: {total: 10, per_round: 4}
model: {name: mlp}
algorithm: {name: fedgmt}
local: {epochs: 1, batch_size: 10, lr: 0.05}
monitor: {wandb: {mode: disabled}}
"""


def write_config(folder: Path) -> str:
    file = folder / "digits.yaml"
    file.write_text(CONFIG)
    return str(file)


def run_in_terminal(module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a launcher whose output is a terminal of 100 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        output = b"".join(_read_until_closed(master))
    return process.returncode, output.decode()


def _read_until_closed(terminal: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # Linux raises when the other end is closed
        while data := os.read(terminal, 4096):
            yield data


def start_launcher(module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start a launcher in its own process and capture its output."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_launcher(module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output."""
    with start_launcher(module, arguments) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except BaseException:
            process.terminate()
            raise
    return process.returncode, output


def find_rank_pids(run: Path) -> list[int]:
    """Process ids of the ranks of this run folder, rank 0 last."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _is_rank(entry, f"run.dir={run}")]
    return sorted(pids, key=_rank_of, reverse=True)


def _is_rank(pid: str, argument: str) -> bool:
    words = _read_proc(pid, "cmdline")
    return "launch.rank" in words and argument in words


def _rank_of(pid: int) -> int:
    return next((int(word[5:]) for word in _read_proc(str(pid), "environ") if word.startswith("RANK=")), -1)


def _read_proc(pid: str, file: str) -> list[str]:
    try:
        return Path("/proc", pid, file).read_text(errors="replace").split("\0")
    except OSError:
        return []
