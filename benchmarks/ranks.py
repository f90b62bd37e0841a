"""What the benchmarks share: ranks on this machine, sessions of the engine in them, sides that take turns, tables."""

import contextlib
import io
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from fl_dist.config import load
from fl_dist.engine.train import Session
from fl_dist.engine.world import World
from fl_dist.execute import settings
from fl_dist.machine.comm import Comm, connect
from fl_dist.machine.memory import keep_freed
from fl_dist.machine.place import find
from fl_dist.machine.signals import StopRequest
from fl_dist.storage.folder import RunFolder

NEVER = 10**6
QUIET = ("checkpoint.every=0", f"evaluate.every={NEVER}")
"""Neither saves nor evaluation."""


def launch(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Run the module as so many ranks of one thread, or as a process that is no rank for 1; the worst exit code."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = []
    for rank in range(ranks):
        place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = (place if ranks > 1 else {}) | {"OMP_NUM_THREADS": 1}
        command = [sys.executable, "-m", module, *arguments]
        started.append(subprocess.Popen(command, env=os.environ | {k: str(v) for k, v in env.items()}))
    try:
        return max(abs(process.wait()) for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def join() -> Comm:
    """This process among the ranks, or alone; set up as that of a run."""
    keep_freed()
    basis = load(None, [])
    return connect(find(), basis.topology, basis.comm, StopRequest(0.0))


class Side(Protocol):
    """One of several things that are compared: so many rounds of it."""

    def __call__(self, rounds: int) -> None: ...
    def settle(self) -> None:
        """Let nothing of it go on beside the others."""


class Engine:
    """Rounds as a run has them, without their end."""

    def __init__(self, words: Sequence[str], folder: Path, comm: Comm) -> None:
        fixed = ["monitor.wandb.mode=disabled", f"rounds={NEVER}", f"run.dir={folder}"]
        self.words = [*words, *fixed]
        config, run = load(None, self.words), RunFolder(folder)
        if comm.rank == 0:
            run.claim(config)
        self.world = World(config, comm.device)
        self.session = Session(self.world, comm, run, None, StopRequest(0.0))
        self.done = 0

    def __call__(self, rounds: int) -> None:
        for _ in range(rounds):
            self.session.round(self.done)
            self.done += 1

    def settle(self) -> None:
        self.session.saver.join()

    @property
    def saves(self) -> float:
        """A round, on rank 0: one that is still being written lets the next pass."""
        chief = self.session.saver.chief
        return 0.0 if chief is None else chief.made / max(1, self.done)


def turns(sides: Mapping[str, Side], repeats: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a round of each side, in turns that each begin with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(repeats):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(timed(sides[name], rounds))
    return seconds


def timed(side: Side, rounds: int) -> float:
    """Seconds a round, until all ranks are done; the engine computes under its own settings, as in a run."""
    under: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    with (
        settings(side.world.config) if isinstance(side, Engine) else under(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        _meet()
        began = time.perf_counter()
        side(rounds)
        _meet()
        took = time.perf_counter() - began
        side.settle()
    return took / rounds


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def median(seconds: Sequence[float]) -> float:
    """In milliseconds."""
    return 1000 * statistics.median(seconds)


def noise(path: Path, train: int, test: int, shape: tuple[int, ...], classes: int = 10) -> Path:
    """A data set of noise: how long a step takes does not depend on what the rows show."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, rows in (("train", train), ("test", test)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (rows, *shape), dtype=np.uint8)
        arrays[f"y_{part}"] = rng.integers(0, classes, rows)
    np.savez(path, **arrays)
    return path


def line(*cells: object) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> str:
    return "\n".join([line(*cells), line("---", *["---:"] * (len(cells) - 1))])
