"""Check the model of benchmarks.scaling on this machine: predicted and measured rounds of 1 to 4 workers.

Its costs are measured apart from the rounds that they predict: a client and a server step in one process, the same
with every core busy, and plain broadcasts and reduces of gloo between three ranks.
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

from benchmarks import common
from benchmarks.scaling import FLOAT32_BYTES, INT64_BYTES, Assumptions, count_vectors, simulate_schedule
from fl_dist.config import Topology
from fl_dist.distributed.process_group import ProcessGroup, single_process_group
from fl_dist.metrics.file import read_records
from fl_dist.storage.run_folder import METRICS

WORKERS = (1, 2, 3, 4)
CLIENTS, STEPS, ROUNDS, REPEATS = 12, 4, 10, 7
OVERRIDES = (
    *("model=mlp", "model.hidden=[512]", "algorithm=fedavg", "partition=iid", "local.batch_size=50", "data=npz"),
    *(f"clients.total={CLIENTS}", f"clients.per_round={CLIENTS}", f"local.steps={STEPS}", *common.TRAINING_ONLY),
)
DATA = "rows.npz"


@dataclass(frozen=True)
class Costs:
    """Seconds, and bytes per second, as measured here."""

    parameters: int
    client: float
    busy_client: float
    """A client's seconds while every core trains one."""
    server: float
    cores: int
    latency: float
    broadcast_bandwidth: float
    reduce_bandwidth: float
    """Of gloo."""


def broadcast_seconds(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Gloo's broadcast is a tree: each rank that has the message passes it on whole."""
    return math.ceil(math.log2(ranks)) * (latency + size / bandwidth)


def reduce_seconds(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Gloo's reduce is a ring: shares of the sum go around once, and then to rank 0."""
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def predict_seconds(c: Costs, workers: int) -> float:
    """Seconds of a round. Workers share the cores; the server waits while they train."""
    vectors = count_vectors("fedavg")
    a = Assumptions(c.parameters, CLIENTS, CLIENTS, STEPS, c.client, vectors, c.broadcast_bandwidth, c.latency)
    client = c.client if workers == 1 else c.busy_client * max(1.0, workers / c.cores)
    messages = broadcast_seconds(FLOAT32_BYTES * c.parameters, workers + 1, c.broadcast_bandwidth, c.latency)
    messages += reduce_seconds(INT64_BYTES * c.parameters, workers + 1, c.reduce_bandwidth, c.latency)
    return simulate_schedule(a, workers)[0] * client + messages + c.server


def check() -> Iterator[str]:
    """A table of predicted and measured rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common.write_random_data(folder / DATA, CLIENTS * 50 * STEPS, 100, (3, 32, 32))
        c = Costs(**run_measurement("pieces", folder, 1 + min(2, os.cpu_count() or 1)))
        yield (
            f"Here: {c.parameters:,} parameters, {CLIENTS} clients of {STEPS} steps per round; a client takes"
            f" {1e3 * c.client:.1f} ms, {1e3 * c.busy_client:.1f} ms with {c.cores} at once, the server step"
            f" {1e3 * c.server:.1f} ms; gloo {c.broadcast_bandwidth / 1e9:.2f} GB/s down,"
            f" {c.reduce_bandwidth / 1e9:.2f} GB/s up, {1e6 * c.latency:.0f} us.\n"
        )
        yield common.table_header("W", "predicted, ms", "measured, ms", "error")
        for workers in WORKERS:
            predicted = predict_seconds(c, workers)
            measured = run_measurement("rounds", folder, 1 + workers)["seconds"]
            error = f"{predicted / measured - 1:+.0%}"
            yield common.table_row(workers, f"{1e3 * predicted:.1f}", f"{1e3 * measured:.1f}", error)


def run_measurement(name: str, folder: Path, ranks: int) -> dict[str, Any]:
    code = common.run_ranks("benchmarks.calibrate", [name, str(folder)], ranks)
    if code:
        raise SystemExit(f"benchmarks.calibrate {name} ended with {code} on {ranks} ranks")
    return json.loads((folder / "result.json").read_text())


def measure_rounds(group: ProcessGroup, folder: Path) -> dict[str, float]:
    rounds = common.Rounds([*OVERRIDES, f"data.path={folder / DATA}"], folder / f"{group.size}-ranks", group)
    common.time_rounds(rounds, 2)
    return {"seconds": statistics.median(common.time_rounds(rounds, 1) for _ in range(ROUNDS))}


def measure_costs(group: ProcessGroup, folder: Path) -> dict[str, float]:
    """Rank 0 is idle, so that each of the others has a core."""
    run = folder / f"alone-{group.rank}"
    rounds = common.Rounds(
        [*OVERRIDES, f"data.path={folder / DATA}"], run, single_process_group(Topology(device="cpu"))
    )
    alone, busy, server = [], [], []
    for _ in range(REPEATS):
        alone.append(common.time_rounds(rounds if group.rank == 1 else common.Workload(), 1))
        busy.append(common.time_rounds(rounds if group.rank else common.Workload(), 1))
    if group.rank == 1:
        server = [record.seconds.server for record in read_records(run / METRICS)]
    gathered: list[list[float]] = [[]] * group.size
    dist.all_gather_object(gathered, server)
    parameters, server_step = rounds.experiment.model.count, statistics.median(gathered[1])
    client, busy_client = ((statistics.median(seconds) - server_step) / CLIENTS for seconds in (alone, busy))
    gloo = measure_gloo(parameters, group.size)
    return asdict(Costs(parameters, client, busy_client, server_step, len(group.workers), *gloo))


def measure_gloo(parameters: int, ranks: int) -> tuple[float, float, float]:
    """Seconds per hop, and bytes per second of broadcasts and reduces of a model's size."""
    tiny, down, up = torch.zeros(1), torch.zeros(parameters), torch.zeros(parameters, dtype=torch.int64)
    latency = time_collective(lambda: dist.broadcast(tiny, src=0)) / broadcast_seconds(0, ranks, 1, 1)
    broadcast = time_collective(lambda: dist.broadcast(down, src=0)) / broadcast_seconds(down.nbytes, ranks, 1, 0)
    reduce = time_collective(lambda: dist.reduce(up, dst=0)) / reduce_seconds(up.nbytes, ranks, 1, 0)
    return latency, 1 / broadcast, 1 / reduce


def time_collective(call: Callable[[], object]) -> float:
    """Seconds until all ranks are done."""
    seconds = []
    for _ in range(4 * REPEATS):
        dist.barrier()
        start = time.perf_counter()
        call()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    measurements = {"pieces": measure_costs, "rounds": measure_rounds}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurement", choices=measurements)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group = common.connect_rank()
    result = measurements[arguments.measurement](group, arguments.folder)
    if group.rank == 0:
        (arguments.folder / "result.json").write_text(json.dumps(result))
    group.close()


if __name__ == "__main__":
    main()
