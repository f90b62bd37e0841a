"""How long a round takes on W workers: a model, checked on this machine and applied to a cluster of GPUs.

    python -m benchmarks.scaling [--no-check] [--parameters 86M --clients 128 --step-ms 40 --steps 50
                                  --bandwidth 25 --latency 20 --algorithm fedgmt ...]

A round is the broadcast, the longest worker's clients (or the evaluation beside them), the reduce and the server step.
The algorithm determines what is sent, fl_dist's own scheduler which worker trains whom. benchmarks/calibrate.py checks
the model against rounds of 1 to 4 workers here.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.common import table_header, table_row
from fl_dist.algorithms import algorithms
from fl_dist.algorithms.cost_tables import DryRun
from fl_dist.algorithms.memory_needs import count_sums
from fl_dist.federation.scheduling import assign_clients

FLOAT32_BYTES, INT64_BYTES = 4, 8
"""Of a parameter, and of its exact sum."""
CLIENT_TRAFFIC, SERVER_TRAFFIC = 100, 60
"""Bytes per parameter that a GPU's memory moves for a client beside its steps (copies, momentum, update, range, sum),
and for the server step of each sum (float64 means, norms, the algorithm's own)."""
MAX_FIXED_SHARE = 0.3
"""Share of messages and server step in a round above which they are named as the bottleneck."""
MIN_SPEEDUP = 0.9
"""More workers pay off if the round then takes less than this share."""


@dataclass(frozen=True)
class Vectors:
    """Model-sized vectors of an algorithm, and the passes of a step in units of one forward and one backward."""

    down: int
    up: int
    client_state: int
    """Kept per client between rounds: they move with the client."""
    passes: float


def count_vectors(name: str) -> Vectors:
    algorithm = algorithms.build(name, {})
    run = DryRun(algorithm)
    forwards, backwards = algorithm.passes
    return Vectors(run.downloads, count_sums(algorithm), run.state_vectors, (forwards + 2 * backwards) / 3)


@dataclass(frozen=True)
class Assumptions:
    """Bandwidths in bytes per second, times in seconds."""

    parameters: float
    clients_per_round: int
    total_clients: int
    steps: int
    step_seconds: float
    """Of one forward and one backward pass."""
    vectors: Vectors
    bandwidth: float
    """Of broadcast and reduce."""
    latency: float
    """From one rank to the next."""
    host_bandwidth: float = 3e9
    """Of client state from rank to rank, over gloo."""
    gpu_link_bandwidth: float = 20e9
    """Between a GPU and its host."""
    memory_bandwidth: float = 1.5e12
    evaluation_seconds: float = 0.0
    """On rank 0, beside the next round."""
    spread: float = 0.0
    """Standard deviation of the logarithm of the clients' steps."""
    is_server_shared: bool = False
    """Rank 0 trains too: it evaluates before the next round, not beside it."""


@dataclass(frozen=True)
class RoundTime:
    """Seconds of a round, by part."""

    makespan: float
    moves: float
    broadcast: float
    reduce: float
    server: float
    evaluation: float
    """Only what prolongs the round."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def pipeline_seconds(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """NCCL's broadcast and reduce: a pipeline through all ranks, so bytes count once and latency per hop."""
    return 0.0 if ranks == 1 else size / bandwidth + (ranks - 1) * latency


def client_seconds(a: Assumptions) -> float:
    """Steps, memory traffic beside them, and the client's state from the host and back."""
    state_bytes = a.vectors.client_state * FLOAT32_BYTES * a.parameters
    overhead = CLIENT_TRAFFIC * a.parameters / a.memory_bandwidth + 2 * state_bytes / a.gpu_link_bandwidth
    return a.steps * a.step_seconds * a.vectors.passes + overhead


@cache
def simulate_schedule(a: Assumptions, workers: int, rounds: int = 20) -> tuple[float, float]:
    """Means over rounds: the makespan in clients, and the most client states that one rank sends or receives."""
    rng, owners = np.random.default_rng(0), dict[int, int]()
    sizes = np.exp(a.spread * rng.standard_normal(a.total_clients))
    sizes /= sizes.mean()
    makespans, moves = [], []
    for _ in range(rounds):
        cohort = rng.choice(a.total_clients, a.clients_per_round, replace=False)
        costs = {int(client): float(sizes[client]) for client in cohort}
        assignment = assign_clients(costs, range(workers), {}, owners)
        loads, transfers = np.zeros(workers), np.zeros((2, workers))
        for client, worker in assignment.items():
            loads[worker] += costs[client]
            if (owner := owners.get(client, worker)) != worker:
                transfers[0, owner] += 1
                transfers[1, worker] += 1
        makespans.append(loads.max())
        moves.append(transfers.max())
        owners.update(assignment)
    return float(np.mean(makespans)), float(np.mean(moves))


def predict_round(a: Assumptions, workers: int) -> RoundTime:
    vector, ranks, v = FLOAT32_BYTES * a.parameters, workers + (not a.is_server_shared), a.vectors
    makespan_clients, moved_clients = simulate_schedule(a, workers)
    makespan = makespan_clients * client_seconds(a)
    moves = moved_clients * (v.client_state * vector / a.host_bandwidth + a.latency) if v.client_state else 0.0
    hidden = 0.0 if a.is_server_shared else makespan + moves
    return RoundTime(
        makespan,
        moves,
        broadcast=pipeline_seconds(v.down * vector, ranks, a.bandwidth, a.latency),
        reduce=pipeline_seconds(v.up * INT64_BYTES * a.parameters, ranks, a.bandwidth, a.latency),
        server=SERVER_TRAFFIC * v.up * a.parameters / a.memory_bandwidth,
        evaluation=max(0.0, a.evaluation_seconds - hidden),
    )


def format_table(a: Assumptions, workers: Sequence[int]) -> list[str]:
    names = ("W", "makespan", "moves", "broadcast", "reduce", "server", "evaluation", "round", "efficiency")
    single, lines = predict_round(a, 1).total, [table_header(*names)]
    for w in workers:
        time = predict_round(a, w)
        parts = [f"{1e3 * seconds:,.1f}" for seconds in (*vars(time).values(), time.total)]
        lines.append(table_row(w, *parts, f"{single / (w * time.total):.2f}"))
    return lines


def recommend_workers(a: Assumptions, workers: Sequence[int]) -> str:
    """From where on more workers do not pay off, and why."""
    best = workers[0]
    for w in workers[1:]:
        if predict_round(a, w).total > MIN_SPEEDUP * predict_round(a, best).total:
            break
        best = w
    else:
        return f"Every step up to W = {best} shortens the round by more than {1 - MIN_SPEEDUP:.0%}."
    time, clients_per_worker = predict_round(a, best), a.clients_per_round / best
    fixed_share = 1 - time.makespan / time.total
    reason = (
        f"each worker has one client by then ({a.clients_per_round} clients / {best} workers); clients are not divided"
        if clients_per_worker <= 1
        else f"messages, client state and the server step, which do not shrink, are {fixed_share:.0%} of the round"
        if fixed_share > MAX_FIXED_SHARE
        else f"with {clients_per_worker:.3g} clients per worker, the longest worker has more than its share"
    )
    return f"More than W = {best} does not pay: {reason}. Raise clients.per_round to use more."


def parse_count(text: str) -> float:
    """86M is 86 million."""
    units = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
    return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parameters", type=parse_count, default=86e6, help="of the model (default 86M, a ViT-B)")
    add("--clients", type=int, default=128, help="per round (default 128)")
    add("--total", type=int, help="number of all clients (default ten times those of a round)")
    add("--step-ms", type=float, default=40.0, help="one forward and one backward pass on a GPU (default 40)")
    add("--steps", type=int, default=50, help="per client and round (default 50)")
    add("--algorithm", default="fedgmt", choices=list(algorithms), metavar="NAME", help="default fedgmt")
    add("--bandwidth", type=float, default=25.0, help="of broadcast and reduce, GB/s (default 25)")
    add("--latency", type=float, default=20.0, help="from rank to rank, microseconds (default 20)")
    add("--host-bandwidth", type=float, default=3.0, help="of gloo from host to host, GB/s (default 3)")
    add("--link", type=float, default=20.0, help="between a GPU and its host, GB/s (default 20)")
    add("--memory", type=float, default=1500.0, help="bandwidth of a GPU's memory, GB/s (default 1500)")
    add("--evaluation", type=float, default=0.0, help="seconds of an evaluation on one GPU (default 0)")
    add("--spread", type=float, default=0.0, help="of the logarithm of clients' sizes (default 0: all equal)")
    add("--shared", action="store_true", help="rank 0 trains too (topology.server: shared)")
    add("--workers", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 512])
    add("--no-check", action="store_true", help="do not measure rounds on this machine first")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    a = Assumptions(
        parameters=options.parameters,
        clients_per_round=options.clients,
        total_clients=options.total or 10 * options.clients,
        steps=options.steps,
        step_seconds=options.step_ms / 1e3,
        vectors=count_vectors(options.algorithm),
        bandwidth=1e9 * options.bandwidth,
        latency=options.latency / 1e6,
        host_bandwidth=1e9 * options.host_bandwidth,
        gpu_link_bandwidth=1e9 * options.link,
        memory_bandwidth=1e9 * options.memory,
        evaluation_seconds=options.evaluation,
        spread=options.spread,
        is_server_shared=options.shared,
    )
    if not options.no_check:
        from benchmarks.calibrate import check

        print(*check(), "", sep="\n", flush=True)
    v = a.vectors
    print(
        f"{options.algorithm}, {a.parameters:,.0f} parameters, {a.clients_per_round} of {a.total_clients} clients per"
        f" round, {a.steps} steps of {options.step_ms:g} ms x {v.passes:.3g} passes; vectors: {v.down} down, {v.up} up,"
        f" {v.client_state} kept; {options.bandwidth:g} GB/s and {options.latency:g} us per hop between GPUs,"
        f" {options.host_bandwidth:g} GB/s between hosts, {options.link:g} GB/s from host to GPU, {options.memory:g}"
        f" GB/s of its memory; an evaluation of {options.evaluation:g} s; clients' sizes spread by {options.spread:g}."
        " Milliseconds:\n"
    )
    print(*format_table(a, options.workers), "", recommend_workers(a, options.workers), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
