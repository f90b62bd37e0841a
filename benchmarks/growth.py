"""How the time of a round and of the start grows with clients, ranks and parameters, on this machine.

    python -m benchmarks.growth [clients|ranks|parameters ...] [--rounds N] [--turns N] [--most N]

Every row is the median of runs of its own, in processes of their own, read from their run folders. The rows take turns.
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

from benchmarks.ranks import QUIET, head, launch, line, noise

CLIENTS = (100, 1_000, 10_000, 100_000)
RANKS = (1, 2, 4, 8, 16, 32)
WIDTHS = {1_000_000: 972, 10_000_000: 3_131, 100_000_000: 9_968}
"""Units of both hidden layers of an MLP of 64 inputs and 10 outputs, by its parameters."""
ROWS = 200_000
"""Training rows to be divided: at 100,000 clients two each."""


def by_clients(run: "Run", most: int) -> Iterator[str]:
    """10 of ever more clients a round, in one process."""
    yield head("clients", "start beyond reading, s", "round, ms", "of it sampling, ms", "memory, GB")
    data = noise(run.folder / "rows.npz", ROWS, 1_000, (1, 8, 8))
    words = ["data=npz", f"data.path={data}", "model=mlp", "model.hidden=[32]", "partition=dirichlet"]
    words += ["clients.per_round=10", "local.epochs=1", "local.batch_size=2", "local.steps=1", "algorithm=fedgmt"]
    totals = [total for total in CLIENTS if total <= most]
    for total, ran in run.each(totals, lambda total: [*words, f"clients.total={total}"]):
        sampling = sampling_of(total)
        yield line(f"{total:,}", f"{ran.start:.2f}", f"{1e3 * ran.round:.1f}", f"{1e3 * sampling:.1f}", ran.memory)


def by_ranks(run: "Run", most: int) -> Iterator[str]:
    """The same tiny model and 32 clients on ever more ranks."""
    yield head("ranks", "start, s", "round, ms", "broadcast and reduce, ms", "memory of a rank, GB")
    words = ["data=digits", "model=mlp", "model.hidden=[32]", "partition=iid", "clients.total=100"]
    words += ["clients.per_round=32", "local.epochs=1", "local.batch_size=full", "topology.server=shared"]
    for ranks, ran in run.each([ranks for ranks in RANKS if ranks <= most], lambda _: words, lambda ranks: ranks):
        yield line(ranks, f"{ran.start:.2f}", f"{1e3 * ran.round:.1f}", f"{1e3 * ran.messages:.1f}", ran.memory)


def by_parameters(run: "Run", most: int) -> Iterator[str]:
    """An MLP of ever greater width, one step of 2 clients each round."""
    yield head("parameters", "start, s", "round, s", "round, ns a parameter", "memory, GB", "bytes a parameter")
    words = ["data=digits", "model=mlp", "partition=iid", "clients.total=10", "clients.per_round=2"]
    words += ["local.batch_size=10", "local.steps=1"]
    sizes = [parameters for parameters in WIDTHS if parameters <= most]
    for parameters, ran in run.each(sizes, lambda n: [*words, f"model.hidden=[{WIDTHS[n]},{WIDTHS[n]}]"]):
        a_parameter = f"{1e9 * ran.round / parameters:.1f}", ran.memory, f"{ran.bytes / parameters:.0f}"
        yield line(f"{parameters:,}", f"{ran.start:.2f}", f"{ran.round:.3f}", *a_parameter)


class Ran:
    """What runs say of themselves; medians."""

    def __init__(self, starts: Sequence[float], runs: Sequence[list[dict[str, Any]]]) -> None:
        """`starts`: when each began, and what it took to read the data."""
        begun = [first["time"] - first["seconds"]["total"] for first, *_ in runs]
        self.start = statistics.median(there - start for there, start in zip(begun, starts, strict=True))
        """Seconds from the call to the first round, without those for reading the data."""
        rows = [row for _, *rest in runs for row in rest]
        self.round = statistics.median(row["seconds"]["total"] for row in rows)
        self.messages = statistics.median(row["seconds"]["broadcast"] + row["seconds"]["reduce"] for row in rows)
        self.bytes = max(rank["memory"] for row in rows for rank in row["workers"].values())
        self.memory = f"{self.bytes / 1e9:.2f}"


@dataclass
class Run:
    folder: Path
    rounds: int
    turns: int

    def each(
        self, sizes: Sequence[int], words: Callable[[int], Sequence[str]], ranks: Callable[[int], int] = lambda _: 1
    ) -> Iterator[tuple[int, Ran]]:
        """Each size in its turn, several times."""
        done = [
            [measured(self.folder / f"{size}-{turn}", words(size), self.rounds, ranks(size)) for size in sizes]
            for turn in range(self.turns)
        ]
        for size, runs in zip(sizes, zip(*done, strict=True), strict=True):
            yield size, Ran(*zip(*runs, strict=True))


def measured(folder: Path, words: Sequence[str], rounds: int, ranks: int) -> tuple[float, list[dict[str, Any]]]:
    """When a run began, and what it took to read the data; its rows."""
    arguments = [*words, *QUIET, f"rounds={rounds + 1}", f"run.dir={folder}", "monitor.wandb.mode=disabled"]
    code = launch("benchmarks.growth", ["--be", str(folder.with_suffix(".json")), *arguments], ranks)
    if code:
        raise SystemExit(f"a run of benchmarks.growth ended with {code}: {' '.join(arguments)}")
    began, reading = json.loads(folder.with_suffix(".json").read_text())
    return began + reading, [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def be(file: Path, words: Sequence[str]) -> None:
    """One rank of a run; of the last to get here: when it began, with torch imported, and how long it takes to read."""
    import fl_dist
    from fl_dist.config import load
    from fl_dist.engine.world import build_data

    config = load(None, list(words))
    before = time.time()
    build_data(config)
    began = time.time()
    file.write_text(json.dumps([began, began - before]))
    fl_dist.run(config.model_dump(), quiet=True)


def sampling_of(total: int) -> float:
    """Seconds in which 10 of the clients are drawn."""
    from fl_dist.config import Clients
    from fl_dist.engine.plan import cohort

    clients, seconds = Clients(total=total, per_round=10), []
    for index in range(50):
        began = time.perf_counter()
        cohort(clients, None, 0, index)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


KINDS = {"clients": by_clients, "ranks": by_ranks, "parameters": by_parameters}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--rounds", type=int, default=10, help="of each run (default 10)")
    parser.add_argument("--turns", type=int, default=5, help="runs of each row (default 5)")
    parser.add_argument("--most", type=int, default=10**9, help="no row beyond so many clients, ranks, parameters")
    parser.add_argument("--be", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.be is not None:
        be(given.be, given.kinds)
        return 0
    if unknown := set(given.kinds) - KINDS.keys():
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    for kind in given.kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            for row in KINDS[kind](Run(Path(folder), given.rounds, given.turns), given.most):
                print(row, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
