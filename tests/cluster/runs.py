"""A small run on the embedded digits, started through the launchers as a user would."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = """
seed: 3
rounds: 40
clients: {total: 10, per_round: 4}
model: {name: mlp}
algorithm: {name: fedgmt}
local: {epochs: 3, batch_size: 10, lr: 0.05}
monitor: {wandb: {mode: disabled}}
"""


def write_config(folder: Path) -> str:
    file = folder / "digits.yaml"
    file.write_text(CONFIG)
    return str(file)


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
            output, _ = process.communicate(timeout=120)
        except BaseException:
            process.terminate()
            raise
    return process.returncode, output


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.1)


def rows(run: Path) -> int:
    """Rounds that the run has reported."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def sha(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


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
