"""Losses, gradients and Hessian-vector products over all clients' data, computed by all ranks: the same bits on any.

Rank 0 asks; every rank, rank 0 too, works on its share of fixed pieces of the rows, and one reduce adds integers.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_dist.common.randomness import generator
from fl_dist.core import Batch, unit
from fl_dist.data import normalise
from fl_dist.diagnostics.base import ALL, MARKS, TEST, Unmeasurable, norm
from fl_dist.engine.evaluate import Sums, mean
from fl_dist.engine.exact import Fixed, Scratch, Total
from fl_dist.engine.rows import Rows
from fl_dist.engine.state import ClientStates
from fl_dist.engine.tape import Kept
from fl_dist.engine.world import World
from fl_dist.machine import faults
from fl_dist.machine.comm import Comm
from fl_dist.machine.devices import derivable

RANGE = 2.0**30
"""Largest entry of a gradient or product of a piece."""
COUNTED = 2.0**-20
"""A piece's weight is its number of predictions times this, which is exact."""


class Ask(IntEnum):
    DONE = 0
    LOSS = 1
    GRADIENT = 2
    CURVATURE = 3
    CLIENTS = 4
    CLASSES = 5
    MEAN = 6
    DISTANCES = 7
    CHORDS = 8
    SHARPNESS = 9
    VARIABLES = 10


VECTORS = {Ask.CURVATURE: 2, Ask.MEAN: 0, Ask.SHARPNESS: 0, Ask.VARIABLES: 0}
"""How many go with a question, if it is not one."""


