"""One client's local training: batches become gradient oracles, the algorithm's direction becomes steps."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fl_dist.common.contract import Mistake, what
from fl_dist.common.randomness import seed_global, torch_generator, torch_seed
from fl_dist.common.words import nearest
from fl_dist.config import Local
from fl_dist.core import Algorithm, Batch, Round, Seen, Vars
from fl_dist.data import Dataset, normalise
from fl_dist.engine.flat import Flat
from fl_dist.engine.rows import Rows
from fl_dist.engine.tape import Tape
from fl_dist.engine.uplink import REMEDY
from fl_dist.machine.devices import derivable
from fl_dist.models.blocks import in_blocks
from fl_dist.tasks import Task

DTYPES = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32, "bf16": torch.float32}

Augment = Callable[[Tensor, torch.Generator], Tensor]


DIVERGED = f"training diverged, its loss is not finite; {REMEDY}"


class ClientFailure(RuntimeError):
    """A client's local training failed or cannot be used."""


class Samples:
    """The training data, and which rows are whose."""

    def __init__(
        self,
        dataset: Dataset,
        task: Task,
        rows: list[np.ndarray],
        augment: Augment,
        local: Local,
        device: torch.device,
        most: float = math.inf,
    ):
        self.dataset, self.task, self.augment, self.local = dataset, task, augment, local
        self.dtype = DTYPES[local.precision]
        self.data = Rows(dataset.x_train, dataset.y_train, device, self.dtype, most)
        self.rows = [torch.from_numpy(np.ascontiguousarray(r, dtype=np.int64)) for r in rows]
        self._counts = list(map(len, rows))

    def count(self, client: int) -> int:
        return self._counts[client]

    def batch_size(self, client: int) -> int:
        size = self.local.batch_size
        return self.count(client) if size == "full" else int(size)

    def steps(self, client: int) -> int:
        whole = self.local.epochs * -(-self.count(client) // self.batch_size(client))
        return min(whole, self.local.steps or whole)

    def batches(self, client: int, seed: int, index: int) -> Iterator[Batch]:
        """All batches of the client's round: shuffled anew each epoch, augmented, normalised."""
        noise = torch_generator(seed, "augment", index, client)
        for x, y in self.data.taken(itertools.islice(self._pieces(client, seed, index), self.local.steps)):
            yield self.task.batch(normalise(self._augmented(x, noise), self.dataset, self.dtype), y)

    def _pieces(self, client: int, seed: int, index: int) -> Iterator[Tensor]:
        rows, size = self.rows[client], self.batch_size(client)
        if size == len(rows):
            yield from itertools.repeat(rows, self.local.epochs)
            return
        order = torch_generator(seed, "batches", index, client)
        for _ in range(self.local.epochs):
            epoch = rows[torch.randperm(len(rows), generator=order)]
            # Not `split`, which cuts all of them, however few are needed.
            yield from (epoch[first : first + size] for first in range(0, len(epoch), size))

    def _augmented(self, x: Tensor, noise: torch.Generator) -> Tensor:
        augmented = self.augment(x, noise)
        if not isinstance(augmented, Tensor) or augmented.dtype != x.dtype or len(augmented) != len(x):
            raise Mistake(f"the augmentation made {what(augmented)} of {what(x)}; keep the type and the number of rows")
        return augmented

    def plain(self, client: int) -> Iterator[Batch]:
        """The client's data once, in order, without augmentation."""
        for x, y in self.data.taken(self.rows[client].split(self.batch_size(client))):
            yield self.task.batch(normalise(x, self.dataset, self.dtype), y)


@dataclass
class Trained:
    """What local training returns. `delta` and `buffers`, both changes, are overwritten by the next client."""

    delta: Tensor
    buffers: Tensor
    sent: dict[str, tuple[Tensor, float]]
    vectors: int
    """Model-sized vectors among what is sent: the messages a real client would send."""
    state: Vars
    loss: Tensor
    """The mean of the steps', which nobody has looked at yet."""
    passes: tuple[int, int]


class LocalTraining:
    """Runs the local steps of one client after another on one model."""

    def __init__(
        self,
        model: Flat,
        twin: Flat,
        algorithm: Algorithm,
        samples: Samples,
        local: Local,
        seed: int,
        deadline: float | None = None,
        tick: Callable[[], None] = lambda: None,
    ):
        """`tick` is called before each pass over a batch."""
        self.tick = tick
        self.model, self.twin, self.algorithm, self.samples = model, twin, algorithm, samples
        self.task, self.local, self.seed, self.deadline = samples.task, local, seed, deadline
        self.buffers = model.buffers.new()
        self.forwards = self.backwards = 0
        self.tape: Tape | None = None
        self._taps = {id(flat): Taps(flat.module, algorithm.layers) for flat in (model, twin)}
        model.train()
        twin.module.eval()
        self._momentum: list[Tensor] | None = None

    def run(self, client: int, s: Vars, buffers: Tensor, state: Vars, r: Round, tape: Tape | None = None) -> Trained:
        """Train from the received `s`; `state` is changed in place and returned without its passing variables."""
        self._began, self.forwards, self.backwards, self.tape = time.perf_counter(), 0, 0, tape
        kinds = {name: (tuple(v.shape), v.dtype) for name, v in vars(state).items()}
        self._start(client, s, buffers, r)
        self.algorithm.begin(s, state, r, lambda: self._full_gradient(client, s))
        if tape is not None:
            tape.begin(r.steps)
        loss = self._steps(client, s, state, r)
        if tape is not None:
            tape.arrived(self.model.vector)
        delta = self.model.vector.sub_(s.x)
        sent = self.algorithm.finish(delta, s, state, r)
        vectors = len({id(t) for t, _ in sent.values() if t.dim()} | {id(delta)})
        self.model.buffers.read(self.buffers).sub_(buffers)
        passes = (self.forwards, self.backwards)
        return Trained(delta, self.buffers, sent, vectors, self.algorithm.kept(state, kinds), loss, passes)

    def close(self) -> None:
        """Leave the models as they were found."""
        for taps in self._taps.values():
            taps.remove()

    @cached_property
    def gradient(self) -> Tensor:
        """A vector for gradients, which a rank that trains nobody does without."""
        return torch.zeros_like(self.model.vector)

    @property
    def seconds(self) -> float:
        """Of the client so far, without what was copied for diagnostics."""
        return time.perf_counter() - self._began - (self.tape.seconds if self.tape is not None else 0.0)

    def _start(self, client: int, s: Vars, buffers: Tensor, r: Round) -> None:
        seed_global(torch_seed(self.seed, "dropout", r.index, client), self.model.vector.device)
        self._momentum = None
        self.model.vector.copy_(s.x)
        self.model.bind(self.model.vector)
        self.model.buffers.write(buffers)
        self.twin.buffers.write(buffers)

    def _steps(self, client: int, s: Vars, state: Vars, r: Round) -> Tensor:
        w, total = self.model.vector, torch.zeros((), dtype=torch.float64, device=self.model.vector.device)
        for number, batch in enumerate(self.samples.batches(client, self.seed, r.index)):
            self.tick()
            if self.tape is not None:
                self.tape.step(number, w)
            grad = _BatchOracle(self, batch, s, state)
            step = self.algorithm.oracle(grad, s, state, r, checked=number == 0)(w)
            self._descend(w, self._clip(step), r.lr)
            if grad.loss is not None:
                total += grad.loss
            if self.deadline is not None and self.seconds > self.deadline:
                raise ClientFailure(f"local training took longer than clients.deadline, {self.deadline:g} s")
        return total / r.steps

    def _descend(self, w: Tensor, step: Tensor, lr: float) -> None:
        """Weight decay, momentum and step in one pass. (The kernel: torch.optim's classes import a compiler.)"""
        # The fused kernel does not look: another shape would end the interpreter.
        if step.shape != w.shape or step.dtype != w.dtype or step.device != w.device:
            raise Mistake(f"the direction of a local step became {what(step)}, not a vector like the model, {what(w)}")
        first, kept = self._momentum is None, self._momentum or []
        if first:
            kept = self._momentum = [torch.empty_like(w)] if self.local.momentum else []
        torch._fused_sgd_(
            [w],
            [step],
            kept,
            lr=lr,
            momentum=self.local.momentum,
            weight_decay=self.local.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=first,
        )

    def _clip(self, step: Tensor) -> Tensor:
        if self.local.clip is None:
            return step
        return step.mul_(torch.clamp(self.local.clip / torch.linalg.vector_norm(step), max=1.0))

    def see(self, model: Flat, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The model's output for a batch, and that of the layers that parts name."""
        self.forwards += 1
        taps, dtype = self._taps[id(model)], self.model.vector.dtype
        if self.local.precision != "bf16":
            with in_blocks():
                return model.module(x), taps.drained(dtype)
        with torch.autocast(x.device.type, torch.bfloat16):
            return model.module(x).to(dtype), taps.drained(dtype)

    @torch.no_grad()
    def teacher(self, weights: Tensor, batch: Batch) -> Seen:
        """What the model sees at other weights, in evaluation mode."""
        self.twin.bind(weights)
        outputs, features = self.see(self.twin, batch[0])
        return Seen(self.task.align(outputs, batch[1])[0], features)

    def backward(self, loss: Tensor) -> Tensor:
        """The gradient as a vector that the next call overwrites."""
        self.backwards += 1
        self.model.clear_gradients()
        loss.backward()
        self.model.gather_gradients(self.model.views(self.gradient))
        return self.gradient

    def _full_gradient(self, client: int, s: Vars) -> Tensor:
        total, count = torch.zeros_like(self.gradient), 0
        self.model.module.eval()
        try:
            for x, y in self.samples.plain(client):
                self.tick()
                with derivable(self.model.module):
                    outputs, y = self.task.align(self.see(self.model, x)[0], y)
                    total.add_(self.backward(self.task.loss(outputs, y)), alpha=len(y))
                count += len(y)
        finally:
            self.model.train()
        self.forwards = self.backwards = 0
        return total.div_(max(1, count))


class _BatchOracle:
    """The gradient of the local loss on one batch as a function of the weights."""

    def __init__(self, training: LocalTraining, batch: Batch, s: Vars, state: Vars) -> None:
        self.training, self.batch, self.s, self.state = training, batch, s, state
        self._taught: list[tuple[Tensor, Tensor, Seen]] = []
        self.loss: Tensor | None = None
        """Without penalties, at the first point asked for."""

    def __call__(self, w: Tensor) -> Tensor:
        t, model, (x, y) = self.training, self.training.model, self.batch
        # Only a batch's first pass may move BatchNorm's running statistics.
        kept = model.buffers.read(model.buffers.new()) if self.loss is not None and model.buffers.size else None
        model.bind(w)
        if t.tape is not None:
            t.tape.asked(w)
        x = t.algorithm.inputs(x, self.state)
        outputs, features = t.see(model, x)
        outputs, y = t.task.align(outputs, y)
        loss = t.task.loss(outputs, y)
        if self.loss is None:
            self.loss = loss.detach()
        seen = Seen(outputs, features)
        gradient = t.backward(t.algorithm.penalise(loss, seen, (x, y), self.s, self.state, self._teach))
        if kept is not None:
            model.buffers.write(kept)
        return gradient

    def _teach(self, weights: Tensor, x: Tensor) -> Seen:
        """What a teacher sees, once for all the gradients taken on a batch."""
        for asked, at, seen in self._taught:
            if asked is weights and at is x:
                return seen
        self._taught.append((weights, x, self.training.teacher(weights, (x, self.batch[1]))))
        return self._taught[-1][2]


class Taps:
    """Catch the outputs of named layers on their way."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._caught: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        layers = dict(module.named_modules())
        for name in names:
            if name not in layers:
                raise ValueError(
                    f"a part asks for the layer {name!r} of the model; {nearest(name, filter(None, layers))}"
                )
            self._handles.append(layers[name].register_forward_hook(self._catch(name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _catch(self, name: str) -> Callable[..., Tensor | None]:
        def catch(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
            self._caught[name] = caught = output.to_dense()
            # What follows goes through what was caught, that losses can be derived by it.
            return caught.to_mkldnn() if output.is_mkldnn else None

        return catch

    def drained(self, dtype: torch.dtype) -> dict[str, Tensor]:
        caught, self._caught = self._caught, {}
        return {name: output.to(dtype) for name, output in caught.items()}
