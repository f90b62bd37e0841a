"""Output of programs of the system, files of the kernel and repeated timing: what checks read."""

import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

TOOL_TIMEOUT_SECONDS = 10.0


def run_tool(*command: str) -> str:
    """What a program prints; empty if there is none of that name, or it fails or hangs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
        return result.stdout.strip() if result.returncode == 0 else ""
    return ""


def read_system_file(path: str | Path) -> str:
    """The text of a file below /proc or /sys; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return Path(path).read_text().strip()
    return ""


def median_seconds(call: Callable[[], object], synchronize: Callable[[], None], repeats: int) -> float:
    """Of one call, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
