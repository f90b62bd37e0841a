"""What a hook of somebody's code gave, held against what it has to give; the message names both."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


class Mistake(ValueError):
    """A hook that did not give what it has to."""


def like(who: str, value: Any, x: Tensor) -> Tensor:
    """The value, if it is a vector like the model's."""
    if not isinstance(value, Tensor) or (value.shape, value.dtype, value.device) != (x.shape, x.dtype, x.device):
        raise Mistake(f"{who} gave {what(value)}, not a vector like the model, {what(x)}")
    return value


def number(who: str, value: Any) -> Any:
    """The value, if it is a number, as a tensor or of Python."""
    if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.dim() == 0)):
        raise Mistake(f"{who} gave {what(value)}, not a number")
    return value


def mapping(who: str, given: Any, declared: Iterable[str]) -> dict[str, Any]:
    """What was given by name, if the names are those that were declared."""
    if not isinstance(given, dict):
        raise Mistake(f"{who} gave {what(given)}, not a dict")
    if extra := sorted(map(str, given.keys() - set(declared))):
        raise Mistake(f"{who} gave {extra[0]!r}, which the part does not declare")
    if missing := sorted(set(declared) - given.keys()):
        raise Mistake(f"{who} did not give {missing[0]!r}, which the part declares")
    return given


def tensors(who: str, given: Any, declared: Iterable[str]) -> dict[str, Tensor]:
    for name, value in mapping(who, given, declared).items():
        if not isinstance(value, Tensor):
            raise Mistake(f"{who} gave {what(value)} for {name!r}, not a tensor")
    return given


def unchanged(who: str, value: Any, kind: Kind) -> None:
    """Values may change, the kind of a tensor may not."""
    if not isinstance(value, Tensor) or (tuple(value.shape), value.dtype) != kind:
        raise Mistake(f"{who} became {what(value)}; it began as {described(*kind)}")


def what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{described(tuple(value.shape), value.dtype)} on {value.device}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def described(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"a tensor of {str(dtype).removeprefix('torch.')} and shape {list(shape)}"
