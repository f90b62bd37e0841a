"""The algebra: an algorithm is a chain of parts, each one idea of one paper.

Parts see vectors, gradient oracles and numbers; no ranks, no data, no models.
Conventions: an update points downhill; `delta` is a client's y_K - z; gradient-like buffers point uphill.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_dist.common.contract import Kind, like, mapping, number, tensors, unchanged
from fl_dist.common.registry import Registry


class Seen(NamedTuple):
    """What a model makes of a batch."""

    logits: Tensor
    """One row a prediction; the model's output, if the task is not one of classes."""
    features: Mapping[str, Tensor]
    """The outputs of the layers that parts name."""


Oracle = Callable[[Tensor], Tensor]
Forward = Callable[[Tensor, Tensor], Seen]
Batch = tuple[Tensor, Tensor]


class Vars(SimpleNamespace):
    """Named tensors: `s` of the server, `i` of one client."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no variable {name!r} here, only {', '.join(vars(self)) or 'none'}")

    def pick(self, names: tuple[str, ...]) -> "Vars":
        return Vars(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Round:
    """What a part may know of the round; `steps` and `samples` are those of the client at hand."""

    index: int
    lr: float
    participants: int
    clients: int
    first: Callable[[], Tensor]
    weights: Callable[[], Tensor]
    """Few parts ask for these two vectors, and so they are made when one does."""
    channels: int
    """Channels (or features) of the model's input."""
    steps: int = 0
    samples: int = 0

    @property
    def initial(self) -> Tensor:
        """The model before the first round."""
        return self.first()

    @property
    def is_weight(self) -> Tensor:
        """Mask of the entries that belong to parameters named "weight"."""
        return self.weights()


class Upload(NamedTuple):
    """How the server averages what the clients send under one name."""

    by: Literal["samples", "uniform"]
    message: bool = True
    """False: a multiple of the client's update (or a number), which costs no message of its own."""
    scalar: bool = False
    is_update: bool = False
    """It is the client's update itself: where both are weighted alike, one sum serves for both."""


Sent = Tensor | tuple[Tensor, float]


