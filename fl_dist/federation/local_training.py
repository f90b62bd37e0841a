"""One client's local training: batches become gradient oracles, the algorithm's direction becomes steps."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, Batch, ModelOutput, Round, Vars
from fl_dist.common.errors import ConfigError, FlDistError, describe_error
from fl_dist.common.hook_contract import HookContractError, require_vector_like
from fl_dist.common.randomness import seed_global, torch_seed
from fl_dist.common.rows import Rows
from fl_dist.distributed import bf16, hardware_errors
from fl_dist.federation.client_data import ClientData
from fl_dist.federation.experiment import Experiment
from fl_dist.federation.flat_model import FlatModel
from fl_dist.federation.trajectory_recorder import TrajectoryRecorder
from fl_dist.federation.uplink import REMEDY, OutOfRangeError
from fl_dist.models import CompiledModule, LayerOutputs, describe_compile_error, differentiable_rnn
from fl_dist.optimizers.base import build_optimizer, client_variables, pop_client_variables

DIVERGED_MESSAGE = f"training diverged, its loss is not finite; {REMEDY}"


class ClientFailedError(FlDistError, RuntimeError):
    """A client's local training failed or cannot be used."""


@contextlib.contextmanager
def as_client_failure() -> Iterator[None]:
    """Whatever the body raises is a failure of its client, unless the machine or a hook failed."""
    try:
        yield
    except (ClientFailedError, HookContractError, OSError):
        raise
    except OutOfRangeError as e:
        raise ClientFailedError(str(e)) from None
    except Exception as e:
        if hardware_errors.classify(e) is not None:
            raise
        raise ClientFailedError(describe_error(e)) from e


@dataclass
class LocalResult:
    """What local training returns. `delta` and `buffers` are changes, and overwritten by the next client."""

    delta: Tensor
    """The update, as parts changed it on its way."""
    buffers: Tensor
    sent: dict[str, tuple[Tensor, float]]
    vectors: int
    """Model-sized vectors among what is sent: the messages a real client would send."""
    state: Vars
    loss: Tensor
    """The mean over the steps, on the device: the host has not read it yet."""
    passes: tuple[int, int]


