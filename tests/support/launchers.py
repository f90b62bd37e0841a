"""A small run on the embedded digits, started through the launchers as a user would."""

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
from tests.support.waiting import PATIENCE

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


def in_terminal(module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a launcher whose output is a terminal of 100 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        output = b"".join(_until_closed(master))
    return process.returncode, output.decode()


def _until_closed(terminal: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while data := os.read(terminal, 4096):
            yield data


def start(module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """A launcher as a process of its own, its output caught."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output."""
    with start(module, arguments) as process:
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except BaseException:
            process.terminate()
            raise
    return process.returncode, output


def ranks(run: Path) -> list[int]:
    """Process ids of the ranks that write to this folder, rank 0's last."""
    found = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _is_rank(entry, f"run.dir={run}")]
    return sorted(found, key=_rank, reverse=True)


def _is_rank(pid: str, argument: str) -> bool:
    words = _read(pid, "cmdline")
    return "launch.rank" in words and argument in words


def _rank(pid: int) -> int:
    return next((int(word[5:]) for word in _read(str(pid), "environ") if word.startswith("RANK=")), -1)


def _read(pid: str, file: str) -> list[str]:
    try:
        return Path("/proc", pid, file).read_text(errors="replace").split("\0")
    except OSError:
        return []
