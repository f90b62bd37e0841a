"""Overhead of exact sums in the loss, the gradient and a Hessian-vector product over all clients' rows.

python -m benchmarks.diagnostics [--rows N] [--repeats N]

"Bare" is a plain PyTorch loop over the same batches in the same process. Medians of interleaved repeats.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import write_random_data
from fl_dist.algorithms.core import Batch
from fl_dist.common.rows import Rows, call_module
from fl_dist.config import load
from fl_dist.distributed.process_group import single_process_group
from fl_dist.federation.client_state import ClientStateStore
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.loss_oracle import LossOracle
from fl_dist.federation.oracle_worker import OracleWorker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    experiment, worker = create_oracle_worker(arguments.rows)
    loss_oracle = LossOracle(worker)
    w = experiment.initial.clone()
    v = torch.randn_like(w)
    batches = list(worker.rows.batches(torch.arange(arguments.rows)))
    functions: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "loss": (lambda: loss_oracle.loss(w), lambda: plain_loss(experiment, batches)),
        "gradient": (lambda: loss_oracle.gradient(w), lambda: plain_gradient(experiment, batches)),
        "Hessian-vector product": (
            lambda: loss_oracle.hessian_vector_product(w, v),
            lambda: plain_hessian_vector_product(experiment, batches, v),
        ),
    }
    print(f"CNN with {experiment.model.count:,} parameters, {arguments.rows:,} rows of 3x32x32, one thread")
    print("| | seconds | ÷ bare |\n|---|---|---|")
    for name, (exact, plain) in functions.items():
        times = [(time_call(exact), time_call(plain)) for _ in range(arguments.repeats)]
        exact_seconds, plain_seconds = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"| {name} | {exact_seconds:.2f} | {exact_seconds / plain_seconds:.2f} |")
    worker.close()


def create_oracle_worker(rows: int) -> tuple[Experiment, OracleWorker]:
    with tempfile.TemporaryDirectory() as folder:
        data = write_random_data(Path(folder) / "rows.npz", rows, 10, (3, 32, 32))
        overrides = [f"data={{name: npz, path: {data}}}", "clients.total=10", "partition=iid", "model=cnn"]
        experiment = Experiment(load(None, overrides), torch.device("cpu"))
    group = single_process_group(experiment.config.topology)
    states = ClientStateStore(experiment.template, group.rank, group.collectives, lambda client: None)
    worker = OracleWorker(experiment, group, states)
    worker.open(experiment.initial_buffers, [], {})
    return experiment, worker


def plain_loss(experiment: Experiment, batches: list[Batch]) -> float:
    with torch.no_grad():
        return sum(float(_loss(experiment, x, y)) * len(y) for x, y in batches)


def plain_gradient(experiment: Experiment, batches: list[Batch]) -> list[Tensor]:
    params = experiment.eval_model.params
    total = [torch.zeros_like(p) for p in params]
    for x, y in batches:
        _add(total, torch.autograd.grad(_loss(experiment, x, y), params), len(y))
    return total


def plain_hessian_vector_product(experiment: Experiment, batches: list[Batch], v: Tensor) -> list[Tensor]:
    params, views = experiment.eval_model.params, experiment.eval_model.views(v)
    total = [torch.zeros_like(p) for p in params]
    for x, y in batches:
        gradient = torch.autograd.grad(_loss(experiment, x, y), params, create_graph=True)
        _add(total, torch.autograd.grad(gradient, params, views), len(y))
    return total


def _loss(experiment: Experiment, x: Rows, y: Tensor) -> Tensor:
    return experiment.task.loss(call_module(experiment.eval_model.module, x), y)


def _add(total: Sequence[Tensor], terms: Sequence[Tensor], weight: int) -> None:
    for accumulator, term in zip(total, terms, strict=True):
        accumulator.add_(term, alpha=weight)


def time_call(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