class LocalTraining:
    """Runs the local steps of one client after another on one model."""

    def __init__(
        self,
        experiment: Experiment,
        algorithm: Algorithm,
        client_data: ClientData,
        deadline: float | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`deadline`: seconds a client may take; `progress` is called before each pass over a batch."""
        self.model, self.eval_model, self.seed = experiment.model, experiment.eval_model, experiment.config.seed
        self.algorithm, self.client_data, self.deadline, self.progress = algorithm, client_data, deadline, progress
        self.task, self.local = client_data.task, client_data.local
        self.buffers = self.model.buffers.new()
        self.forwards = self.backwards = 0
        self.recorder: TrajectoryRecorder | None = None
        models = (self.model, self.eval_model)
        self._layer_outputs = {id(model): LayerOutputs(model.module, algorithm.layers) for model in models}
        self.model.train()
        self.eval_model.module.eval()
        self.optimizer = build_optimizer(self.local.optimizer, self.local.momentum, self.local.weight_decay)
        self._module: Callable[..., Tensor] = self.model.module
        """For local steps; the eval model is not compiled."""

    def compile(self) -> None:
        """Compile the passes of local steps and try them, so that errors come before the first round."""
        if self.algorithm.layers:
            raise ConfigError("local.compile=true hides the layers whose outputs the algorithm reads; set it to false")
        size = int(self.local.batch_size)
        self._module = CompiledModule(self.model.module, size)
        x, y = self.client_data.example_batch(size)
        try:
            outputs, y = self.task.align(self.forward(self.model, x)[0], y)
            self.backward(self.task.loss(outputs, y))
        except Exception as e:
            raise describe_compile_error(e) from e

    def run(
        self, client: int, s: Vars, buffers: Tensor, state: Vars, r: Round, recorder: TrajectoryRecorder | None = None
    ) -> LocalResult:
        """Train from the received `s`; `state` is changed in place and returned without its transient variables."""
        self._began, self.forwards, self.backwards, self.recorder = time.perf_counter(), 0, 0, recorder
        kinds = {name: (tuple(v.shape), v.dtype) for name, v in vars(state).items()}
        self._start(client, s, buffers, r)
        optimizer_state = pop_client_variables(vars(state)) or self.optimizer.init(self.model.vector)
        self.algorithm.begin(s, state, r, lambda: self._full_gradient(client, s))
        if recorder is not None:
            recorder.begin(r.steps)
        loss = self._steps(client, s, state, optimizer_state, r)
        if recorder is not None:
            recorder.record_end(self.model.vector)
        delta = self.model.vector.sub_(s.x)
        delta, sent = self.algorithm.send(delta, s, state, r)
        vectors = len({id(t) for t, _ in sent.values() if t.dim()} | {id(delta)})
        self.model.buffers.read(self.buffers).sub_(buffers)
        passes, kept = (self.forwards, self.backwards), self.algorithm.persistent(state, kinds)
        vars(kept).update(client_variables(self.local.optimizer, optimizer_state))
        return LocalResult(delta, self.buffers, sent, vectors, kept, loss, passes)

    def close(self) -> None:
        """Remove the hooks from the models."""
        for outputs in self._layer_outputs.values():
            outputs.remove()

    @cached_property
    def gradient(self) -> Tensor:
        """A vector for gradients; a rank that trains nobody does not need it."""
        return torch.zeros_like(self.model.vector)

    @property
    def seconds(self) -> float:
        """Of the client so far, without copies for diagnostics."""
        return time.perf_counter() - self._began - (self.recorder.seconds if self.recorder is not None else 0.0)

    def _start(self, client: int, s: Vars, buffers: Tensor, r: Round) -> None:
        seed_global(torch_seed(self.seed, "dropout", r.index, client), self.model.vector.device)
        self.model.vector.copy_(s.x)
        self.model.bind(self.model.vector)
        self.model.buffers.write(buffers)
        self.eval_model.buffers.write(buffers)

    def _steps(self, client: int, s: Vars, state: Vars, optimizer_state: dict[str, Tensor], r: Round) -> Tensor:
        w, total = self.model.vector, torch.zeros((), dtype=torch.float64, device=self.model.vector.device)
        for number, batch in enumerate(self.client_data.batches(client, self.seed, r.index)):
            self.progress()
            if self.recorder is not None:
                self.recorder.step(number, w)
            grad = _BatchOracle(self, batch, s, state)
            step = self.algorithm.oracle(grad, s, state, r, checked=number == 0)(w)
            # Kernels of optimisers do not check: another shape would crash the interpreter.
            require_vector_like("the direction of a local step", step, w)
            self.optimizer.step(w, self._clip(step), optimizer_state, r.lr)
            if grad.loss is not None:
                total += grad.loss
            if self.deadline is not None and self.seconds > self.deadline:
                raise ClientFailedError(f"local training took longer than clients.deadline, {self.deadline:g} s")
        return total / r.steps

    def _clip(self, step: Tensor) -> Tensor:
        if self.local.clip is None:
            return step
        return step.mul_(torch.clamp(self.local.clip / torch.linalg.vector_norm(step), max=1.0))

    def forward(self, model: FlatModel, x: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """The model's output for a batch, and that of the layers that parts name."""
        self.forwards += 1
        layers, dtype = self._layer_outputs[id(model)], self.model.vector.dtype
        module = self._module if model is self.model else model.module
        return bf16.forward(module, x, self.local.precision), layers.pop(dtype)

    @torch.no_grad()
    def teacher(self, weights: Tensor, batch: Batch) -> ModelOutput:
        """The model's output at other weights, in evaluation mode."""
        self.eval_model.bind(weights)
        outputs, features = self.forward(self.eval_model, batch[0])
        return ModelOutput(self.task.align(outputs, batch[1])[0], features)

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
            for x, y in self.client_data.plain_batches(client):
                self.progress()
                with differentiable_rnn(self.model.module):
                    outputs, y = self.task.align(self.forward(self.model, x)[0], y)
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
        self._cached: list[tuple[Tensor, Rows, ModelOutput]] = []
        self.loss: Tensor | None = None
        """Without penalties, at the first point."""

    def __call__(self, w: Tensor) -> Tensor:
        t, model, (x, y) = self.training, self.training.model, self.batch
        # Only a batch's first pass may move BatchNorm's running statistics.
        statistics = model.buffers.read() if self.loss is not None and model.buffers.size else None
        model.bind(w)
        if t.recorder is not None:
            t.recorder.record_gradient_point(w)
        x = t.algorithm.inputs(x, self.state)
        outputs, features = t.forward(model, x)
        outputs, y = t.task.align(outputs, y)
        loss = t.task.loss(outputs, y)
        if self.loss is None:
            self.loss = loss.detach()
        output = ModelOutput(outputs, features)
        gradient = t.backward(t.algorithm.penalize(loss, output, (x, y), self.s, self.state, self._teacher))
        if statistics is not None:
            model.buffers.write(statistics)
        return gradient

    def _teacher(self, weights: Tensor, x: Rows) -> ModelOutput:
        """A teacher's output, computed once for all gradients on the batch."""
        for known, inputs, output in self._cached:
            if known is weights and inputs is x:
                return output
        self._cached.append((weights, x, self.training.teacher(weights, (x, self.batch[1]))))
        return self._cached[-1][2]
