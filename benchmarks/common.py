"""Shared by the benchmarks: ranks on this machine, workloads that are timed in turns, tables."""

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
from typing import Any

import numpy as np
import torch.distributed as dist

from fl_dist.config import load
from fl_dist.distributed.memory import keep_freed_memory
from fl_dist.distributed.process_group import ProcessGroup, connect
from fl_dist.distributed.rank_info import find_rank
from fl_dist.distributed.signals import StopRequest
from fl_dist.distributed.torch_settings import torch_settings
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.train import TrainingLoop
from fl_dist.storage.run_folder import RunFolder

NEVER = 10**6
TRAINING_ONLY = ("checkpoint.every=0", f"evaluate.every={NEVER}")
"""Overrides for neither saves nor evaluation."""


def run_ranks(module: str, arguments: Sequence[str], ranks: int) -> int:
    """Run the module as so many ranks of one thread, or as one process that is no rank; the worst exit code."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(ranks):
        variables: dict[str, object] = {"OMP_NUM_THREADS": 1}
        if ranks > 1:
            variables |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = os.environ | {key: str(value) for key, value in variables.items()}
        processes.append(subprocess.Popen([sys.executable, "-m", module, *arguments], env=env))
    try:
        return max(abs(process.wait()) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def connect_rank() -> ProcessGroup:
    """Connect this process to the other ranks, if any, with the settings of a run."""
    keep_freed_memory()
    config = load(None, [])
    return connect(find_rank(), config.topology, config.comm, StopRequest(0.0))


class Workload:
    """One of several things that are compared; this one does nothing."""

    settings: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def run(self, rounds: int) -> None:
        pass

    def flush(self) -> None:
        """Wait until nothing of it runs in the background."""


class Rounds(Workload):
    """Rounds as in a run, without its end."""

    def __init__(self, overrides: Sequence[str], folder: Path, group: ProcessGroup) -> None:
        self.overrides = [*overrides, "monitor.wandb.mode=disabled", f"rounds={NEVER}", f"run.dir={folder}"]
        config, run = load(None, self.overrides), RunFolder(folder)
        if group.rank == 0:
            run.acquire(config)
        self.settings = lambda: torch_settings(config)
        self.experiment = Experiment(config, group.device, group)
        self.loop = TrainingLoop(self.experiment, group, run, None, StopRequest(0.0))
        self.completed = 0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.loop.run_round(self.completed)
            self.completed += 1

    def flush(self) -> None:
        self.loop.writer.join()

    @property
    def saves_per_round(self) -> float:
        """On rank 0; a save is skipped while the previous one is being written."""
        manager = self.loop.writer.manager
        return 0.0 if manager is None else manager.committed_count / max(1, self.completed)


def time_in_turns(workloads: Mapping[str, Workload], repeats: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per round of each workload; each turn starts with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in workloads}
    names = list(workloads)
    for index in range(repeats):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(time_rounds(workloads[name], rounds))
    return seconds


def time_rounds(workload: Workload, rounds: int) -> float:
    """Seconds per round, until all ranks are done."""
    with workload.settings(), contextlib.redirect_stdout(io.StringIO()):
        _barrier()
        start = time.perf_counter()
        workload.run(rounds)
        _barrier()
        seconds = time.perf_counter() - start
        workload.flush()
    return seconds / rounds


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def median_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


def write_random_data(path: Path, train: int, test: int, shape: tuple[int, ...], classes: int = 10) -> Path:
    """A data set of noise: the time of a step does not depend on what the rows show."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, rows in (("train", train), ("test", test)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (rows, *shape), dtype=np.uint8)
        arrays[f"y_{split}"] = rng.integers(0, classes, rows)
    np.savez(path, **arrays)
    return path


def table_row(*cells: object) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_header(*cells: str) -> str:
    return "\n".join([table_row(*cells), table_row("---", *["---:"] * (len(cells) - 1))])
