"""Marks, and parameter lists of which `make test` runs examples."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive
timing = pytest.mark.timing


def examples(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """All values as parameters; `make test` runs only those in `chosen`."""
    return [value if value in chosen else _exhaustive(value) for value in values]


def _exhaustive(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=exhaustive)
