"""The model of benchmarks.scaling on this machine: what its pieces take, and rounds of 1 to 4 workers beside it.

The pieces are measured apart from the rounds that they predict: a client and a server step in one process, the same
with every core at it, and bare broadcasts and reduces of gloo between three ranks.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import QUIET, Engine, head, join, launch, line, median, noise, timed
from benchmarks.scaling import SUM, WORD, Assumptions, planned, vectors_of
from fl_dist.config import Topology
from fl_dist.machine.comm import Alone, Comm

WORKERS = (1, 2, 3, 4)
CLIENTS, STEPS, ROUNDS, REPEATS = 12, 4, 5, 7
WORDS = (
    *("model=mlp", "model.hidden=[512]", "algorithm=fedavg", "partition=iid", "local.batch_size=50"),
    *(f"clients.total={CLIENTS}", f"clients.per_round={CLIENTS}", f"local.steps={STEPS}", *QUIET),
)
ROWS = "rows.npz"


@dataclass(frozen=True)
class Pieces:
    """Seconds and bytes a second, as measured here."""

    parameters: int
    client: float
    crowded: float
    """A client's seconds while every core trains one."""
    server: float
    cores: int
    latency: float
    down: float
    up: float
    """Bytes a second of gloo's broadcast and reduce."""


def tree(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Gloo's broadcast: who has it passes it on whole."""
    return math.ceil(math.log2(ranks)) * (latency + size / bandwidth)


def ring(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Gloo's reduce: shares of the sum go once around, and then to rank 0."""
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def predicted(p: Pieces, workers: int) -> float:
    """Seconds of a round. Workers share the cores; the server waits while they train."""
    a = Assumptions(p.parameters, CLIENTS, CLIENTS, STEPS, p.client, vectors_of("fedavg"), p.down, p.latency)
    client = p.client if workers == 1 else p.crowded * max(1.0, workers / p.cores)
    sent = tree(WORD * p.parameters, workers + 1, p.down, p.latency)
    sent += ring(SUM * p.parameters, workers + 1, p.up, p.latency)
    return planned(a, workers)[0] * client + sent + p.server


def check() -> Iterator[str]:
    """A table of rounds, predicted and measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        noise(folder / ROWS, CLIENTS * 50 * STEPS, 100, (3, 32, 32))
        cores = min(2, os.cpu_count() or 1)
        pieces = Pieces(**start("pieces", folder, 1 + cores))
        yield (
            f"Here: {pieces.parameters:,} parameters, {CLIENTS} clients of {STEPS} steps a round; a client takes"
            f" {1e3 * pieces.client:.1f} ms, {1e3 * pieces.crowded:.1f} ms with {pieces.cores} at once, the server step"
            f" {1e3 * pieces.server:.1f} ms; gloo {pieces.down / 1e9:.2f} GB/s down, {pieces.up / 1e9:.2f} GB/s up,"
            f" {1e6 * pieces.latency:.0f} us.\n"
        )
        yield head("W", "predicted, ms", "measured, ms", "error")
        for workers in WORKERS:
            ours, real = predicted(pieces, workers), start("rounds", folder, 1 + workers)["seconds"]
            yield line(workers, f"{1e3 * ours:.1f}", f"{1e3 * real:.1f}", f"{ours / real - 1:+.0%}")


def start(what: str, folder: Path, ranks: int) -> dict[str, Any]:
    code = launch("benchmarks.calibrate", [what, str(folder)], ranks)
    if code:
        raise SystemExit(f"benchmarks.calibrate {what} ended with {code} on {ranks} ranks")
    return json.loads((folder / "result.json").read_text())


def rounds(comm: Comm, folder: Path) -> dict[str, float]:
    engine = Engine([*WORDS, "data=npz", f"data.path={folder / ROWS}"], folder / f"{comm.size}-ranks", comm)
    timed(engine, 2)
    return {"seconds": median([timed(engine, 1) for _ in range(ROUNDS * 2)]) / 1e3}


def pieces(comm: Comm, folder: Path) -> dict[str, float]:
    """Rank 0 only watches, so that the others have a core each."""
    own = folder / f"alone-{comm.rank}"
    engine = Engine([*WORDS, "data=npz", f"data.path={folder / ROWS}"], own, Alone(Topology(device="cpu")))
    alone, crowded, server = [], [], []
    for _ in range(REPEATS):
        alone.append(timed(engine if comm.rank == 1 else Idle(), 1))
        crowded.append(timed(engine if comm.rank else Idle(), 1))
    if comm.rank == 1:
        rows = [json.loads(row) for row in (own / "metrics.jsonl").read_text().splitlines()]
        server = [row["seconds"]["server"] for row in rows]
    shared: list[list[float]] = [[]] * comm.size
    dist.all_gather_object(shared, server)
    parameters, step = engine.world.model.count, statistics.median(shared[1])
    latency, down, up = gloo(parameters, comm.size)
    client, busy = ((median(seconds) / 1e3 - step) / CLIENTS for seconds in (alone, crowded))
    return asdict(Pieces(parameters, client, busy, step, len(comm.workers), latency, down, up))


class Idle:
    """A rank that only waits for the others."""

    def __call__(self, rounds: int) -> None:
        pass

    def settle(self) -> None:
        pass


def gloo(parameters: int, ranks: int) -> tuple[float, float, float]:
    """Seconds of a hop, and bytes a second of broadcasts and reduces of a model's size."""
    tiny, down, up = torch.zeros(1), torch.zeros(parameters), torch.zeros(parameters, dtype=torch.int64)
    latency = each(lambda: dist.broadcast(tiny, src=0)) / tree(0, ranks, 1, 1)
    per_byte = each(lambda: dist.broadcast(down, src=0)) / tree(down.nbytes, ranks, 1, 0)
    per_sum = each(lambda: dist.reduce(up, dst=0)) / ring(up.nbytes, ranks, 1, 0)
    return latency, 1 / per_byte, 1 / per_sum


def each(call: Callable[[], object]) -> float:
    """Seconds until all ranks are done."""
    seconds = []
    for _ in range(4 * REPEATS):
        dist.barrier()
        began = time.perf_counter()
        call()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["pieces", "rounds"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    comm = join()
    result = {"pieces": pieces, "rounds": rounds}[given.what](comm, given.folder)
    if comm.rank == 0:
        (given.folder / "result.json").write_text(json.dumps(result))
    comm.close()


if __name__ == "__main__":
    main()
