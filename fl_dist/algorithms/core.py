"""An algorithm is a chain of parts, each one idea of one paper.

Parts see vectors, gradient oracles and numbers; no ranks, no data, no models.
Conventions: an update points downhill; `delta` is a client's y_K - z; gradient-like buffers point uphill.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from fl_dist.common.errors import UserError
from fl_dist.common.formatting import suggest
from fl_dist.common.hook_contract import (
    HookContractError,
    TensorKind,
    check_hook_names,
    require_names,
    require_number,
    require_same_kind,
    require_tensors,
    require_vector_like,
)
from fl_dist.common.randomness import generator
from fl_dist.common.registry import Registry
from fl_dist.common.rows import Rows

log = logging.getLogger(__name__)


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


class _ObservedVars(Vars):
    """The same variables as `i`; `observe` is called with each name that is set."""

    __slots__ = ("_observe",)
    _observe: Callable[[str], None]

    def __init__(self, i: Vars, observe: Callable[[str], None]) -> None:
        object.__setattr__(self, "_observe", observe)
        object.__setattr__(self, "__dict__", vars(i))

    def __setattr__(self, name: str, value: Any) -> None:
        self._observe(name)
        super().__setattr__(name, value)


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
    first: Callable[[], Tensor]
    """Builds `initial`, which few parts need."""
    weights: Callable[[], Tensor]
    """Builds `is_weight`, which few parts need."""
    parameters: Callable[[], Tensor]
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
        return self.first()

    @property
    def is_weight(self) -> Tensor:
        """Mask of the entries that belong to parameters named "weight"."""
        return self.weights()

    @property
    def is_parameter(self) -> Tensor:
        """Mask of the entries that are parameters, not gaps between them."""
        return self.parameters()

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
Need = Literal["logits", "real inputs", "uniform weights", "all updates", "no other uploads", "opacus"]
Number = Tensor | float


class Part:
    """One idea; every hook is optional. Parts are stateless: all state is in `s` and `i`.

    Attributes set on `i` that `client` does not name are transient: they last until the end of the client's round. No
    two parts of a chain may set the same one. Those set on `s` that `server` does not name last until the end of the
    round's server step.
    """

    server: tuple[str, ...] = ()
    """Variables the server keeps."""
    client: tuple[str, ...] = ()
    """Variables kept for each client between its rounds."""
    published: tuple[str, ...] = ()
    """Server variables (of any part) that clients receive besides the model."""
    uploads: ClassVar[dict[str, Upload]] = {}
    """What `finish` returns in addition to the update, and how the server averages it."""
    role: str = ""
    """Two parts with the same role exclude each other."""
    after: tuple[str, ...] = ()
    """Roles that must come before this part."""
    extra_passes: tuple[int, int] = (0, 0)
    """Forward and backward passes per local step, in addition to one of each."""
    needs: tuple[Need, ...] = ()
    """What not every task, data set, configuration or chain provides."""
    min_clients: int = 1
    """The fewest clients of a round with which `aggregate` works."""
    assumes_sgd: bool = False
    """Whether it takes a client's update for plain steps along the directions: with momentum or another optimiser,
    a run warns."""
    layers: tuple[str, ...] = ()
    """Layers of the model whose outputs `penalty` needs, by their names in `named_modules`."""
    reports: ClassVar[dict[str, str]] = {}
    """Numbers that `report` returns, each with its meaning."""

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        """The server's variables before the first round; `x` is the first model. Zeros, unless overridden."""
        return {name: torch.zeros_like(x) for name in self.server}

    def client_init(self, s: Vars, r: Round) -> dict[str, Tensor]:
        """A client's variables in its first round; `s.x` is the model it received. Zeros, unless overridden."""
        return {name: torch.zeros_like(s.x) for name in self.client}

    def publish(self, x: Tensor, s: Vars, r: Round) -> Tensor:
        """On the server: the model that clients receive and start from."""
        return x

    def begin(self, s: Vars, i: Vars, r: Round, full: Callable[[], Tensor]) -> None:
        """Before the first local step; `full()` is the gradient over the client's whole data at `s.x`."""

    def inputs(self, x: Tensor, i: Vars) -> Tensor:
        """What the model sees instead of the batch's inputs; only of rows of one tensor."""
        return x

    def penalty(self, output: ModelOutput, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Number:
        """Added to the local loss; `forward(w, x)` is the model's output at other weights, without gradient."""
        return 0.0

    def direction(self, w: Tensor, grad: Oracle, s: Vars, i: Vars, r: Round) -> Tensor:
        """The local step goes along minus this. It may overwrite what `grad` returned, and return it."""
        return grad(w)

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, Uploaded]:
        """After the last local step: change `i`, return the uploads as a tensor or (tensor, factor)."""
        return {}

    def upload(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> Tensor:
        """After `finish`: what the client sends instead of its update `delta`. It must not modify `delta`."""
        return delta

    def upload_bytes(self, r: Round, number_bytes: int) -> float | None:
        """Bytes that a real client would send for what `upload` returned; None: as many as without this part."""
        return None

    def aggregate(self, delta: Tensor, updates: Tensor | None, s: Vars, r: Round) -> Tensor:
        """On the server, before `update`: what it uses instead of the mean update `delta`, which it must not modify.

        `updates`: with comm.reduce=gather all updates, one row per client in the order of their ids, in host memory.
        """
        return delta

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> Tensor:
        """Server step x <- x + update; `mean` holds the averaged uploads. It must not modify `delta`."""
        return delta

    def after_update(self, s: Vars, r: Round) -> None:
        """After the server step, when `s.x` is the new model."""

    def report(self, s: Vars, mean: Vars, r: Round) -> dict[str, Number]:
        """At the end of a round, on the server: what `reports` names."""
        return {}


parts: Registry[Part] = Registry("part", Part)


class ChainError(UserError):
    """Parts that cannot form a chain."""


class Algorithm:
    """A chain of parts, innermost first: directions nest, server updates run left to right."""

    def __init__(self, *chain: Part) -> None:
        self.parts = chain
        for part in chain:
            _check_names(part)
        _check_order(chain)
        self.server = ("x", *_unique([(n, p) for p in chain for n in p.server]))
        self.client = _unique([(n, p) for p in chain for n in p.client])
        self.published = tuple(dict.fromkeys(n for p in chain for n in p.published))
        self.uploads = {n: u for p in chain for n, u in p.uploads.items()}
        self.layers = tuple(dict.fromkeys(n for p in chain for n in p.layers))
        self.reports = {n: meaning for p in chain for n, meaning in p.reports.items()}
        _unique([(n, p) for p in chain for n in p.uploads])
        _unique([(n, p) for p in chain for n in p.reports])
        _check_other_uploads(chain)
        self.min_clients = max((p.min_clients for p in chain), default=1)
        for part in chain:
            for name in part.published:
                if name not in self.server:
                    raise ChainError(f"part {part_name(part)} needs the server variable {name!r}, which no part keeps")
        self._directions, self._penalties, self._inputs, self._uploads, self._aggregates = (
            [p for p in chain if _overrides(p, hook)]
            for hook in ("direction", "penalty", "inputs", "upload", "aggregate")
        )
        self._transient_setters: dict[str, Part] = {}
        self._attributes = _attribute_ids(chain)
        """Those of the parts: they hold settings, which do not change."""
        self._has_warned = False

    def server_init(self, x: Tensor) -> Vars:
        s = Vars(x=x.clone())
        for part in self.parts:
            vars(s).update(require_tensors(_hook(part, "server_init"), part.server_init(x), part.server))
        return s

    def publish(self, s: Vars, r: Round) -> Vars:
        x = s.x
        for part in self.parts:
            x = require_vector_like(_hook(part, "publish"), part.publish(x, s, r), s.x)
        return Vars(x=x, **{name: getattr(s, name) for name in self.published})

    def client_init(self, s: Vars, r: Round) -> Vars:
        i = Vars()
        for part in self.parts:
            vars(i).update(require_tensors(_hook(part, "client_init"), part.client_init(s, r), part.client))
        return i

    def begin(self, s: Vars, i: Vars, r: Round, full: Callable[[], Tensor]) -> None:
        for part in self.parts:
            part.begin(s, self._view(i, part), r, full)

    @property
    def changes_inputs(self) -> bool:
        """Whether a part has the hook `inputs`."""
        return bool(self._inputs)

    def inputs(self, x: Rows, i: Vars) -> Rows:
        for part in self._inputs:
            assert isinstance(x, Tensor)  # checked with the data
            x = part.inputs(x, self._view(i, part))
        return x

    def penalize(self, loss: Tensor, output: ModelOutput, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Tensor:
        for part in self._penalties:
            penalty = part.penalty(output, batch, s, self._view(i, part), forward)
            loss = loss + require_number(_hook(part, "penalty"), penalty)
        return loss

    def oracle(self, grad: Oracle, s: Vars, i: Vars, r: Round, checked: bool = False) -> Oracle:
        """The direction of the whole chain as a function of the weights; `checked`: whether parts keep the contract."""
        for part in self._directions:
            grad = _nest_checked(part, grad, s, self._view(i, part), r) if checked else _nest(part, grad, s, i, r)
        return grad

    def _view(self, i: Vars, part: Part) -> Vars:
        """`i` for a hook of this part, which must not set a transient variable that another part sets."""

        def observe(name: str) -> None:
            setter = part if name in self.client else self._transient_setters.setdefault(name, part)
            if setter is not part:
                raise HookContractError(
                    f"parts {part_name(setter)} and {part_name(part)} both set the transient client variable {name!r};"
                    " rename it in one of them"
                )

        return _ObservedVars(i, observe)

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, tuple[Tensor, float]]:
        """What is uploaded in addition to the update: tensors with factors."""
        uploads: dict[str, tuple[Tensor, float]] = {}
        for part in self.parts:
            values = require_names(_hook(part, "finish"), part.finish(delta, s, self._view(i, part), r), part.uploads)
            uploads |= {name: _upload(part, name, value, delta) for name, value in values.items()}
        return uploads

    def send(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> tuple[Tensor, dict[str, tuple[Tensor, float]]]:
        """What a client sends after its last local step: its update as `upload` changed it, and the other uploads.

        An upload that is the update, or a multiple of it, has no message of its own: the server has only what was sent.
        """
        others, sent = self.finish(delta, s, i, r), delta
        for part in self._uploads:
            sent = _call_unmodified(part, "upload", sent, s, self._view(i, part), r)
        self._warn_of_state()
        if sent is not delta:
            others = {name: (sent if t is delta else t, factor) for name, (t, factor) in others.items()}
        return sent, others

    def upload_bytes(self, r: Round, number_bytes: int) -> int:
        """Bytes of a client's update, in numbers of `number_bytes` unless a part compresses it."""
        size: float = r.parameter_count * number_bytes
        for part in self.parts:
            if (declared := part.upload_bytes(r, number_bytes)) is not None:
                size = float(require_number(_hook(part, "upload_bytes"), declared))
        return math.ceil(size)

    def aggregate(self, delta: Tensor, updates: Tensor | None, s: Vars, r: Round) -> Tensor:
        """What the server uses as the clients' update: their mean, unless a part has another rule."""
        for part in self._aggregates:
            delta = _call_unmodified(part, "aggregate", delta, updates, s, r)
        return delta

    def persistent(self, i: Vars, template: Mapping[str, TensorKind]) -> Vars:
        """The client's variables without the transient ones."""
        for part in self.parts:
            for name in part.client:
                require_same_kind(_hook(part, f"the client variable {name!r}"), vars(i).get(name), template[name])
        return Vars(**{name: getattr(i, name).detach() for name in self.client})

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> dict[str, float]:
        """One server step, in place on `s`; the numbers that the parts report."""
        for part in self.parts:
            delta = _call_unmodified(part, "update", delta, s, mean, r)
        s.x.add_(delta)
        for part in self.parts:
            part.after_update(s, r)
        reports: dict[str, float] = {}
        for part in self.parts:
            values = require_names(_hook(part, "report"), part.report(s, mean, r), part.reports)
            reports |= {name: float(require_number(_hook(part, "report"), value)) for name, value in values.items()}
        for name in vars(s).keys() - set(self.server):  # a checkpoint would not hold it
            delattr(s, name)
        self._warn_of_state()
        return reports

    def _warn_of_state(self) -> None:
        """Once, if a part keeps something in itself: no checkpoint holds it, and no other rank has it."""
        if self._has_warned:
            return
        changed = _attribute_ids(self.parts).items() - self._attributes.items()
        if changed:
            self._has_warned = True
            (part, name), _ = min(changed)
            log.warning(
                "part %s changed its attribute %r in a round; no checkpoint holds it, and other ranks do not see it:"
                " keep state in variables that the part names in `server` or `client`",
                part,
                name,
            )

    @cached_property
    def passes(self) -> tuple[int, int]:
        """Forward and backward passes of one local step."""
        return 1 + sum(p.extra_passes[0] for p in self.parts), 1 + sum(p.extra_passes[1] for p in self.parts)

    def describe(self) -> str:
        """The names of its parts."""
        return " + ".join(part_name(p) for p in self.parts) or "average"


algorithms: Registry[Algorithm] = Registry("algorithm", Algorithm)
papers: dict[str, str] = {}


def build(settings: dict[str, Any]) -> Algorithm:
    """From `{name: ..., hyper-parameters}` or `{parts: [{name: settings}, ...]}`, already validated.

    The parts of `with` come after those of the algorithm.
    """
    own = {key: value for key, value in settings.items() if key not in ("name", "with")}
    base = Algorithm(*_build_parts(own["parts"])) if "parts" in own else algorithms.build(settings["name"], own)
    return Algorithm(*base.parts, *_build_parts(settings["with"])) if "with" in settings else base


def _build_parts(chain: list[dict[str, Any]]) -> list[Part]:
    return [parts.build(name, own) for part in chain for name, own in part.items()]


def entry(paper: str) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Decorator: register a builder as the algorithm of its name; its keywords are what a user may set."""

    def register(builder: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        papers[builder.__name__] = paper
        return algorithms.register(builder)

    return register


def unit_vector(v: Tensor) -> Tensor:
    """v/‖v‖ with one norm over all parameters, and 0 for 0."""
    return v * _inverse_norm(v)


def ascend(w: Tensor, v: Tensor, rho: float) -> Tensor:
    """w + rho*unit(v), in one pass and in the memory of v."""
    return torch.addcmul(w, v, rho * _inverse_norm(v), out=v)


def _inverse_norm(v: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(v)
    return torch.where(norm > 0, 1 / norm, torch.zeros_like(norm))


def _nest(part: Part, grad: Oracle, s: Vars, i: Vars, r: Round) -> Oracle:
    return lambda w: part.direction(w, grad, s, i, r)


def _nest_checked(part: Part, grad: Oracle, s: Vars, i: Vars, r: Round) -> Oracle:
    return lambda w: require_vector_like(_hook(part, "direction"), part.direction(w, grad, s, i, r), s.x)


def _call_unmodified(part: Part, hook: str, delta: Tensor, *arguments: Any) -> Tensor:
    """What the hook makes of the vector `delta`, which it must not modify."""
    version, who = delta._version, _hook(part, hook)
    result = require_vector_like(who, getattr(part, hook)(delta, *arguments), delta)
    if delta._version != version:
        raise HookContractError(f"{who} modified `delta` in place; compute a new tensor from it")
    return result


def _upload(part: Part, name: str, value: Any, delta: Tensor) -> tuple[Tensor, float]:
    """What `finish` returned under a name, as tensor and factor."""
    tensor, factor = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    who = _hook(part, f"finish, for {name!r},")
    if part.uploads[name].scalar:
        tensor = torch.as_tensor(require_number(who, tensor), device=delta.device)
    else:
        tensor = require_vector_like(who, tensor, delta)
    return tensor, float(require_number(_hook(part, f"finish, as the factor on {name!r},"), factor))


def _attribute_ids(chain: tuple[Part, ...]) -> dict[tuple[str, str], int]:
    return {(part_name(part), name): id(value) for part in chain for name, value in vars(part).items()}


def _hook(part: Part, name: str) -> str:
    return f"part {part_name(part)}: {name}"


def part_name(part: Part) -> str:
    """The name under which it is registered, or that of its class."""
    return parts.name_of(type(part)) or type(part).__name__.lower()


def changes_upload(part: Part) -> bool:
    """Whether it changes what a client sends, or what the server makes of the updates."""
    return _overrides(part, "upload") or _overrides(part, "aggregate")


def _overrides(part: Part, hook: str) -> bool:
    return getattr(type(part), hook) is not getattr(Part, hook)


RENAMED = {"settle": "after_update", "extra": "extra_passes"}


def _check_names(part: Part) -> None:
    """A misspelt hook would never be called, and a string would count as a tuple of its letters."""
    who = f"part {part_name(part)}"
    for name, new in RENAMED.items():
        if hasattr(part, name):
            raise ChainError(f"{who} has {name!r}, which is called {new!r}; rename it")
    for kind in ("server", "client", "published", "layers", "needs", "after"):
        if isinstance(value := getattr(part, kind), str):
            raise ChainError(f"{who}: {kind} must be a tuple of names, not the text {value!r}")
    if unknown := sorted(set(part.needs) - set(get_args(Need))):
        raise ChainError(f"{who} has the need {unknown[0]!r}; {suggest(unknown[0], get_args(Need))}")
    check_hook_names(who, part, Part)


def _unique(names: list[tuple[str, Part]]) -> tuple[str, ...]:
    owner: dict[str, Part] = {}
    for name, part in names:
        if name in owner:
            raise ChainError(
                f"parts {part_name(owner[name])} and {part_name(part)} both keep a variable named {name!r}"
            )
        owner[name] = part
    return tuple(owner)


def _check_order(chain: tuple[Part, ...]) -> None:
    by_role: dict[str, Part] = {}
    for part in chain:
        if part.role and part.role in by_role:
            other = part_name(by_role[part.role])
            raise ChainError(f"parts {other} and {part_name(part)} exclude each other: both set the {part.role}")
        by_role[part.role] = part
    for k, part in enumerate(chain):
        for later in chain[k + 1 :]:
            if later.role and later.role in part.after:
                raise ChainError(
                    f"part {part_name(part)} must come after {part_name(later)}, which sets the {later.role}"
                )


def _check_other_uploads(chain: tuple[Part, ...]) -> None:
    """Whether all that leaves a client is its update as a part with the need "no other uploads" changed it."""
    for k, part in enumerate(chain):
        if "no other uploads" not in part.needs:
            continue
        for other in chain:
            for name in (name for name, upload in other.uploads.items() if not upload.is_update):
                raise ChainError(
                    f"part {part_name(other)} also sends {name!r}, which {part_name(part)} does not protect;"
                    " choose an algorithm that sends nothing but its update"
                )
        for later in chain[k + 1 :]:
            if _overrides(later, "upload"):
                raise ChainError(f"part {part_name(part)} must come after {part_name(later)}, which changes the upload")
