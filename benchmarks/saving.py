"""What a save costs as the number of clients with variables grows: 100 clients change each time.

python -m benchmarks.saving
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fl_dist.config import Topology
from fl_dist.machine.comm import Alone
from fl_dist.storage.saver import BATCH, RECENT, SLACK, Chief, Saver

TOTALS, CHANGED, SAVES, PARAMETERS = (200, 2_000, 20_000), 100, 100, 10_000


class Bench:
    """A run of so many clients, in which all have been saved often enough for packs to be cleaned up."""

    def __init__(self, root: Path, total: int) -> None:
        self.total, self.round = total, 0
        self.saver = Saver(root, Alone(Topology(device="cpu")), "run")
        self.saver.chief = Chief(root, "run", 2, None, lambda: None)
        self.rng = np.random.default_rng(0)
        for _ in range(SLACK * total // CHANGED + RECENT + BATCH):
            self.sample()

    def save(self, clients: list[int]) -> float:
        self.round += 1
        states = {c: {"h": torch.full((PARAMETERS,), float(self.round))} for c in clients}
        began = time.perf_counter()
        self.saver.start(self.round, states, {"x": torch.zeros(PARAMETERS)}, {"rows": []})
        self.saver.join()
        return time.perf_counter() - began

    def sample(self) -> float:
        return self.save(self.rng.choice(self.total, CHANGED, replace=False).tolist())


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        benches = {total: Bench(Path(place) / str(total), total) for total in TOTALS}
        times: dict[int, list[float]] = {total: [] for total in TOTALS}
        for _ in range(SAVES):  # in turn, so that a noisy machine is noisy for all
            for total, bench in benches.items():
                times[total].append(bench.sample())
        first = statistics.fmean(times[TOTALS[0]])
        print(f"clients  save, ms  ratio   ({CHANGED} of {PARAMETERS:,} parameters change; means of {SAVES} saves)")
        for total, seconds in times.items():
            mean = statistics.fmean(seconds)
            print(f"{total:7,}  {1000 * mean:8.1f}  {mean / first:5.2f}")


if __name__ == "__main__":
    main()
