"""How the time of a round and of the start grows with clients, ranks and parameters, on this machine.

    python -m benchmarks.growth [clients|ranks|parameters ...] [--rounds N] [--turns N] [--most N]

Every row is the median of several runs, in processes of their own, read from their run folders. The rows take turns.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import TRAINING_ONLY, run_ranks, table_header, table_row, write_random_data

CLIENTS = (100, 1_000, 10_000, 100_000)
RANKS = (1, 2, 4, 8, 16, 32)
WIDTHS = {1_000_000: 972, 10_000_000: 3_131, 100_000_000: 9_968}
"""Units of both hidden layers of an MLP with 64 inputs and 10 outputs, by its parameters."""
ROWS = 200_000
"""Training rows of all clients: 100,000 clients have two each."""


def grow_clients(benchmark: "Benchmark") -> Iterator[str]:
    """10 clients per round out of more and more, in one process."""
    yield table_header("clients", "start beyond reading, s", "round, ms", "of it sampling, ms", "memory, GB")
    data = write_random_data(benchmark.folder / "rows.npz", ROWS, 1_000, (1, 8, 8))
    overrides = ["data=npz", f"data.path={data}", "model=mlp", "model.hidden=[32]", "partition=dirichlet"]
    overrides += ["clients.per_round=10", "local.epochs=1", "local.batch_size=2", "local.steps=1", "algorithm=fedgmt"]
    for total, result in benchmark.run_all(CLIENTS, lambda total: [*overrides, f"clients.total={total}"]):
        times = f"{result.start:.2f}", f"{1e3 * result.round:.1f}", f"{1e3 * time_sampling(total):.1f}"
        yield table_row(f"{total:,}", *times, result.memory)


def grow_ranks(benchmark: "Benchmark") -> Iterator[str]:
    """The same tiny model and 32 clients on more and more ranks."""
    yield table_header("ranks", "start, s", "round, ms", "broadcast and reduce, ms", "memory of a rank, GB")
    overrides = ["data=digits", "model=mlp", "model.hidden=[32]", "partition=iid", "clients.total=100"]
    overrides += ["clients.per_round=32", "local.epochs=1", "local.batch_size=full", "topology.server=shared"]
    for ranks, result in benchmark.run_all(RANKS, lambda _: overrides, lambda ranks: ranks):
        times = f"{result.start:.2f}", f"{1e3 * result.round:.1f}", f"{1e3 * result.messages:.1f}"
        yield table_row(ranks, *times, result.memory)


def grow_parameters(benchmark: "Benchmark") -> Iterator[str]:
    """An MLP of growing width, one step of 2 clients per round."""
    yield table_header("parameters", "start, s", "round, s", "round, ns a parameter", "memory, GB", "bytes a parameter")
    overrides = ["data=digits", "model=mlp", "partition=iid", "clients.total=10", "clients.per_round=2"]
    overrides += ["local.batch_size=10", "local.steps=1"]
    sizes = benchmark.run_all(tuple(WIDTHS), lambda n: [*overrides, f"model.hidden=[{WIDTHS[n]},{WIDTHS[n]}]"])
    for parameters, result in sizes:
        times = f"{result.start:.2f}", f"{result.round:.3f}", f"{1e9 * result.round / parameters:.1f}"
        yield table_row(f"{parameters:,}", *times, result.memory, f"{result.bytes / parameters:.0f}")


class Result:
    """Medians over runs."""

    def __init__(self, starts: Sequence[float], runs: Sequence[list[dict[str, Any]]]) -> None:
        """`starts`: when each run started, plus its time to read the data."""
        first_rounds = [first["time"] - first["seconds"]["total"] for first, *_ in runs]
        self.start = statistics.median(first - start for first, start in zip(first_rounds, starts, strict=True))
        """Seconds from the call to the first round, without reading the data."""
        rows = [row for _, *rest in runs for row in rest]
        self.round = statistics.median(row["seconds"]["total"] for row in rows)
        self.messages = statistics.median(row["seconds"]["broadcast"] + row["seconds"]["reduce"] for row in rows)
        self.bytes = max(rank["memory"] for row in rows for rank in row["workers"].values())
        self.memory = f"{self.bytes / 1e9:.2f}"


@dataclass
class Benchmark:
    folder: Path
    rounds: int
    turns: int
    max_size: int

    def run_all(
        self, sizes: Sequence[int], overrides: Callable[[int], Sequence[str]], ranks: Callable[[int], int] = lambda _: 1
    ) -> Iterator[tuple[int, Result]]:
        """Every size in each turn."""
        sizes = [size for size in sizes if size <= self.max_size]
        turns = [
            [self._run(f"{size}-{turn}", overrides(size), ranks(size)) for size in sizes] for turn in range(self.turns)
        ]
        for size, runs in zip(sizes, zip(*turns, strict=True), strict=True):
            yield size, Result(*zip(*runs, strict=True))

    def _run(self, name: str, overrides: Sequence[str], ranks: int) -> tuple[float, list[dict[str, Any]]]:
        """When the run started, plus its time to read the data; its rows."""
        run, times = self.folder / name, self.folder / f"{name}.json"
        arguments = [*overrides, *TRAINING_ONLY, f"rounds={self.rounds + 1}", f"run.dir={run}"]
        arguments.append("monitor.wandb.mode=disabled")
        code = run_ranks("benchmarks.growth", ["--times", str(times), *arguments], ranks)
        if code:
            raise SystemExit(f"a run of benchmarks.growth ended with {code}: {' '.join(arguments)}")
        rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
        return sum(json.loads(times.read_text())), rows


def run_rank(times: Path, overrides: Sequence[str]) -> None:
    """One rank of a run. The last rank writes when it started, with torch imported, and its time to read the data."""
    import fl_dist
    from fl_dist.config import load
    from fl_dist.federation.client_rows import build_data

    config = load(None, list(overrides))
    before = time.time()
    build_data(config)
    start = time.time()
    times.write_text(json.dumps([start, start - before]))
    fl_dist.run(config.model_dump(), quiet=True)


def time_sampling(total: int) -> float:
    """Seconds to sample 10 of the clients."""
    from fl_dist.config import Clients
    from fl_dist.federation.sampling import sample_cohort

    clients, seconds = Clients(total=total, per_round=10), []
    for index in range(50):
        start = time.perf_counter()
        sample_cohort(clients, None, 0, index)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


KINDS = {"clients": grow_clients, "ranks": grow_ranks, "parameters": grow_parameters}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--rounds", type=int, default=10, help="of each run (default 10)")
    parser.add_argument("--turns", type=int, default=5, help="runs of each row (default 5)")
    parser.add_argument("--most", type=int, default=10**9, help="largest number of clients, ranks or parameters")
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.times is not None:
        run_rank(arguments.times, arguments.kinds)
        return 0
    if unknown := set(arguments.kinds) - KINDS.keys():
        parser.error(f"no kind {', '.join(sorted(unknown))}; valid: {', '.join(KINDS)}")
    for kind in arguments.kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            for row in KINDS[kind](Benchmark(Path(folder), arguments.rounds, arguments.turns, arguments.most)):
                print(row, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
