"""Runs on this machine, a few at a time, each with `launch.local`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType

from tqdm import tqdm

from fl_dist.common.words import duration
from fl_dist.config.sweeps import Cell
from fl_dist.machine.signals import HANDLED, REQUEUE
from launch.node import OWNED
from launch.status import so_far

LOOK = 1.0
"""Seconds between looks at the runs under way."""
ENDS = {0: "finished", REQUEUE: "interrupted"}


class Pool:
    def __init__(self, ranks: int) -> None:
        self.ranks, self.stopped = ranks, False
        self.active: dict[str, Cell] = {}
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, cell: Cell) -> int:
        """One run to its end; its output goes to logs/launch.log."""
        if self.stopped:
            return REQUEUE
        began = time.monotonic()
        (cell.run / "logs").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "launch.local", *cell.command, "--ranks", str(self.ranks)]
        with open(cell.run / "logs" / "launch.log", "wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | {OWNED: "1"}
            )
            self._running.append(process)
            self.active[cell.name] = cell
            if self.stopped:  # the signal came while the process was being started
                process.terminate()
            code = process.wait()
        del self.active[cell.name]
        score = so_far(cell.run)[1] if code == 0 else ""
        told = [ENDS.get(code, "failed"), *([score] if score else []), duration(time.monotonic() - began)]
        tqdm.write(f"{cell.name}: {', '.join(told)}", file=sys.stdout)
        sys.stdout.flush()
        return code

    def stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        for process in self._running:
            process.send_signal(number)


def run_here(cells: Sequence[Cell], ranks: int, at_once: int) -> int:
    """Exit code: 1 if a run failed, 75 if a signal ended the rest, 0 if all finished."""
    pool = Pool(ranks)
    old = {number: signal.signal(number, pool.stop) for number in HANDLED}
    try:
        with ThreadPoolExecutor(at_once) as threads, _Progress(cells) as progress:
            runs = [threads.submit(pool.run, cell) for cell in cells]
            while wait(runs, LOOK).not_done:
                progress.show(list(pool.active.values()))
        codes = [run.result() for run in runs]
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return 1 if set(codes) - {0, REQUEUE} else max(codes)


class _Progress:
    """A bar over the rounds of all runs, with those under way behind it; only if someone watches."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = cells
        self.bar = tqdm(
            total=sum(cell.rounds for cell in cells),
            initial=sum(so_far(cell.run)[0] for cell in cells),
            unit="round",
            leave=False,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )

    def show(self, active: Sequence[Cell]) -> None:
        if not self.bar.disable:
            self.bar.update(sum(so_far(cell.run)[0] for cell in self.cells) - self.bar.n)
            self.bar.set_postfix_str(", ".join(f"{c.name} {so_far(c.run)[1]}".strip() for c in active))

    def __enter__(self) -> "_Progress":
        tqdm.monitor_interval = 0  # no thread that watches over slow bars
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
