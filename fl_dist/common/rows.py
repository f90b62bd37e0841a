"""Rows of data: one tensor, or several of equal length by name, such as ids and their attention mask."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Rows = Tensor | dict[str, Tensor]
"""A model gets one tensor as `module(x)`, several as `module(**x)`."""
R = TypeVar("R", bound=Rows)


def main_tensor(rows: Rows) -> Tensor:
    """The only tensor, or the first: its shape and type stand for the rows."""
    return rows if isinstance(rows, Tensor) else next(iter(rows.values()))


def tensors_of(rows: Rows) -> list[Tensor]:
    return [rows] if isinstance(rows, Tensor) else list(rows.values())


def map_rows(function: Callable[[Tensor], Tensor], rows: R) -> R:
    """The function of each tensor."""
    mapped: R = describe_rows(rows, function)
    return mapped


def count_rows(rows: Rows) -> int:
    return len(main_tensor(rows))


def count_bytes(rows: Rows) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(rows))


def select_rows(rows: R, numbers: Tensor) -> R:
    return map_rows(lambda tensor: tensor.index_select(0, numbers), rows)


def slice_rows(rows: R, part: slice) -> R:
    return map_rows(lambda tensor: tensor[part], rows)


def split_rows(rows: R, size: int) -> list[R]:
    """Pieces of `size` rows, in order."""
    return [slice_rows(rows, slice(first, first + size)) for first in range(0, count_rows(rows), size)]


def call_module(module: Callable[..., Any], rows: Rows) -> Any:
    """The module's output."""
    return module(rows) if isinstance(rows, Tensor) else module(**rows)


def describe_rows(rows: Rows, describe: Callable[[Tensor], Any]) -> Any:
    """A description of the tensor, or one of each by name."""
    return describe(rows) if isinstance(rows, Tensor) else {name: describe(own) for name, own in rows.items()}
