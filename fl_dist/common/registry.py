"""Named builders whose signatures are their configuration schemas.

Positional parameters are what the program supplies; keyword-only parameters are what a user may set.
"""

import difflib
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, create_model

from fl_dist.common.words import shortened

LONGEST_WORD = 100
"""Letters in which a misspelt word is compared with others: each costs time."""

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Strict(BaseModel):
    """A configuration section: unknown keys, wrong types and numbers that are not finite are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class UnknownName(ValueError):
    """No builder of that name."""


class Registry(Generic[T]):
    """The builders of one kind: data sets, partitions, models, parts or algorithms."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._builders: dict[str, Callable[..., T]] = {}
        self._schemas: dict[str, type[Strict]] = {}

    def register(self, builder: F) -> F:
        """Decorator: make a function or class available under its own name, in lower case."""
        name = builder.__name__.lower()
        assert name not in self._builders, f"{self.kind} {name!r} is registered twice"
        self._builders[name] = builder
        return builder

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._builders))

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name not in self._builders:
            raise UnknownName(f"unknown {self.kind} {shortened(repr(name))}; {nearest(name, self._builders)}")
        return self._builders[name]

    def schema(self, name: str) -> type[Strict]:
        """The pydantic model of the builder's keyword-only parameters."""
        if name not in self._schemas:
            self._schemas[name] = _schema(name, self[name])
        return self._schemas[name]

    def validate(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings with defaults filled in, or a pydantic error."""
        return self.schema(name).model_validate(settings).model_dump()

    def build(self, name: str, settings: dict[str, Any], *supplied: Any) -> T:
        return self[name](*supplied, **self.validate(name, settings))


def nearest(word: str, valid: typing.Iterable[str]) -> str:
    """A hint for a misspelt word: the nearest valid one, or all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(word[:LONGEST_WORD], valid, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid) or 'none'}"


def _schema(name: str, builder: Callable[..., Any]) -> type[Strict]:
    function = builder.__init__ if isinstance(builder, type) else builder  # type: ignore[misc]
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        p.name: (hints[p.name], ... if p.default is p.empty else p.default)
        for p in inspect.signature(builder).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    return create_model(name, __base__=Strict, **fields)
