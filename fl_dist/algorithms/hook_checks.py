"""Whether the hooks of parts keep their contract while a round runs."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fl_dist.algorithms.hook_types import Vars
from fl_dist.algorithms.part import Part, part_name
from fl_dist.common.hook_contract import HookContractError, require_number, require_vector_like
from fl_dist.common.vector_math import CHUNK_SIZES

log = logging.getLogger(__name__)


def describe_hook(part: Part, hook: str) -> str:
    """A hook as the beginning of a message."""
    return f"part {part_name(part)}: {hook}"


class ReadOnlyVector:
    """Calls hooks that must not modify the vector that they get first.

    torch counts changes; in a hook's first call a fingerprint also shows those past torch, through `.data` or numpy.
    """

    def __init__(self) -> None:
        self._checked: set[tuple[int, str]] = set()
        """Ids of parts: those of users may not be hashable."""

    def call(self, part: Part, hook: str, vector: Tensor, *arguments: Any) -> Any:
        """What the hook returns."""
        version, is_first = vector._version, (id(part), hook) not in self._checked
        before = _fingerprint(vector) if is_first else ""
        returned = getattr(part, hook)(vector, *arguments)
        if vector._version != version or (is_first and _fingerprint(vector) != before):
            name = "x" if hook == "publish" else "delta"
            raise HookContractError(
                f"{describe_hook(part, hook)} modified `{name}` in place; compute a new tensor from it"
            )
        self._checked.add((id(part), hook))
        return returned

    def call_for_vector(self, part: Part, hook: str, vector: Tensor, *arguments: Any) -> Tensor:
        """What the hook returns, which has to be a vector like the one that it gets."""
        return require_vector_like(describe_hook(part, hook), self.call(part, hook, vector, *arguments), vector)


def _fingerprint(vector: Tensor) -> str:
    """Of the values, without a float64 copy of a large vector; they need not be finite."""
    total = 0.0
    for chunk in vector.split(CHUNK_SIZES[vector.device.type]):
        total += chunk.sum(dtype=torch.float64).item()
    return str([total, torch.linalg.vector_norm(vector).item()])


def check_upload(part: Part, name: str, value: Any, delta: Tensor) -> tuple[Tensor, float]:
    """What `finish` returned under a name, as tensor and factor."""
    tensor, factor = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    who = describe_hook(part, f"finish, for {name!r},")
    if part.uploads[name].scalar:
        tensor = torch.as_tensor(require_number(who, tensor), device=delta.device)
    else:
        tensor = require_vector_like(who, tensor, delta)
    return tensor, float(require_number(describe_hook(part, f"finish, as the factor on {name!r},"), factor))


class _ObservedVars(Vars):
    """The same variables; `observe` is called with each name that is set."""

    __slots__ = ("_observe",)
    _observe: Callable[[str], None]

    def __init__(self, variables: Vars, observe: Callable[[str], None]) -> None:
        object.__setattr__(self, "_observe", observe)
        object.__setattr__(self, "__dict__", vars(variables))

    def __setattr__(self, name: str, value: Any) -> None:
        self._observe(name)
        super().__setattr__(name, value)


class VariableOwners:
    """Which part sets which variable of the server or of a client: no two may set the same one."""

    def __init__(self, chain: tuple[Part, ...], kind: Literal["server", "client"]) -> None:
        self._kind = kind
        self._owners = {name: part for part in chain for name in getattr(part, kind)}
        """Of the variables that parts declare, and of transient ones once they are set."""

    def view(self, variables: Vars, part: Part) -> Vars:
        """The variables for a hook of this part."""

        def observe(name: str) -> None:
            owner = self._owners.setdefault(name, part)
            if owner is not part:
                raise HookContractError(
                    f"parts {part_name(owner)} and {part_name(part)} both set the {self._kind} variable {name!r};"
                    " rename it in one of them"
                )

        return _ObservedVars(variables, observe)


class AttributeMonitor:
    """Warns of a part that keeps something in itself: no checkpoint holds it, and no other rank has it."""

    def __init__(self, chain: tuple[Part, ...]) -> None:
        self._parts, self._first_ids, self._has_warned = chain, _attribute_ids(chain), False

    def warn_once(self) -> None:
        if self._has_warned:
            return
        changed = _attribute_ids(self._parts).items() - self._first_ids.items()
        if changed:
            self._has_warned = True
            (part, name), _ = min(changed)
            log.warning(
                "part %s changed its attribute %r in a round; no checkpoint holds it, and other ranks do not see it:"
                " keep state in variables that the part names in `server` or `client`",
                part,
                name,
            )


def _attribute_ids(chain: tuple[Part, ...]) -> dict[tuple[str, str], int]:
    return {(part_name(part), name): id(value) for part in chain for name, value in vars(part).items()}
