"""An algorithm is a chain of parts: what a round calls on the server and on each client."""

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from fl_dist.algorithms.chain_checks import check_chain
from fl_dist.algorithms.hook_checks import AttributeMonitor, ReadOnlyVector, VariableOwners, check_upload, describe_hook
from fl_dist.algorithms.hook_types import Batch, Forward, ModelOutput, Oracle, Round, Vars
from fl_dist.algorithms.part import Part, has_hook, part_name
from fl_dist.common.hook_contract import (
    TensorKind,
    require_names,
    require_number,
    require_same_kind,
    require_tensors,
    require_vector_like,
)
from fl_dist.common.rows import Rows


class Algorithm:
    """A chain of parts, innermost first: directions nest, server updates run left to right."""

    def __init__(self, *chain: Part) -> None:
        check_chain(chain)
        self.parts = chain
        self.server = ("x", *(n for p in chain for n in p.server))
        self.client = tuple(n for p in chain for n in p.client)
        self.published = tuple(dict.fromkeys(n for p in chain for n in p.published))
        self.uploads = {n: u for p in chain for n, u in p.uploads.items()}
        self.layers = tuple(dict.fromkeys(n for p in chain for n in p.layers))
        self.reports = {n: meaning for p in chain for n, meaning in p.reports.items()}
        self.min_clients = max((p.min_clients for p in chain), default=1)
        self._directions, self._penalties, self._inputs, self._uploads, self._aggregates = (
            [p for p in chain if has_hook(p, hook)]
            for hook in ("direction", "penalty", "inputs", "upload", "aggregate")
        )
        self._client_view, self._server_view = (VariableOwners(chain, kind).view for kind in ("client", "server"))
        self._read_only, self._attributes = ReadOnlyVector(), AttributeMonitor(chain)

    def server_init(self, x: Tensor) -> Vars:
        s = Vars(x=x.clone())
        for part in self.parts:
            vars(s).update(require_tensors(describe_hook(part, "server_init"), part.server_init(x), part.server))
        return s

    def publish(self, s: Vars, r: Round) -> Vars:
        x = s.x
        for part in self.parts:
            x = self._read_only.call_for_vector(part, "publish", x, self._server_view(s, part), r)
        return Vars(x=x, **{name: getattr(s, name) for name in self.published})

    def client_init(self, s: Vars, r: Round) -> Vars:
        i = Vars()
        for part in self.parts:
            vars(i).update(require_tensors(describe_hook(part, "client_init"), part.client_init(s, r), part.client))
        return i

    def begin(self, s: Vars, i: Vars, r: Round, full: Callable[[], Tensor]) -> None:
        for part in self.parts:
            part.begin(s, self._client_view(i, part), r, full)

    @property
    def changes_inputs(self) -> bool:
        """Whether a part has the hook `inputs`."""
        return bool(self._inputs)

    def inputs(self, x: Rows, i: Vars) -> Rows:
        for part in self._inputs:
            assert isinstance(x, Tensor)  # checked with the data
            x = part.inputs(x, self._client_view(i, part))
        return x

    def penalize(self, loss: Tensor, output: ModelOutput, batch: Batch, s: Vars, i: Vars, forward: Forward) -> Tensor:
        for part in self._penalties:
            penalty = part.penalty(output, batch, s, self._client_view(i, part), forward)
            loss = loss + require_number(describe_hook(part, "penalty"), penalty)
        return loss

    def oracle(self, grad: Oracle, s: Vars, i: Vars, r: Round, checked: bool = False) -> Oracle:
        """The direction of the whole chain as a function of the weights; `checked`: whether parts keep the contract."""
        for part in self._directions:
            grad = _nest(part, grad, s, self._client_view(i, part) if checked else i, r, checked)
        return grad

    def finish(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> dict[str, tuple[Tensor, float]]:
        """What is uploaded in addition to the update: tensors with factors."""
        uploads: dict[str, tuple[Tensor, float]] = {}
        for part in self.parts:
            returned = self._read_only.call(part, "finish", delta, s, self._client_view(i, part), r)
            values = require_names(describe_hook(part, "finish"), returned, part.uploads)
            uploads |= {name: check_upload(part, name, value, delta) for name, value in values.items()}
        return uploads

    def send(self, delta: Tensor, s: Vars, i: Vars, r: Round) -> tuple[Tensor, dict[str, tuple[Tensor, float]]]:
        """What a client sends after its last local step: its update as `upload` changed it, and the other uploads.

        An upload that is the update, or a multiple of it, has no message of its own: the server has only what was sent.
        """
        others, sent = self.finish(delta, s, i, r), delta
        for part in self._uploads:
            sent = self._read_only.call_for_vector(part, "upload", sent, s, self._client_view(i, part), r)
        self._attributes.warn_once()
        if sent is not delta:
            others = {name: (sent if t is delta else t, factor) for name, (t, factor) in others.items()}
        return sent, others

    def upload_bytes(self, r: Round, number_bytes: int) -> int:
        """Bytes of a client's update, in numbers of `number_bytes` unless a part compresses it."""
        size: float = r.parameter_count * number_bytes
        for part in self.parts:
            if (declared := part.upload_bytes(r, number_bytes)) is not None:
                size = float(require_number(describe_hook(part, "upload_bytes"), declared))
        return math.ceil(size)

    def aggregate(self, delta: Tensor, updates: Tensor | None, s: Vars, r: Round) -> Tensor:
        """What the server uses as the clients' update: their mean, unless a part has another rule."""
        for part in self._aggregates:
            delta = self._read_only.call_for_vector(part, "aggregate", delta, updates, self._server_view(s, part), r)
        return delta

    def persistent(self, i: Vars, template: Mapping[str, TensorKind]) -> Vars:
        """The client's variables without the transient ones."""
        for part in self.parts:
            for name in part.client:
                who = describe_hook(part, f"the client variable {name!r}")
                require_same_kind(who, vars(i).get(name), template[name])
        return Vars(**{name: getattr(i, name).detach() for name in self.client})

    def update(self, delta: Tensor, s: Vars, mean: Vars, r: Round) -> dict[str, float]:
        """One server step, in place on `s`; the numbers that the parts report."""
        for part in self.parts:
            delta = self._read_only.call_for_vector(part, "update", delta, self._server_view(s, part), mean, r)
        s.x.add_(delta)
        for part in self.parts:
            part.after_update(self._server_view(s, part), r)
        reports: dict[str, float] = {}
        for part in self.parts:
            who = describe_hook(part, "report")
            values = require_names(who, part.report(self._server_view(s, part), mean, r), part.reports)
            reports |= {name: float(require_number(who, value)) for name, value in values.items()}
        for name in vars(s).keys() - set(self.server):  # a checkpoint would not hold it
            delattr(s, name)
        self._attributes.warn_once()
        return reports

    @property
    def passes(self) -> tuple[int, int]:
        """Forward and backward passes of one local step."""
        return 1 + sum(p.extra_passes[0] for p in self.parts), 1 + sum(p.extra_passes[1] for p in self.parts)

    def describe(self) -> str:
        """The names of its parts."""
        return " + ".join(part_name(p) for p in self.parts) or "average"


def _nest(part: Part, grad: Oracle, s: Vars, i: Vars, r: Round, checked: bool) -> Oracle:
    def direction(w: Tensor) -> Tensor:
        v = part.direction(w, grad, s, i, r)
        return require_vector_like(describe_hook(part, "direction"), v, s.x) if checked else v

    return direction
