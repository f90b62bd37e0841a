"""Checks of what a hook returned against what it has to return; the message names both."""

import difflib
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fl_dist.common.errors import UserError

TensorKind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


class HookContractError(UserError):
    """A hook did not return what it has to."""


def check_hook_names(who: str, instance: object, base: type) -> None:
    """A misspelt hook would never be called."""
    hooks = [name for name, value in vars(base).items() if callable(value) and not name.startswith("_")]
    own = {name for cls in type(instance).__mro__ if cls not in base.__mro__ for name in vars(cls)}
    for name in sorted(own - set(hooks)):
        close = difflib.get_close_matches(name, hooks, n=1, cutoff=0.8)
        if close and callable(getattr(instance, name)):
            raise HookContractError(f"{who} has a method {name!r}, which is not a hook; did you mean {close[0]!r}?")


def require_vector_like(who: str, value: Any, x: Tensor) -> Tensor:
    """The value, if it is a vector like the model's."""
    if not isinstance(value, Tensor) or (value.shape, value.dtype, value.device) != (x.shape, x.dtype, x.device):
        raise HookContractError(f"{who} gave {describe_value(value)}, not a vector like the model, {describe_value(x)}")
    return value


def require_number(who: str, value: Any) -> Any:
    """The value, if it is a number: Python's or a tensor without dimensions."""
    if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.dim() == 0)):
        raise HookContractError(f"{who} gave {describe_value(value)}, not a number")
    return value


def require_names(who: str, values: Any, declared: Iterable[str]) -> dict[str, Any]:
    """The values by name, if the names are the declared ones."""
    if not isinstance(values, dict):
        raise HookContractError(f"{who} gave {describe_value(values)}, not a dict")
    if extra := sorted(map(str, values.keys() - set(declared))):
        raise HookContractError(f"{who} gave {extra[0]!r}, which the part does not declare")
    if missing := sorted(set(declared) - values.keys()):
        raise HookContractError(f"{who} did not give {missing[0]!r}, which the part declares")
    return values


def require_tensors(who: str, values: Any, declared: Iterable[str]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = require_names(who, values, declared)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise HookContractError(f"{who} gave {describe_value(value)} for {name!r}, not a tensor")
    return named


def require_same_kind(who: str, value: Any, kind: TensorKind) -> None:
    """The values of a tensor may change, its shape and type may not."""
    if not isinstance(value, Tensor) or (tuple(value.shape), value.dtype) != kind:
        raise HookContractError(f"{who} became {describe_value(value)}; it began as {describe_tensor(*kind)}")


def describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{describe_tensor(tuple(value.shape), value.dtype)} on {value.device}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def describe_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"a tensor of {str(dtype).removeprefix('torch.')} and shape {list(shape)}"
