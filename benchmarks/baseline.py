"""What rounds are compared with: plain PyTorch, as one would write it without fl_dist."""

import contextlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Rounds, Workload
from fl_dist.common.rows import main_tensor
from fl_dist.config import load
from fl_dist.federation.experiment import Experiment
from fl_dist.models import build_model

TEMPERATURE = 3.0


class PlainTraining:
    """The local steps of clients: a module, torch.optim.SGD, rows as floats in memory.

    A step has the forward and backward passes of the algorithm and nothing else of it: SAM's second pass without its
    ascent, FedGMT's teacher without its dual variables.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.model, self.teacher = (
            build_model(experiment.config.model, experiment.model_interface, torch.float32) for _ in range(2)
        )
        self.forwards, self.backwards = experiment.algorithm.passes
        x = main_tensor(experiment.dataset.x_train)
        self.x, self.y = x.float() / (255 if x.dtype == torch.uint8 else 1), experiment.dataset.y_train

    def train_client(self, client: int) -> None:
        local, samples = self.experiment.config.local, self.experiment.client_data
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
        rows = samples.rows[client]
        for _ in range(local.epochs):
            for batch in rows[torch.randperm(len(rows))].split(samples.batch_size(client)):
                self._step(optimizer, self.x[batch], self.y[batch])

    def _step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        for _ in range(self.backwards):
            optimizer.zero_grad()
            logits = self.model(x)
            loss = F.cross_entropy(logits, y)
            if self.forwards > self.backwards:
                loss = loss + self._distillation_loss(x, logits)
            loss.backward()
        optimizer.step()

    def _distillation_loss(self, x: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = F.log_softmax(self.teacher(x) / TEMPERATURE, dim=1)
        student = F.log_softmax(logits / TEMPERATURE, dim=1)
        return TEMPERATURE**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


class PlainSteps(Workload):
    """The same clients in a plain process: ranks keep freed memory, plain PyTorch does not."""

    def __init__(self, reference: Rounds) -> None:
        self.reference = reference
        self.is_worker = reference.loop.group.rank in reference.loop.group.workers
        if self.is_worker:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, remote = spawn.Pipe()
            spawn.Process(target=_serve, args=(reference.overrides, remote), daemon=True).start()

    def run(self, rounds: int) -> None:
        for _ in range(rounds if self.is_worker else 0):
            self._pipe.send(assigned_clients(self.reference))
            self._pipe.recv()


def _serve(overrides: list[str], pipe: Connection) -> None:
    torch.set_num_threads(1)
    training = PlainTraining(Experiment(load(None, overrides), torch.device("cpu")))
    with contextlib.suppress(EOFError):  # the rank has ended
        while True:
            for client in pipe.recv():
                training.train_client(client)
            pipe.send(None)


def assigned_clients(rounds: Rounds) -> Sequence[int]:
    """The clients of this rank in the last round."""
    _, assignment = rounds.loop.down.read()
    return [client for client, worker in assignment.items() if worker == rounds.loop.group.rank]


class GlooRounds(Workload):
    """Plain training between one broadcast and one reduce of as many bytes as a round sends."""

    def __init__(self, reference: Rounds) -> None:
        self.reference, self.training = reference, PlainTraining(reference.experiment)
        self.down = torch.zeros_like(reference.loop.down.buffer)
        self.up = torch.zeros_like(reference.loop.up.buffer)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            dist.broadcast(self.down, src=0)
            for client in assigned_clients(self.reference):
                self.training.train_client(client)
            dist.reduce(self.up, dst=0)
