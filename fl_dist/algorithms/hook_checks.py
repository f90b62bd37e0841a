"""Whether the hooks of parts keep their contract while a round runs."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_dist.algorithms.hook_types import Vars
from fl_dist.algorithms.part import Part, part_name
from fl_dist.common.hook_contract import HookContractError, require_number, require_vector_like

log = logging.getLogger(__name__)


def describe_hook(part: Part, hook: str) -> str:
    """A hook as the beginning of a message."""
    return f"part {part_name(part)}: {hook}"


def apply_hook(part: Part, hook: str, delta: Tensor, *arguments: Any) -> Tensor:
    """What the hook makes of the vector `delta`, which it must not modify."""
    version, who = delta._version, describe_hook(part, hook)
    result = require_vector_like(who, getattr(part, hook)(delta, *arguments), delta)
    if delta._version != version:
        raise HookContractError(f"{who} modified `delta` in place; compute a new tensor from it")
    return result


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
    """The same variables as `i`; `observe` is called with each name that is set."""

    __slots__ = ("_observe",)
    _observe: Callable[[str], None]

    def __init__(self, i: Vars, observe: Callable[[str], None]) -> None:
        object.__setattr__(self, "_observe", observe)
        object.__setattr__(self, "__dict__", vars(i))

    def __setattr__(self, name: str, value: Any) -> None:
        self._observe(name)
        super().__setattr__(name, value)


class TransientOwners:
    """Which part sets which transient client variable: no two may set the same one."""

    def __init__(self, kept: tuple[str, ...]) -> None:
        """`kept`: the variables that are not transient."""
        self._kept = kept
        self._owners: dict[str, Part] = {}

    def view(self, i: Vars, part: Part) -> Vars:
        """`i` for a hook of this part."""

        def observe(name: str) -> None:
            owner = part if name in self._kept else self._owners.setdefault(name, part)
            if owner is not part:
                raise HookContractError(
                    f"parts {part_name(owner)} and {part_name(part)} both set the transient client variable {name!r};"
                    " rename it in one of them"
                )

        return _ObservedVars(i, observe)


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