Need = Literal["logits", "real inputs"]
Number = Tensor | float


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
    needs: tuple[Need, ...] = ()
    """What not every task and data set has."""
    layers: tuple[str, ...] = ()
    """Layers of the model whose outputs `penalty` asks for, by the names that `named_modules` gives them."""
    reports: ClassVar[dict[str, str]] = {}
    """Numbers worth seeing, each with its meaning."""

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

    def penalty(self, seen: Seen, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Number:
        """Added to the local loss; `forward(w, x)` is what the model sees at other weights, without gradient."""
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

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        """At the end of a round, on the server: what `reports` names."""
        return {}


parts: Registry[Part] = Registry("part", Part)


class Clash(ValueError):
    """Parts that cannot stand in one chain."""


class Algorithm:
    """A chain of parts, innermost first: directions nest, server updates run left to right."""

    def __init__(self, *chain: Part) -> None:
        self.parts = chain
        for part in chain:
            _check_names(part)
        self.server = ("x", *_unique([(n, p) for p in chain for n in p.server]))
        self.client = _unique([(n, p) for p in chain for n in p.client])
        self.published = tuple(dict.fromkeys(n for p in chain for n in p.published))
        self.uploads = {n: u for p in chain for n, u in p.uploads.items()}
        self.layers = tuple(dict.fromkeys(n for p in chain for n in p.layers))
        self.reports = {n: meaning for p in chain for n, meaning in p.reports.items()}
        _unique([(n, p) for p in chain for n in p.uploads])
        _unique([(n, p) for p in chain for n in p.reports])
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
            vars(s).update(tensors(_hook(part, "server_init"), part.server_init(x), part.server))
        return s

    def publish(self, s: Vars, r: Round) -> Vars:
        x = s.x
        for part in self.parts:
            x = like(_hook(part, "publish"), part.publish(x, s, r), s.x)
        return Vars(x=x, **vars(s.pick(self.published)))

    def client_init(self, s: Vars, r: Round) -> Vars:
        i = Vars()
        for part in self.parts:
            vars(i).update(tensors(_hook(part, "client_init"), part.client_init(s, r), part.client))
        return i

    def begin(self, s: Vars, i: Vars, r: Round, full: Callable[[], Tensor]) -> None:
        for part in self.parts:
            part.begin(s, i, r, full)

    def inputs(self, x: Tensor, i: Vars) -> Tensor:
        for part in self._inputs:
            x = part.inputs(x, i)
        return x

    def penalise(self, loss: Tensor, seen: Seen, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Tensor:
        for part in self._penalties:
            loss = loss + number(_hook(part, "penalty"), part.penalty(seen, batch, s, i, forward))
        return loss

    def oracle(self, grad: Oracle, s: Vars, i: Vars, r: Round, checked: bool = False) -> Oracle:
        """The direction of the whole chain as a function of the weights."""
        nest = _nest_checked if checked else _nest
        for part in self._directions:
            grad = nest(part, grad, s, i, r)
        return grad

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, tuple[Tensor, float]]:
        """What goes up beside the update: tensors and factors on them."""
        sent: dict[str, tuple[Tensor, float]] = {}
        for part in self.parts:
            given = mapping(_hook(part, "finish"), part.finish(delta, s, i, r), part.uploads)
            sent |= {name: _sent(part, name, value, delta) for name, value in given.items()}
        return sent

    def kept(self, i: Vars, template: Mapping[str, Kind]) -> Vars:
        """The client's variables without those that last a round only."""
        for part in self.parts:
            for name in part.client:
                unchanged(_hook(part, f"the client variable {name!r}"), vars(i).get(name), template[name])
        return Vars(**{name: getattr(i, name).detach() for name in self.client})

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> dict[str, float]:
        """One server step, in place on `s`; what the parts report of it."""
        for part in self.parts:
            delta = like(_hook(part, "update"), part.update(delta, s, mean, r), s.x)
        s.x.add_(delta)
        reports: dict[str, float] = {}
        for part in self.parts:
            part.settle(s, r)
        for part in self.parts:
            given = mapping(_hook(part, "report"), part.report(s, mean, r), part.reports)
            reports |= {name: float(number(_hook(part, "report"), value)) for name, value in given.items()}
        return reports

    @cached_property
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


def _nest_checked(part: Part, grad: Oracle, s: Vars, i: Vars, r: Round) -> Oracle:
    return lambda w: like(_hook(part, "direction"), part.direction(w, grad, s, i, r), s.x)


def _sent(part: Part, name: str, value: Any, delta: Tensor) -> tuple[Tensor, float]:
    """An upload as tensor and factor."""
    tensor, factor = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    who = _hook(part, f"finish, for {name!r},")
    if part.uploads[name].scalar:
        tensor = torch.as_tensor(number(who, tensor), device=delta.device)
    else:
        tensor = like(who, tensor, delta)
    return tensor, float(number(_hook(part, f"finish, as the factor on {name!r},"), factor))


def _hook(part: Part, name: str) -> str:
    return f"part {_name(part)}: {name}"


def _name(part: Part) -> str:
    return type(part).__name__.lower()


def _overrides(part: Part, hook: str) -> bool:
    return getattr(type(part), hook) is not getattr(Part, hook)


HOOKS = [name for name, value in vars(Part).items() if callable(value) and not name.startswith("_")]


def _check_names(part: Part) -> None:
    """A misspelt hook would never be called, a text instead of a tuple of names be taken letter by letter."""
    for kind in ("server", "client", "published", "layers", "needs", "after"):
        if isinstance(getattr(part, kind), str):
            raise Clash(f"part {_name(part)}: {kind} has to be a tuple of names, not the text {getattr(part, kind)!r}")
    for name in {name for cls in type(part).__mro__ if cls not in Part.__mro__ for name in vars(cls)} - set(HOOKS):
        close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
        if close and callable(getattr(part, name)):
            raise Clash(f"part {_name(part)} has a method {name!r}, which is no hook; did you mean {close[0]!r}?")


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
