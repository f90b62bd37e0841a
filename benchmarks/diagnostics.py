"""What exact sums add to the loss, the gradient and a Hessian-vector product over all clients' rows.

python -m benchmarks.diagnostics [--rows N] [--repeats N]

"Bare" is a plain PyTorch loop over the same batches in the same process. Medians of interleaved repeats.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fl_dist.config import load
from fl_dist.core import Batch
from fl_dist.engine.landscape import Landscape
from fl_dist.engine.world import World
from fl_dist.machine.comm import Alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world, landscape = set_up(arguments.rows)
    w = world.initial.clone()
    v = torch.randn_like(w)
    batches = list(landscape._batches(torch.arange(arguments.rows)))
    kinds: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "loss": (lambda: landscape.loss(w), lambda: bare_loss(world, batches)),
        "gradient": (lambda: landscape.gradient(w), lambda: bare_gradient(world, batches)),
        "Hessian-vector product": (lambda: landscape.curvature(w, v), lambda: bare_product(world, batches, v)),
    }
    print(f"CNN with {world.model.count:,} parameters, {arguments.rows:,} rows of 3x32x32, one thread")
    print("| | seconds | ÷ bare |\n|---|---|---|")
    for name, (ours, bare) in kinds.items():
        times = [(timed(ours), timed(bare)) for _ in range(arguments.repeats)]
        own, plain = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"| {name} | {own:.2f} | {own / plain:.2f} |")
    landscape.close()


def set_up(rows: int) -> tuple[World, Landscape]:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, rows)
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        np.savez(file, x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
        file.flush()
        words = [f"data={{name: npz, path: {file.name}}}", "clients.total=10", "partition=iid", "model=cnn"]
        world = World(load(None, words), torch.device("cpu"))
    landscape = Landscape(world, Alone(world.config.topology))
    landscape.open(world.initial_buffers, [], [], {})
    return world, landscape


def bare_loss(world: World, batches: list[Batch]) -> float:
    with torch.no_grad():
        return sum(float(world.task.loss(world.twin.module(x), y)) * len(y) for x, y in batches)


def bare_gradient(world: World, batches: list[Batch]) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in world.twin.params]
    for x, y in batches:
        for sum_, piece in zip(total, torch.autograd.grad(loss_of(world, x, y), world.twin.params), strict=True):
            sum_.add_(piece, alpha=len(y))
    return total


def bare_product(world: World, batches: list[Batch], v: Tensor) -> list[Tensor]:
    total, views = [torch.zeros_like(p) for p in world.twin.params], world.twin.views(v)
    for x, y in batches:
        slope = torch.autograd.grad(loss_of(world, x, y), world.twin.params, create_graph=True)
        for sum_, piece in zip(total, torch.autograd.grad(slope, world.twin.params, views), strict=True):
            sum_.add_(piece, alpha=len(y))
    return total


def loss_of(world: World, x: Tensor, y: Tensor) -> Tensor:
    return world.task.loss(world.twin.module(x), y)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
