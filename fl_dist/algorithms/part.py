"""A part: one idea of one paper, as hooks that a round calls."""

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl_dist.algorithms.hook_types import Batch, Forward, ModelOutput, Number, Oracle, Round, Upload, Uploaded, Vars
from fl_dist.common.registry import Registry

Need = Literal["logits", "real inputs", "uniform weights", "all updates", "no other uploads", "opacus"]


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
        """On the server: the model that clients receive and start from. It must not modify `x`."""
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
        """After the last local step: change `i`, return the uploads as a tensor or (tensor, factor). It must not
        modify `delta`."""
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


def part_name(part: Part) -> str:
    """The name under which it is registered, or that of its class."""
    return parts.name_of(type(part)) or type(part).__name__.lower()


def has_hook(part: Part, hook: str) -> bool:
    """Whether its class overrides the hook."""
    return getattr(type(part), hook) is not getattr(Part, hook)


def changes_upload(part: Part) -> bool:
    """Whether it changes what a client sends, or what the server makes of the updates."""
    return has_hook(part, "upload") or has_hook(part, "aggregate")
