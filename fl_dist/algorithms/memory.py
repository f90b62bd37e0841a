"""Bytes that an algorithm takes on the devices, from a round of its chain on a stand-in for a model.

In float32, with the exact reduce, momentum of local steps and clients of equal size; without activations and rows.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_dist.core import Algorithm, Round, Vars

SIZE = 97
"""Entries of the stand-in; nothing else in a chain has that length by accident."""
WORD, SUM = 4, 8
"""Bytes of an entry of a vector, and of a sum."""


class Needs(NamedTuple):
    """Bytes a parameter."""

    worker: int
    server: int


def needs(algorithm: Algorithm) -> Needs:
    """A rank holds its model and both messages; a worker also a vector for gradients, one for momentum and, after a
    backward pass, what autograd made; rank 0 the server's variables and the means."""
    down, at_server = _round_of_the_server(algorithm)
    messages = WORD * down + SUM * sums(algorithm)
    return Needs(3 * WORD + messages + _round_of_a_client(algorithm), WORD + messages + at_server)


def sums(algorithm: Algorithm) -> int:
    """Vectors that are added up, between clients of equal size."""
    return 1 + sum(not (upload.scalar or upload.is_update) for upload in algorithm.uploads.values())


def _round_of_the_server(algorithm: Algorithm) -> tuple[int, int]:
    """How many vectors are published, and the most bytes of its own variables, of means and of what parts make."""
    x, r = torch.zeros(SIZE), _round(Needed())
    with Vectors() as vectors:
        s, update = algorithm.server_init(x), torch.zeros(SIZE)
        down = sum(tensor.shape == x.shape for tensor in vars(algorithm.publish(s, r)).values())
        own = {n: torch.zeros(() if u.scalar else SIZE) for n, u in algorithm.uploads.items() if not u.is_update}
        algorithm.update(update, s, Vars(**dict.fromkeys(algorithm.uploads, update) | own), r)
        return down, WORD * vectors.most


def _round_of_a_client(algorithm: Algorithm) -> int:
    """The most bytes at a time beside the model, the messages, momentum and the vector for gradients."""
    needed = Needed()
    r = _round(needed)
    s = algorithm.publish(algorithm.server_init(torch.zeros(SIZE)), r)
    w, gradient = torch.zeros(SIZE), torch.zeros(SIZE)

    def backward(point: Tensor) -> Tensor:
        inputs = algorithm.inputs(torch.zeros(1, 1), state)
        if inputs.requires_grad:
            inputs.sum().backward()
        vectors.note(1)
        return gradient

    def full() -> Tensor:
        total = torch.zeros(SIZE)
        backward(s.x)
        return total

    with Vectors() as vectors:
        state = algorithm.client_init(s, r)
        algorithm.begin(s, state, r, full)
        algorithm.oracle(backward, s, state, r)(w)
        algorithm.finish(w, s, state, r)
    return WORD * vectors.most + needed.bytes


class Needed:
    """The vectors that only some parts ask a round for."""

    def __init__(self) -> None:
        self.bytes, self._first, self._mask = 0, torch.zeros(SIZE), torch.zeros(SIZE, dtype=torch.bool)

    def first(self) -> Tensor:
        self.bytes |= WORD
        return self._first

    def weights(self) -> Tensor:
        self.bytes |= 1
        return self._mask


def _round(needed: Needed) -> Round:
    return Round(0, 1.0, 1, 1, first=needed.first, weights=needed.weights, channels=1, steps=1, samples=1)


class Vectors(TorchDispatchMode):
    """Counts those of the stand-in's length that were made within it and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.most = 0

    def note(self, more: int = 0) -> None:
        """There are so many now, and for a moment some more."""
        self.most = max(self.most, len(self._alive) + more)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.shape == (SIZE,) and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                if id(storage) not in given:
                    self._add(id(storage), storage)
        self.note()
        return made

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key))
