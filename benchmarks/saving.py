"""The time of a save as the number of clients with state grows: 100 clients change each time.

python -m benchmarks.saving
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fl_dist.config import Topology
from fl_dist.distributed.process_group import single_process_group
from fl_dist.storage.checkpoint_manager import (
    COMPACTION_INTERVAL,
    ENTRIES_PER_CLIENT,
    EXTRA_CHECKPOINTS,
    CheckpointManager,
)
from fl_dist.storage.checkpoint_writer import CheckpointWriter

TOTALS, CHANGED, SAVES, PARAMETERS = (200, 2_000, 20_000), 100, 100, 10_000


class Run:
    """A run of so many clients, all saved often enough for packs to be cleaned up."""

    def __init__(self, root: Path, total: int) -> None:
        self.total, self.round = total, 0
        manager = CheckpointManager(root, "run", 2, None, lambda: None)
        self.checkpoint_writer = CheckpointWriter(root, single_process_group(Topology(device="cpu")), "run", manager)
        self.rng = np.random.default_rng(0)
        for _ in range(ENTRIES_PER_CLIENT * total // CHANGED + EXTRA_CHECKPOINTS + COMPACTION_INTERVAL):
            self.save_random_clients()

    def save(self, clients: list[int]) -> float:
        self.round += 1
        states = {c: {"h": torch.full((PARAMETERS,), float(self.round))} for c in clients}
        start = time.perf_counter()
        self.checkpoint_writer.start(self.round, states, {"x": torch.zeros(PARAMETERS)}, {"rows": []})
        self.checkpoint_writer.join()
        return time.perf_counter() - start

    def save_random_clients(self) -> float:
        return self.save(self.rng.choice(self.total, CHANGED, replace=False).tolist())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = {total: Run(Path(folder) / str(total), total) for total in TOTALS}
        times: dict[int, list[float]] = {total: [] for total in TOTALS}
        for _ in range(SAVES):  # in turn, so that noise affects all alike
            for total, run in runs.items():
                times[total].append(run.save_random_clients())
        first = statistics.fmean(times[TOTALS[0]])
        print(f"clients  save, ms  ratio   ({CHANGED} of {PARAMETERS:,} parameters change; means of {SAVES} saves)")
        for total, seconds in times.items():
            mean = statistics.fmean(seconds)
            print(f"{total:7,}  {1000 * mean:8.1f}  {mean / first:5.2f}")


if __name__ == "__main__":
    main()
