"""What rounds are compared with: plain PyTorch, as one would write it without this program."""

import contextlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ranks import Engine
from fl_dist.config import load
from fl_dist.engine.world import World
from fl_dist.models import build_model

TEMPERATURE = 3.0


class Steps:
    """The local steps of clients: a module, torch.optim.SGD, rows as floats in memory.

    A step has the passes of the method and nothing else of it: SAM's second pass without its ascent, FedGMT's teacher
    without its dual variables.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.model, self.teacher = (build_model(world.config.model, world.made_for, torch.float32) for _ in range(2))
        self.passes = world.algorithm.passes
        data = world.dataset
        self.x, self.y = data.x_train.float() / (255 if data.x_train.dtype == torch.uint8 else 1), data.y_train

    def __call__(self, clients: Sequence[int]) -> None:
        for client in clients:
            self._client(client)

    def _client(self, client: int) -> None:
        local, samples = self.world.config.local, self.world.samples
        optimiser = torch.optim.SGD(
            self.model.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
        rows = samples.rows[client]
        for _ in range(local.epochs):
            for batch in rows[torch.randperm(len(rows))].split(samples.batch_size(client)):
                self._step(optimiser, self.x[batch], self.y[batch])

    def _step(self, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        for _ in range(self.passes[1]):
            optimiser.zero_grad()
            logits = self.model(x)
            loss = F.cross_entropy(logits, y)
            if self.passes[0] > self.passes[1]:
                loss = loss + self._distilled(x, logits)
            loss.backward()
        optimiser.step()

    def _distilled(self, x: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            taught = F.log_softmax(self.teacher(x) / TEMPERATURE, dim=1)
        own = F.log_softmax(logits / TEMPERATURE, dim=1)
        return TEMPERATURE**2 * F.kl_div(own, taught, reduction="batchmean", log_target=True)


class Apart:
    """Such steps in a process of their own: a rank's keeps memory that it has freed, a plain program's does not."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trains = engine.session.comm.rank in engine.session.comm.workers
        if self.trains:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, there = spawn.Pipe()
            spawn.Process(target=_serve, args=(engine.words, there), daemon=True).start()

    def __call__(self, rounds: int) -> None:
        """As often the clients that this rank had in the engine's last round."""
        for _ in range(rounds if self.trains else 0):
            self._pipe.send(mine(self.engine))
            self._pipe.recv()

    def settle(self) -> None:
        pass


def _serve(words: list[str], pipe: Connection) -> None:
    torch.set_num_threads(1)
    steps = Steps(World(load(None, words), torch.device("cpu")))
    with contextlib.suppress(EOFError):  # the rank has ended
        while True:
            steps(pipe.recv())
            pipe.send(None)


def mine(engine: Engine) -> list[int]:
    """The clients that this rank had in the engine's last round."""
    _, assignment = engine.session.down.read_orders(engine.world.cohort(engine.done - 1))
    return [c for c, worker in assignment.items() if worker == engine.session.comm.rank]


class Gloo:
    """The same steps between one broadcast and one reduce of as many bytes as the engine sends."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps = engine, Steps(engine.world)
        self.down = torch.zeros_like(engine.session.down.buffer)
        self.up = torch.zeros_like(engine.session.up.buffer)

    def __call__(self, rounds: int) -> None:
        for _ in range(rounds):
            dist.broadcast(self.down, src=0)
            self.steps(mine(self.engine))
            dist.reduce(self.up, dst=0)

    def settle(self) -> None:
        pass
