"""The algebra: an algorithm is a chain of parts, each one idea of one paper.

Parts see vectors, gradient oracles and numbers; no ranks, no data, no models.
Conventions: an update points downhill; `delta` is a client's y_K - z; gradient-like buffers point uphill.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_dist.common.registry import Registry

Oracle = Callable[[Tensor], Tensor]
Forward = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


class Vars(SimpleNamespace):
    """Named tensors: `s` of the server, `i` of one client."""

    def pick(self, names: tuple[str, ...]) -> "Vars":
        return Vars(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Round:
    """What a part may know of the round; `steps` and `samples` are those of the client at hand."""

    index: int
    lr: float
    participants: int
    clients: int
    initial: Tensor
    """The model before the first round."""
    is_weight: Tensor
    """Mask of the entries that belong to parameters named "weight"."""
    channels: int
    """Channels (or features) of the model's input."""
    steps: int = 0
    samples: int = 0


class Upload(NamedTuple):
    """How the server averages what the clients send under one name."""

    by: Literal["samples", "uniform"]
    message: bool = True
    """False: a multiple of the client's update (or a number), which costs no message of its own."""
    scalar: bool = False


Sent = Tensor | tuple[Tensor, float]


class Part:
    """One idea; every hook is optional. Parts keep nothing themselves: all state is in `s` and `i`.

    Attributes set on `i` that `client` does not name last until the end of the client's round.
    """

    server: tuple[str, ...] = ()
    """Variables the server keeps."""
    client: tuple[str, ...] = ()
    """Variables kept for each client between its rounds."""
    published: tuple[str, ...] = ()
    """Server variables (of any part) that clients receive besides the model."""
    uploads: ClassVar[dict[str, Upload]] = {}
    role: str = ""
    """Two parts of one role exclude each other."""
    after: tuple[str, ...] = ()
    """Roles that have to stand before this part."""
    extra: tuple[int, int] = (0, 0)
    """Forward and backward passes a local step costs on top of one of each."""

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(x) for name in self.server}

    def client_init(self, s: Vars, r: Round) -> dict[str, Tensor]:
        """A client's variables in its first round; `s.x` is the model it received."""
        return {name: torch.zeros_like(s.x) for name in self.client}

    def publish(self, x: Tensor, s: Vars, r: Round) -> Tensor:
        """On the server: the model that clients receive and start from."""
        return x

    def begin(self, s: Vars, i: Vars, r: Round, full: Callable[[], Tensor]) -> None:
        """Before the first local step; `full()` is the gradient over the client's whole data at `s.x`."""

    def inputs(self, x: Tensor, i: Vars) -> Tensor:
        """What the model sees instead of the batch's inputs."""
        return x

    def penalty(self, logits: Tensor, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Tensor | float:
        """Added to the local loss; `forward(w, x)` gives the logits at other weights, without gradient."""
        return 0.0

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        """The local step goes along minus this. It may overwrite what `grad` returned, and return it."""
        return grad(w)

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Sent]:
        """After the last local step: change `i`, return the uploads as a tensor or (tensor, factor)."""
        return {}

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        """Server step x <- x + update; `mean` holds the averaged uploads. Must not change `delta`."""
        return delta

    def settle(self, s: Vars, r: Round) -> None:
        """After the server step, when `s.x` is the new model."""


parts: Registry[Part] = Registry("part")


class Clash(ValueError):
    """Parts that cannot stand in one chain."""