class Landscape:
    """As the diagnostics see it, on rank 0; the other ranks `serve`."""

    def __init__(self, world: World, comm: Comm, states: ClientStates | None = None) -> None:
        self.world, self.comm, self.model, self.states = world, comm, world.twin, states
        self._fetched: dict[str, Tensor] | None = None
        self._subsets: dict[int, Tensor] = {}
        self._header = torch.zeros(3, dtype=torch.int64)
        self.kept: dict[int, Kept] = {}
        self.cohort: Sequence[int] = ()
        self.trained: Sequence[int] = ()

    def open(
        self, buffers: Tensor | None, cohort: Sequence[int], trained: Sequence[int], kept: dict[int, Kept]
    ) -> None:
        """On every rank: the round's cohort, and what this rank kept of the clients that it trained.

        Known to rank 0 alone: the model's buffers, and who was trained.
        """
        size, device = self.model.size, self.world.device
        self._points = torch.zeros(2, size, dtype=self.model.vector.dtype, device=device)
        self._words = torch.zeros(2 * size + 2, dtype=torch.int64, device=device)
        spread = math.ceil(math.log2(len(self._order) + len(cohort) + 1))
        fixed = Fixed(RANGE, 2.0 ** (62 - 30 - spread), 2.0 ** (62 - spread), 2)
        self._total = Total(self._words[:-2].view(2, size), fixed, Scratch(size, device))
        self.kept, self.cohort, self.trained = kept, cohort, trained
        self._buffers = self.model.buffers.new() if buffers is None else buffers.clone()
        self.comm.broadcast(self._buffers)

    def close(self) -> None:
        """On rank 0: let the others go. On every rank: free the memory."""
        if self.comm.rank == 0:
            self._ask(Ask.DONE)
        self.kept = {}
        del self._points, self._words, self._total

    def serve(self) -> None:
        """On the other ranks: answer until rank 0 is done."""
        while True:
            self.comm.broadcast(self._header)
            kind, which, bits = Ask(int(self._header[0])), int(self._header[1]), int(self._header[2])
            if kind is Ask.DONE:
                return
            self.comm.broadcast(self._points[: VECTORS.get(kind, 1)])
            self._answer(kind, which, bits)

    # What rank 0 asks for.

    def loss(self, w: Tensor, rows: int = ALL) -> float:
        return mean(self._ask(Ask.LOSS, rows, 0, w))

    def gradient(self, w: Tensor, rows: int = ALL) -> Tensor:
        self._ask(Ask.GRADIENT, rows, 0, w)
        return self._mean_of("gradient")

    def curvature(self, w: Tensor, v: Tensor, rows: int = ALL) -> Tensor:
        self._ask(Ask.CURVATURE, rows, 0, w, v)
        return self._mean_of("product of Hessian and vector")

    def clients(self, w: Tensor) -> list[float]:
        return _numbers(self._ask(Ask.CLIENTS, 0, 0, w))

    def classes(self, w: Tensor) -> list[float | None]:
        if not self._has_classes:
            return []
        right, all_ = self._ask(Ask.CLASSES, TEST, 0, w).tolist()
        return [r / n if n else None for r, n in zip(right, all_, strict=True)]

    def mean(self, name: str) -> Tensor:
        """Over the clients of the round; see `Locals`."""
        self._ask(Ask.MEAN, NAMES.index(name))
        return self._mean_of(name)

    def distances(self, name: str, point: Tensor) -> list[float]:
        return self._of_trained(self._ask(Ask.DISTANCES, NAMES.index(name), 0, point))

    def chords(self, name: str, point: Tensor) -> list[float]:
        return self._of_trained(self._ask(Ask.CHORDS, NAMES.index(name), 0, point))

    def sharpness(self, rho: float) -> list[float]:
        return self._of_trained(self._ask(Ask.SHARPNESS, 0, _bits(rho)))

    def variables(self, client: int) -> dict[str, Tensor]:
        """Those that the run keeps for the client, in host memory; none before its first round."""
        self._ask(Ask.VARIABLES, client)
        return self._fetched or {}

    def count(self, rows: int = ALL) -> int:
        return len(self._chosen(rows))

    @property
    def sizes(self) -> list[int]:
        return [self.world.samples.count(client) for client in self.trained]

    def _of_trained(self, table: Tensor) -> list[float]:
        numbers = dict(zip(self.cohort, _numbers(table), strict=True))
        return [numbers[client] for client in self.trained]

    def _ask(self, kind: Ask, which: int = 0, bits: int = 0, *vectors: Tensor) -> Tensor:
        """`which`: rows, a client or one of NAMES, as the question wants."""
        self._header.copy_(torch.tensor([kind, which, bits]))
        self.comm.broadcast(self._header)
        for place, vector in zip(self._points, vectors, strict=False):
            place.copy_(vector)
        if kind is Ask.DONE:
            return self._header
        self.comm.broadcast(self._points[: len(vectors)])
        return self._answer(kind, which, bits)

    def _mean_of(self, what: str) -> Tensor:
        """What the sum amounts to, in the model's precision."""
        count, beyond = self._words[-2:].tolist()
        if beyond:
            raise Unmeasurable(f"the {what} is not finite")
        return self._total.over(COUNTED * max(1, count), torch.empty_like(self.model.vector))

    # What every rank does for it.

    def _answer(self, kind: Ask, which: int, bits: int) -> Tensor:
        faults.point("diagnose")
        if kind is Ask.VARIABLES:
            self._fetched = self.states.fetched(which) if self.states is not None else None
            return self._header
        self.comm.doing(f"a diagnostic ({kind.name.lower()})")
        w, v = self._points
        self.model.bind(w)
        self.model.buffers.write(self._buffers)
        self.model.module.eval()
        if kind in (Ask.GRADIENT, Ask.CURVATURE):
            return self._sum_up(self._derivatives(self._mine(which), v if kind is Ask.CURVATURE else None))
        if kind is Ask.MEAN:
            return self._sum_up((kept[NAMES[which]].to(w.device), 1) for kept in self.kept.values())
        if kind is Ask.LOSS:
            answer = self._measured(self._mine(which)).table(["loss"])[0]
        elif kind is Ask.CLASSES:
            answer = self._right(self._mine(which))
        elif kind is Ask.CLIENTS:
            clients = range(self.comm.rank, len(self.world.samples.rows), self.comm.size)
            answer = _table(len(self.world.samples.rows), ((c, self._metric(c)) for c in clients))
        else:
            answer = _table(len(self.cohort), self._of_clients(kind, which, bits))
        return self._added(answer.to(self.world.device))

    def _added(self, words: Tensor) -> Tensor:
        self.comm.doing("")
        self.comm.reduce(words)
        return words

    def _sum_up(self, vectors: Iterable[tuple[Tensor, int]]) -> Tensor:
        """The sum of all ranks' vectors, each times its count; then the counts, and how many could not be added."""
        self._words.zero_()
        for vector, count in vectors:
            low, high = torch.aminmax(vector)
            fits = max(abs(float(low)), abs(float(high))) * count * COUNTED <= RANGE  # not so if it is not a number
            self._words[-1 if not fits else -2] += count
            if fits:
                self._total.add(vector, count * COUNTED)
        return self._added(self._words)

    def _derivatives(self, batches: Iterable[Batch], v: Tensor | None) -> Iterator[tuple[Tensor, int]]:
        """Of each batch's loss at the bound weights: the gradient, or the Hessian times `v`; and its predictions."""
        task, model, params = self.world.task, self.model, self.model.params
        found = torch.zeros_like(model.vector)
        views = model.views(found)
        for x, y in batches:
            # The other kernels of attention cannot be derived twice.
            with sdpa_kernel(SDPBackend.MATH), derivable(model.module):
                outputs, y = task.align(model.module(x), y)
                pieces = torch.autograd.grad(
                    task.loss(outputs, y), params, create_graph=v is not None, materialize_grads=True
                )
                if v is not None:
                    pieces = torch.autograd.grad(pieces, params, model.views(v), materialize_grads=True)
            for view, piece in zip(views, pieces, strict=True):
                view.copy_(piece)
            yield found, len(y)

    @torch.no_grad()
    def _measured(self, batches: Iterable[Batch]) -> Sums:
        sums, task = Sums(self.world.device), self.world.task
        for x, y in batches:
            sums.add(task.measure(*task.align(self.model.module(x), y)))
        return sums

    def _metric(self, client: int) -> float:
        task = self.world.task
        return task.metrics(self._measured(self._batches(self.world.samples.rows[client])).means())[task.headline.name]

    @torch.no_grad()
    def _right(self, batches: Iterable[Batch]) -> Tensor:
        """Right predictions and all predictions of each class."""
        task, counts = self.world.task, torch.zeros(2, self.world.dataset.classes, dtype=torch.int64)
        for x, y in batches:
            outputs, y = task.align(self.model.module(x), y)
            for row, found in zip(counts, (y[outputs.argmax(-1) == y], y), strict=True):
                row += torch.bincount(found.cpu(), minlength=len(row))
        return counts

    def _of_clients(self, kind: Ask, name: int, bits: int) -> Iterator[tuple[int, float]]:
        """A number of each client that this rank trained, with the client's place in the cohort."""
        point, rho = self._points[0].clone(), _number(bits)
        for place, client in enumerate(self.cohort):
            if client not in self.kept:
                continue
            if kind is Ask.SHARPNESS:
                yield place, self._own_sharpness(client, self.kept[client]["end"].to(point.device), rho)
                continue
            vector = self.kept[client][NAMES[name]].to(point.device)
            apart = unit(vector.double()) - unit(point.double()) if kind is Ask.CHORDS else vector - point
            yield place, norm(apart)

    def _own_sharpness(self, client: int, w: Tensor, rho: float) -> float:
        """How much the client's loss rises by a step of length rho along its gradient."""
        rows, total, count = self.world.samples.rows[client], torch.zeros_like(w, dtype=torch.float64), 0
        self.model.bind(w)
        for gradient, n in self._derivatives(self._batches(rows), None):
            total.add_(gradient, alpha=n)
            count += n
        top = w + unit(total / max(1, count)).to(w.dtype) * rho
        before = self._measured(self._batches(rows)).means()["loss"]
        self.model.bind(top)
        return self._measured(self._batches(rows)).means()["loss"] - before

    def _mine(self, rows: int) -> Iterator[Batch]:
        """This rank's share of the pieces: every so-manieth."""
        return self._batches(
            self._chosen(rows), self.comm.rank, self.comm.size, self.world.test if rows == TEST else None
        )

    def _batches(self, rows: Tensor, first: int = 0, step: int = 1, data: Rows | None = None) -> Iterator[Batch]:
        world, data = self.world, data or self.world.samples.data
        for x, y in data.taken(rows.split(world.config.evaluate.batch_size)[first::step]):
            self.comm.tick()
            yield world.task.batch(normalise(x, world.dataset, data.dtype), y)

    def _chosen(self, rows: int) -> Tensor:
        if rows == TEST:
            return torch.arange(len(self.world.dataset.x_test))
        if rows < TEST:
            return self.world.samples.rows[TEST - 1 - rows]
        if rows == ALL or rows >= len(self._order):
            return self._order
        if rows not in self._subsets:
            drawn = generator(self.world.config.seed, "diagnostics rows").choice(len(self._order), rows, replace=False)
            self._subsets[rows] = self._order[torch.from_numpy(drawn).sort().values]
        return self._subsets[rows]

    @cached_property
    def _order(self) -> Tensor:
        return torch.cat(self.world.samples.rows)

    @cached_property
    def _has_classes(self) -> bool:
        """Whether the model is to name the class of a row, and not its tokens, say."""
        world = self.world
        if not world.task.logits or not 0 < world.dataset.classes <= MOST_CLASSES:
            return False
        x, y = next(world.test.taken([self._chosen(TEST)[: world.config.evaluate.batch_size]]))
        _, wanted = world.task.batch(normalise(x, world.dataset, world.test.dtype), y)
        return wanted.shape == y.shape and bool((wanted == y).all())


MOST_CLASSES = 1000
NAMES = ("end", *(f"{kind}{k}" for k in range(len(MARKS)) for kind in ("y", "delta")))


def _table(length: int, numbers: Iterable[tuple[int, float]]) -> Tensor:
    """The numbers at their places, as bits: one writer each, so adding gathers."""
    table = torch.zeros(length, dtype=torch.int64)
    for place, number in numbers:
        table[place] = _bits(number)
    return table


def _numbers(table: Tensor) -> list[float]:
    return table.cpu().view(torch.float64).tolist()


def _bits(number: float) -> int:
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])
