"""Bytes per parameter that an algorithm needs on the devices, from one round of its chain on a small vector.

For float32, the exact reduce and clients of equal size; without activations and data.
"""

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_dist.algorithms.core import Algorithm, Round, Vars
from fl_dist.common.rows import main_tensor
from fl_dist.optimizers.base import Optimizer

VECTOR_SIZE = 97
"""Entries of the vector that stands for a model; no other tensor of a chain has this length by accident."""
FLOAT_BYTES, SUM_BYTES = 4, 8
"""Bytes per entry of a vector and of a sum."""


class MemoryNeeds(NamedTuple):
    """Bytes per parameter."""

    worker: int
    server: int


def memory_needs(algorithm: Algorithm, optimizer: Optimizer) -> MemoryNeeds:
    """A rank holds its model and both messages; a worker also vectors for the gradient, the optimiser's variables and,
    after a backward pass, autograd's gradients; rank 0 the server's variables and the means."""
    downloads, server = _trace_server_round(algorithm)
    messages = FLOAT_BYTES * downloads + SUM_BYTES * count_sums(algorithm)
    worker = 2 * FLOAT_BYTES + messages + _trace_client_round(algorithm, optimizer)
    return MemoryNeeds(worker, FLOAT_BYTES + messages + server)


def count_sums(algorithm: Algorithm) -> int:
    """Vectors that are summed over clients of equal size."""
    return 1 + sum(not (upload.scalar or upload.is_update) for upload in algorithm.uploads.values())


def is_model_sized(tensor: Tensor) -> bool:
    return tensor.shape == (VECTOR_SIZE,)


def _trace_server_round(algorithm: Algorithm) -> tuple[int, int]:
    """How many vectors are published, and the peak bytes of the server's variables, means and temporaries."""
    x, on_demand = torch.zeros(VECTOR_SIZE), OnDemandVectors()
    r, counter = on_demand.round(), _ByteCounter()
    with counter:
        s, update = algorithm.server_init(x), torch.zeros(VECTOR_SIZE)
        downloads = sum(map(is_model_sized, vars(algorithm.publish(s, r)).values()))
        own = {n: torch.zeros(() if u.scalar else VECTOR_SIZE) for n, u in algorithm.uploads.items() if not u.is_update}
        # What is made of all updates is made in host memory, and is one vector on the device.
        has_all = any("all updates" in part.needs for part in algorithm.parts)
        update = torch.zeros(VECTOR_SIZE) if has_all else algorithm.aggregate(update, None, s, r)
        algorithm.update(update, s, Vars(**dict.fromkeys(algorithm.uploads, update) | own), r)
    return downloads, counter.peak + on_demand.bytes


def _trace_client_round(algorithm: Algorithm, optimizer: Optimizer) -> int:
    """Peak bytes in addition to the model, the messages and the vector for gradients."""
    on_demand = OnDemandVectors()
    r = on_demand.round()
    s = algorithm.publish(algorithm.server_init(torch.zeros(VECTOR_SIZE)), r)
    w, gradient = torch.zeros(VECTOR_SIZE), torch.zeros(VECTOR_SIZE)

    def backward(point: Tensor) -> Tensor:
        inputs = main_tensor(algorithm.inputs(torch.zeros(1, 1), state))
        if inputs.requires_grad:
            inputs.sum().backward()
        counter.update_peak(FLOAT_BYTES)
        return gradient

    def full_gradient() -> Tensor:
        total = torch.zeros(VECTOR_SIZE)
        backward(s.x)
        return total

    counter = _ByteCounter()
    with counter:
        state, optimizer_state = algorithm.client_init(s, r), optimizer.init(w)
        algorithm.begin(s, state, r, full_gradient)
        optimizer.step(w, algorithm.oracle(backward, s, state, r)(w), optimizer_state, r.lr)
        algorithm.send(w, s, state, r)
    return counter.peak + on_demand.bytes


class OnDemandVectors:
    """The vectors of a round that only some parts use, with the bytes of those that were used."""

    def __init__(self) -> None:
        self._initial, self._mask = torch.zeros(VECTOR_SIZE), torch.zeros(VECTOR_SIZE, dtype=torch.bool)
        self._used: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self._used.values())

    def round(self) -> Round:
        return Round(
            *(0, 1.0, 1, 1),
            get_initial=partial(self._use, "initial", self._initial),
            get_weight_mask=partial(self._use, "weights", self._mask),
            get_parameter_mask=partial(self._use, "parameters", self._mask),
            parameter_count=VECTOR_SIZE,
            channels=1,
            steps=1,
            samples=1,
        )

    def _use(self, name: str, vector: Tensor) -> Tensor:
        self._used[name] = vector.element_size()
        return vector


class _ByteCounter(TorchDispatchMode):
    """Adds up the bytes per entry of the model-sized vectors that are created within it and still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.peak = 0

    def update_peak(self, temporary: int = 0) -> None:
        self.peak = max(self.peak, sum(size for size, _ in self._alive.values()) + temporary)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and is_model_sized(tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in inputs:
                    self._track(id(storage), storage, tensor.element_size())
        self.update_peak()
        return result

    def _track(self, key: int, storage: torch.UntypedStorage, size: int) -> None:
        self._alive[key] = size, weakref.ref(storage, lambda _: self._alive.pop(key))
