"""Runs on this machine, a few at a time, each with `launch.local`."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType

from fl_dist.callbacks.always_on.console import round_bar, write_line
from fl_dist.common.formatting import format_duration
from fl_dist.config.sweeps import SweepRun
from fl_dist.distributed.signals import EXIT_REQUEUE, handle_signals
from launch.node import CHILD_LAUNCHER
from launch.run_status import read_progress

PROGRESS_INTERVAL_SECONDS = 1.0
OUTCOMES = {0: "finished", EXIT_REQUEUE: "interrupted"}


class Pool:
    def __init__(self, ranks: int) -> None:
        self.ranks, self.is_stopping = ranks, False
        self.active: dict[str, SweepRun] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, run: SweepRun) -> int:
        """Run to the end; the output goes to logs/launch.log."""
        if self.is_stopping:
            return EXIT_REQUEUE
        start = time.monotonic()
        (run.run / "logs").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "launch.local", *run.command, "--ranks", str(self.ranks)]
        env = os.environ | {CHILD_LAUNCHER: "1"}
        with open(run.run / "logs" / "launch.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env)
            self._processes.append(process)
            self.active[run.name] = run
            if self.is_stopping:  # the signal came while the process was being started
                process.terminate()
            code = process.wait()
        del self.active[run.name]
        score = read_progress(run.run)[1] if code == 0 else ""
        outcome = [OUTCOMES.get(code, "failed"), *([score] if score else []), format_duration(time.monotonic() - start)]
        write_line(f"{run.name}: {', '.join(outcome)}")
        return code

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: pass the signal to all runs and start no more."""
        self.is_stopping = True
        for process in self._processes:
            process.send_signal(number)


def run_locally(runs: Sequence[SweepRun], ranks: int, max_parallel: int) -> int:
    """Exit code: 1 if a run failed, 75 if a signal ended the rest, 0 if all finished."""
    pool, total = Pool(ranks), sum(run.rounds for run in runs)
    with handle_signals(pool.stop, is_stopping=lambda: pool.is_stopping):
        with ThreadPoolExecutor(max_parallel) as threads, round_bar(total, _completed_rounds(runs)) as bar:
            futures = [threads.submit(pool.run, run) for run in runs]
            while wait(futures, PROGRESS_INTERVAL_SECONDS).not_done:
                if not bar.disable:
                    bar.update(_completed_rounds(runs) - bar.n)
                    active = [f"{run.name} {read_progress(run.run)[1]}" for run in list(pool.active.values())]
                    bar.set_postfix_str(", ".join(map(str.strip, active)))
        codes = [future.result() for future in futures]
    return 1 if set(codes) - {0, EXIT_REQUEUE} else max(codes)


def _completed_rounds(runs: Sequence[SweepRun]) -> int:
    return sum(read_progress(run.run)[0] for run in runs)
