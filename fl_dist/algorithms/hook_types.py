"""What the hooks of parts see and return: named vectors, gradient oracles, the round, uploads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from fl_dist.common.randomness import generator
from fl_dist.common.rows import Rows


class ModelOutput(NamedTuple):
    """The output of a model for a batch."""

    logits: Tensor
    """One row per prediction; the model's output, if the task has no classes."""
    features: Mapping[str, Tensor]
    """The outputs of the layers that parts name."""


Oracle = Callable[[Tensor], Tensor]
Forward = Callable[[Tensor, Rows], ModelOutput]
Batch = tuple[Rows, Tensor]


class Vars:
    """Named tensors: `s` of the server, `i` of one client."""

    def __init__(self, **variables: Any) -> None:
        vars(self).update(variables)

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"there is no variable {name!r} here, only {', '.join(vars(self)) or 'none'}")

    def __repr__(self) -> str:
        return f"Vars({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


@dataclass(frozen=True)
class Round:
    """What a part may know of the round."""

    index: int
    """Number of the round, from 0."""
    lr: float
    """Learning rate of the local steps."""
    participants: int
    """Clients of the round."""
    clients: int
    """All clients."""
    get_initial: Callable[[], Tensor]
    """Builds `initial`, which few parts need."""
    get_weight_mask: Callable[[], Tensor]
    """Builds `is_weight`, which few parts need."""
    get_parameter_mask: Callable[[], Tensor]
    """Builds `is_parameter`, which few parts need."""
    parameter_count: int
    """Parameters that are trained; vectors also have gaps between them, which hold zeros."""
    channels: int
    """Channels (or features) of the model's input."""
    seed: int = 0
    """Of the run."""
    sampling_rate: float = 1.0
    """The probability that a client takes part in a round; 1 with an explicit schedule."""
    expected_participants: float = 1.0
    """Clients that are sampled for a round on average, whether or not they fail."""
    client: int | None = None
    """The current client; None on the server."""
    steps: int = 0
    """Local steps of the current client."""
    samples: int = 0
    """Training rows of the current client."""

    @property
    def initial(self) -> Tensor:
        """The model before the first round."""
        return self.get_initial()

    @property
    def is_weight(self) -> Tensor:
        """Mask of the entries that belong to parameters named "weight"."""
        return self.get_weight_mask()

    @property
    def is_parameter(self) -> Tensor:
        """Mask of the entries that are parameters, not gaps between them."""
        return self.get_parameter_mask()

    def generator(self, purpose: str) -> np.random.Generator:
        """Random numbers of this purpose, round and client (or server): the same on any number of workers."""
        return generator(self.seed, purpose, self.index, *([] if self.client is None else [self.client]))


class Upload(NamedTuple):
    """How the server averages what the clients send under one name."""

    by: Literal["samples", "uniform"]
    """Weights of the mean: the clients' numbers of rows, or all equal."""
    message: bool = True
    """False: a multiple of the client's update (or a number), which needs no message of its own."""
    scalar: bool = False
    """Whether it is one number instead of a vector."""
    is_update: bool = False
    """It is the client's update itself: if both have the same weights, one sum serves for both."""


Uploaded = Tensor | tuple[Tensor, float]
Number = Tensor | float