class Algorithm:
    """A chain of parts, innermost first: directions nest, server updates run left to right."""

    def __init__(self, *chain: Part) -> None:
        self.parts = chain
        self.server = ("x", *_unique([(n, p) for p in chain for n in p.server]))
        self.client = _unique([(n, p) for p in chain for n in p.client])
        self.published = tuple(dict.fromkeys(n for p in chain for n in p.published))
        self.uploads = {n: u for p in chain for n, u in p.uploads.items()}
        _unique([(n, p) for p in chain for n in p.uploads])
        _check_order(chain)
        for part in chain:
            for name in part.published:
                if name not in self.server:
                    raise Clash(f"part {_name(part)} needs the server variable {name!r}, which no part keeps")
        self._directions = [p for p in chain if _overrides(p, "direction")]
        self._penalties = [p for p in chain if _overrides(p, "penalty")]
        self._inputs = [p for p in chain if _overrides(p, "inputs")]

    def server_init(self, x: Tensor) -> Vars:
        s = Vars(x=x.clone())
        for part in self.parts:
            vars(s).update(part.server_init(x))
        return s

    def publish(self, s: Vars, r: Round) -> Vars:
        x = s.x
        for part in self.parts:
            x = part.publish(x, s, r)
        return Vars(x=x, **vars(s.pick(self.published)))

    def client_init(self, s: Vars, r: Round) -> Vars:
        return Vars(**{n: v for part in self.parts for n, v in part.client_init(s, r).items()})

    def begin(self, s: Vars, i: Vars, r: Round, full: Callable[[], Tensor]) -> None:
        for part in self.parts:
            part.begin(s, i, r, full)

    def inputs(self, x: Tensor, i: Vars) -> Tensor:
        for part in self._inputs:
            x = part.inputs(x, i)
        return x

    def penalise(self, loss: Tensor, logits: Tensor, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Tensor:
        for part in self._penalties:
            loss = loss + part.penalty(logits, batch, s, i, forward)
        return loss

    def oracle(self, grad: Oracle, s: Vars, i: Vars, r: Round) -> Oracle:
        """The direction of the whole chain as a function of the weights."""
        for part in self._directions:
            grad = _nest(part, grad, s, i, r)
        return grad

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Sent]:
        sent: dict[str, Sent] = {}
        for part in self.parts:
            sent.update(part.finish(delta, s, i, r))
        return sent

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> None:
        """One server step, in place on `s`."""
        for part in self.parts:
            delta = part.update(delta, s, mean, r)
        s.x.add_(delta)
        for part in self.parts:
            part.settle(s, r)

    @property
    def passes(self) -> tuple[int, int]:
        """Forward and backward passes of one local step."""
        return 1 + sum(p.extra[0] for p in self.parts), 1 + sum(p.extra[1] for p in self.parts)

    def describe(self) -> str:
        return " + ".join(_name(p) for p in self.parts) or "average"


def unit(v: Tensor) -> Tensor:
    """v/‖v‖ with one norm over all parameters, and 0 for 0."""
    return v * _inverse_norm(v)


def ascend(w: Tensor, v: Tensor, rho: float) -> Tensor:
    """w + rho*unit(v), in one pass and in v's memory."""
    return torch.addcmul(w, v, rho * _inverse_norm(v), out=v)


def _inverse_norm(v: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(v)
    return torch.where(norm > 0, 1 / norm, torch.zeros_like(norm))


def _nest(part: Part, grad: Oracle, s: Vars, i: Vars, r: Round) -> Oracle:
    return lambda w: part.direction(w, grad, s, i, r)


def _name(part: Part) -> str:
    return type(part).__name__.lower()


def _overrides(part: Part, hook: str) -> bool:
    return getattr(type(part), hook) is not getattr(Part, hook)


def _unique(owned: list[tuple[str, Part]]) -> tuple[str, ...]:
    owner: dict[str, Part] = {}
    for name, part in owned:
        if name in owner:
            raise Clash(f"parts {_name(owner[name])} and {_name(part)} both keep a variable named {name!r}")
        owner[name] = part
    return tuple(owner)


def _check_order(chain: tuple[Part, ...]) -> None:
    seen: dict[str, Part] = {}
    for part in chain:
        if part.role and part.role in seen:
            raise Clash(
                f"parts {_name(seen[part.role])} and {_name(part)} exclude each other: both set the {part.role}"
            )
        seen[part.role] = part
    for k, part in enumerate(chain):
        for later in chain[k + 1 :]:
            if later.role and later.role in part.after:
                raise Clash(f"part {_name(part)} has to stand after {_name(later)}, which sets the {later.role}")
