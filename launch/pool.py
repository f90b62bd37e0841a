"""Runs on this machine, a few at a time, each with `launch.local`."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from fl_dist.machine.signals import HANDLED, REQUEUE
from launch.node import OWNED

Run = tuple[str, Path, list[str]]
"""Name, folder, arguments."""


class Pool:
    def __init__(self, ranks: int) -> None:
        self.ranks, self.stopped = ranks, False
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, run: Run) -> int:
        """One run to its end; its output goes to logs/launch.log."""
        name, folder, arguments = run
        if self.stopped:
            return REQUEUE
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "launch.local", *arguments, "--ranks", str(self.ranks)]
        with open(folder / "logs" / "launch.log", "wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | {OWNED: "1"}
            )
            self._running.append(process)
            if self.stopped:  # the signal came while the process was being started
                process.terminate()
            code = process.wait()
        print(f"{name}: {'finished' if code == 0 else 'interrupted' if code == REQUEUE else 'failed'}", flush=True)
        return code

    def stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        for process in self._running:
            process.send_signal(number)


def run_here(runs: Sequence[Run], ranks: int, at_once: int) -> int:
    """Exit code: 1 if a run failed, 75 if a signal ended the rest, 0 if all finished."""
    pool = Pool(ranks)
    old = {number: signal.signal(number, pool.stop) for number in HANDLED}
    try:
        with ThreadPoolExecutor(at_once) as threads:
            codes = list(threads.map(pool.run, runs))
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return 1 if set(codes) - {0, REQUEUE} else max(codes)
