"""Named builders whose signatures are their configuration schemas.

Keyword-only parameters are what a user may set; the others are what the program supplies, by name. Besides the builders
that are registered, every `module:name` that can be imported is one.
"""

import inspect
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.errors import PydanticUserError

from fl_dist.common.imports import imported, is_path, told
from fl_dist.common.words import message, nearest, shortened

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Strict(BaseModel):
    """A configuration section: unknown keys, wrong types and numbers that are not finite are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class UnknownName(ValueError):
    """No builder of that name."""


class BadBuilder(ValueError):
    """A builder whose signature or product is not what it has to be."""


class Registry(Generic[T]):
    """The builders of one kind: data sets, partitions, models, tasks, parts or algorithms."""

    def __init__(self, kind: str, product: Any = None, supplied: tuple[str, ...] = ()) -> None:
        """`product`: what a builder has to return; `supplied`: what the program can give it."""
        self.kind, self.product, self.supplied = kind, product, supplied
        self._builders: dict[str, Callable[..., T]] = {}
        self._schemas: dict[str, type[Strict]] = {}

    def register(self, builder: F) -> F:
        """Decorator: make a function or class available under its own name, in lower case."""
        return self.register_as(builder.__name__.lower())(builder)

    def register_as(self, name: str) -> Callable[[F], F]:
        """Decorator: make a function or class available under this name."""

        def registered(builder: F) -> F:
            assert name not in self._builders, f"{self.kind} {name!r} is registered twice"
            self._builders[name] = builder
            return builder

        return registered

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._builders))

    def __getitem__(self, name: str) -> Callable[..., T]:
        if is_path(name):
            return imported(name)
        if name not in self._builders:
            hint = nearest(name, self._builders)
            raise UnknownName(
                f"unknown {self.kind} {shortened(repr(name))}; {hint}, or module:name for one of your own"
            )
        return self._builders[name]

    def schema(self, name: str) -> type[Strict]:
        """The pydantic model of the builder's keyword-only parameters."""
        if is_path(name):  # whose file may change
            return _schema(name, self[name], self.supplied)
        if name not in self._schemas:
            self._schemas[name] = _schema(name, self[name], self.supplied)
        return self._schemas[name]

    def validate(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings as plain data with defaults filled in, or a pydantic error."""
        return self._checked(name, settings).model_dump(mode="json")

    def _checked(self, name: str, settings: dict[str, Any]) -> Strict:
        # As JSON: strict, and yet text may become a path or a member of an enumeration, and a list a tuple.
        return self.schema(name).model_validate_json(json.dumps(settings))

    def takes(self, name: str) -> set[str]:
        """What the builder wants of the program."""
        return {p.name for p in _parameters(self[name]) if not _is_setting(p)}

    def build(self, name: str, settings: dict[str, Any], **supplied: Any) -> T:
        checked = self._checked(name, settings)
        values = {field: getattr(checked, field) for field in type(checked).model_fields}
        made = self._call(name, {wanted: supplied[wanted] for wanted in self.takes(name)} | values)
        if self.product is not None and not isinstance(made, self.product):
            product = self.product.__qualname__
            raise BadBuilder(f"{self.kind} {name} gave {shortened(repr(made))}; it has to be a {product}")
        return made

    def _call(self, name: str, arguments: dict[str, Any]) -> T:
        try:
            return self[name](**arguments)
        except (ValueError, OSError, MemoryError):
            raise  # a message for people
        except (Exception, SystemExit) as e:
            if not is_path(name):
                raise
            raise BadBuilder(f"{self.kind} {name} failed: {told(e)}") from e


def _parameters(builder: Callable[..., Any]) -> list[inspect.Parameter]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(builder).parameters.values() if p.kind not in variable]


def _is_setting(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.KEYWORD_ONLY


def _schema(name: str, builder: Callable[..., Any], supplied: tuple[str, ...]) -> type[Strict]:
    try:
        parameters, hints = _parameters(builder), _hints(builder)
        settings = [p for p in parameters if _is_setting(p)]
        _check(name, parameters, hints, supplied)
        fields: dict[str, Any] = {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in settings}
        return create_model("settings", __base__=Strict, **fields)
    except (NameError, TypeError, PydanticUserError) as e:
        raise BadBuilder(f"{name}: its signature is no list of settings: {message(e)}") from e


def _check(name: str, parameters: list[inspect.Parameter], hints: dict[str, Any], supplied: tuple[str, ...]) -> None:
    for parameter in parameters:
        if _is_setting(parameter) and parameter.name not in hints:
            example = f"{parameter.name}: int = 3"
            raise BadBuilder(f"{name}: its keyword {parameter.name!r} has no type; write one, as in {example}")
        if not _is_setting(parameter) and parameter.name not in supplied:
            known = f"one of those that the program supplies ({', '.join(supplied)})" if supplied else "supplied"
            raise BadBuilder(
                f"{name}: its parameter {parameter.name!r} is not {known}; put it behind a * if it is a setting"
            )


def _hints(builder: Callable[..., Any]) -> dict[str, Any]:
    function: Any = builder
    if isinstance(builder, type):
        function = builder.__init__  # type: ignore[misc]
    elif not inspect.isroutine(builder):
        function = type(builder).__call__
    return typing.get_type_hints(function, include_extras=True)
