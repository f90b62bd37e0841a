"""How long a round takes on W workers: a model, checked on this machine and applied to a cluster of GPUs.

    python -m benchmarks.scaling [--no-check] [--parameters 86M --clients 128 --step-ms 40 --steps 50
                                  --bandwidth 25 --latency 20 --algorithm fedgmt ...]

A round is the broadcast, the longest worker's clients (or the evaluation beside them), the reduce and the server step.
What is sent follows from the algorithm, who runs whom from the program's own plan. benchmarks/calibrate.py checks the
model against rounds of 1 to 4 workers here.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.ranks import head, line
from fl_dist.algorithms import algorithms
from fl_dist.algorithms.__main__ import SIZE, Probe
from fl_dist.algorithms.memory import sums
from fl_dist.engine.plan import assign

WORD, SUM = 4, 8
"""Bytes of a parameter as float32, and of its exact sum as int64."""
CLIENT_TRAFFIC, SERVER_TRAFFIC = 100, 60
"""Bytes a parameter that a GPU's memory moves for a client beside its steps (copies, momentum, update, range, sum), and
for the server step of each sum (float64 means, norms, the algorithm's own)."""
HEAVY = 0.3
WORTH = 0.9
"""Twice as many workers pay if the round then takes less than this share."""


@dataclass(frozen=True)
class Vectors:
    """Model-sized vectors of an algorithm, and its passes of a step in units of one forward and one backward."""

    down: int
    up: int
    kept: int
    """Of a client, between its rounds: they move with it."""
    passes: float


def vectors_of(name: str) -> Vectors:
    algorithm = algorithms.build(name, {})
    probe = Probe(algorithm)
    down, kept = (sum(t.shape == (SIZE,) for t in vars(v).values()) for v in (probe.received, probe.kept))
    forwards, backwards = algorithm.passes
    return Vectors(down, sums(algorithm), kept, (forwards + 2 * backwards) / 3)


@dataclass(frozen=True)
class Assumptions:
    parameters: float
    clients: int
    """Of a round."""
    total: int
    steps: int
    step: float
    """Seconds of one forward and one backward pass."""
    vectors: Vectors
    bandwidth: float
    """Of broadcast and reduce, bytes a second; likewise the three below."""
    latency: float
    """Seconds from one rank to the next."""
    host: float = 3e9
    """Of clients' variables from rank to rank, over gloo."""
    link: float = 20e9
    """Between a GPU and its host."""
    memory: float = 1.5e12
    evaluation: float = 0.0
    """Seconds, on rank 0, beside the next round."""
    spread: float = 0.0
    """Standard deviation of the logarithm of the clients' steps."""
    shared: bool = False
    """Rank 0 trains too: it evaluates before the next round, not beside it."""


@dataclass(frozen=True)
class Round:
    """Seconds of a round, by part."""

    workers: int
    makespan: float
    moves: float
    broadcast: float
    reduce: float
    server: float
    evaluation: float
    """Of it what the round is longer for."""

    @property
    def total(self) -> float:
        return self.makespan + self.moves + self.broadcast + self.reduce + self.server + self.evaluation


def chain(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """NCCL's broadcast and reduce: a pipeline through all ranks, so the bytes count once and the latency each hop."""
    return 0.0 if ranks == 1 else size / bandwidth + (ranks - 1) * latency


def client_seconds(a: Assumptions) -> float:
    """Steps, what a client costs beside them, and its variables from the host and back."""
    beside = CLIENT_TRAFFIC * a.parameters / a.memory + 2 * a.vectors.kept * WORD * a.parameters / a.link
    return a.steps * a.step * a.vectors.passes + beside


@cache
def planned(a: Assumptions, workers: int, rounds: int = 20) -> tuple[float, float]:
    """Means over rounds of the makespan, in clients, and of the most clients' variables that a rank sends or gets."""
    rng, home = np.random.default_rng(0), dict[int, int]()
    sizes = np.exp(a.spread * rng.standard_normal(a.total))
    sizes /= sizes.mean()
    ranks, longest, moved = range(workers), [], []
    for _ in range(rounds):
        costs = {int(c): float(sizes[c]) for c in rng.choice(a.total, a.clients, replace=False)}
        placed = assign(costs, ranks, {}, home)
        loads, links = np.zeros(workers), np.zeros((2, workers))
        for client, worker in placed.items():
            loads[worker] += costs[client]
            if (source := home.get(client, worker)) != worker:
                links[0, source] += 1
                links[1, worker] += 1
        longest.append(loads.max())
        moved.append(links.max())
        home.update(placed)
    return float(np.mean(longest)), float(np.mean(moved))


def predict(a: Assumptions, workers: int) -> Round:
    vector, ranks = WORD * a.parameters, workers + (not a.shared)
    longest, moved = planned(a, workers)
    makespan = longest * client_seconds(a)
    moves = moved * (a.vectors.kept * vector / a.host + a.latency) if a.vectors.kept else 0.0
    beside = makespan + moves
    return Round(
        workers,
        makespan,
        moves,
        chain(a.vectors.down * vector, ranks, a.bandwidth, a.latency),
        chain(a.vectors.up * SUM * a.parameters, ranks, a.bandwidth, a.latency),
        SERVER_TRAFFIC * a.vectors.up * a.parameters / a.memory,
        a.evaluation if a.shared else max(0.0, a.evaluation - beside),
    )


def table(a: Assumptions, workers: Sequence[int]) -> list[str]:
    names = ("W", "makespan", "moves", "broadcast", "reduce", "server", "evaluation", "round", "efficiency")
    one, lines = predict(a, 1).total, [head(*names)]
    for w in workers:
        r = predict(a, w)
        parts = (r.makespan, r.moves, r.broadcast, r.reduce, r.server, r.evaluation, r.total)
        lines.append(line(w, *(f"{1e3 * seconds:,.1f}" for seconds in parts), f"{one / (w * r.total):.2f}"))
    return lines


def advice(a: Assumptions, workers: Sequence[int]) -> str:
    """Where more workers stop to pay, and why."""
    last = workers[0]
    for w in workers[1:]:
        if predict(a, w).total > WORTH * predict(a, last).total:
            break
        last = w
    else:
        return f"Every step up to W = {last} shortens the round by more than {1 - WORTH:.0%}."
    held, share = predict(a, last), a.clients / last
    fixed = 1 - held.makespan / held.total
    why = (
        f"each worker has one client by then ({a.clients} clients / {last} workers), and a client is not divided"
        if share <= 1
        else f"messages, clients' variables and the server step, which do not shrink, are {fixed:.0%} of the round"
        if fixed > HEAVY
        else f"of {share:.3g} clients a worker the longest worker has more than its share"
    )
    return f"More than W = {last} does not pay: {why}. Raise clients.per_round to use more."


def count(text: str) -> float:
    """86M is 86 million."""
    units = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
    return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--parameters", type=count, default=86e6, help="of the model (default 86M, a ViT-B)")
    add("--clients", type=int, default=128, help="of a round (default 128)")
    add("--total", type=int, help="clients that there are (default ten times those of a round)")
    add("--step-ms", type=float, default=40.0, help="one forward and one backward pass on a GPU (default 40)")
    add("--steps", type=int, default=50, help="of a client's round (default 50)")
    add("--algorithm", default="fedgmt", choices=list(algorithms), metavar="NAME", help="default fedgmt")
    add("--bandwidth", type=float, default=25.0, help="of broadcast and reduce, GB/s (default 25)")
    add("--latency", type=float, default=20.0, help="from rank to rank, microseconds (default 20)")
    add("--host-bandwidth", type=float, default=3.0, help="of gloo from host to host, GB/s (default 3)")
    add("--link", type=float, default=20.0, help="between a GPU and its host, GB/s (default 20)")
    add("--memory", type=float, default=1500.0, help="of a GPU's memory, GB/s (default 1500)")
    add("--evaluation", type=float, default=0.0, help="seconds of an evaluation on one GPU (default 0)")
    add("--spread", type=float, default=0.0, help="of the logarithm of clients' sizes (default 0: all equal)")
    add("--shared", action="store_true", help="rank 0 trains too (topology.server: shared)")
    add("--workers", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 512])
    add("--no-check", action="store_true", help="do not measure rounds on this machine first")
    return made


def assumptions(given: argparse.Namespace) -> Assumptions:
    return Assumptions(
        parameters=given.parameters,
        clients=given.clients,
        total=given.total or 10 * given.clients,
        steps=given.steps,
        step=given.step_ms / 1e3,
        vectors=vectors_of(given.algorithm),
        bandwidth=1e9 * given.bandwidth,
        latency=given.latency / 1e6,
        host=1e9 * given.host_bandwidth,
        link=1e9 * given.link,
        memory=1e9 * given.memory,
        evaluation=given.evaluation,
        spread=given.spread,
        shared=given.shared,
    )


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    a = assumptions(given)
    if not given.no_check:
        from benchmarks.calibrate import check

        print(*check(), "", sep="\n", flush=True)
    v = a.vectors
    print(
        f"{given.algorithm}, {a.parameters:,.0f} parameters, {a.clients} of {a.total} clients a round, {a.steps} steps"
        f" of {given.step_ms:g} ms x {v.passes:.3g} passes; vectors: {v.down} down, {v.up} up, {v.kept} kept;"
        f" {given.bandwidth:g} GB/s and {given.latency:g} us a hop between GPUs, {given.host_bandwidth:g} GB/s between"
        f" hosts, {given.link:g} GB/s from host to GPU, {given.memory:g} GB/s of its memory; an evaluation of"
        f" {given.evaluation:g} s; clients' sizes spread by {given.spread:g}. Milliseconds:\n"
    )
    print(*table(a, given.workers), "", advice(a, given.workers), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
