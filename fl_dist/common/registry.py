"""Named builders whose signatures are their configuration schemas.

Keyword-only parameters are what a user may set; the others are what the program supplies, by name. Besides the builders
that are registered, every `module:name` that can be imported is one.
"""

import importlib
import inspect
import json
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.errors import PydanticUserError

from fl_dist.common.errors import UserError, describe_error, error_message
from fl_dist.common.formatting import shorten, suggest
from fl_dist.common.imports import import_builder, is_import_path

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class StrictModel(BaseModel):
    """A configuration section: unknown keys, wrong types and numbers that are not finite are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, or may hold."""
    kinds = [annotation, *typing.get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


class UnknownNameError(UserError):
    """No builder of that name."""


class BuilderError(UserError):
    """A builder whose signature or result is not what it has to be."""


class Registry(Generic[T]):
    """The builders of one kind: data sets, partitions, models, tasks, parts or algorithms."""

    def __init__(self, kind: str, product: Any = None, supplied: tuple[str, ...] = ()) -> None:
        """`product`: the type that a builder has to return; `supplied`: arguments that the program can pass to it."""
        self.kind, self.product, self.supplied = kind, product, supplied
        self._builders: dict[str, Callable[..., T]] = {}
        self._names: dict[Any, str] = {}
        self._schemas: dict[str, type[StrictModel]] = {}

    def register(self, builder: F) -> F:
        """Decorator: make a function or class available under its own name, in lower case."""
        return self.register_as(builder.__name__.lower())(builder)

    def register_as(self, name: str) -> Callable[[F], F]:
        """Decorator: make a function or class available under this name."""

        def decorate(builder: F) -> F:
            assert name not in self._builders, f"{self.kind} {name!r} is registered twice"
            self._builders[name] = builder
            self._names.setdefault(builder, name)
            return builder

        return decorate

    def name_of(self, builder: Any) -> str | None:
        """The name under which a builder is registered."""
        return self._names.get(builder)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._builders))

    def __getitem__(self, name: str) -> Callable[..., T]:
        if is_import_path(name):
            return import_builder(name)
        if name not in self._builders:
            hint = suggest(name, self._builders)
            end = "" if hint.endswith("?") else "."
            raise UnknownNameError(
                f"unknown {self.kind} {shorten(repr(name))}; {hint}{end} One of your own is named module:name"
            )
        return self._builders[name]

    def schema(self, name: str) -> type[StrictModel]:
        """The pydantic model of the builder's keyword-only parameters."""
        if is_import_path(name):  # a notebook may redefine it
            return _schema(name, self[name], self.supplied)
        if name not in self._schemas:
            self._schemas[name] = _schema(name, self[name], self.supplied)
        return self._schemas[name]

    def validate(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings as plain data with defaults filled in, or a pydantic error."""
        return self._parse(name, settings).model_dump(mode="json")

    def _parse(self, name: str, settings: dict[str, Any]) -> StrictModel:
        # As JSON: strict, and yet text may become a path or a member of an enumeration, and a list a tuple.
        return self.schema(name).model_validate_json(json.dumps(settings))

    def takes(self, name: str) -> set[str]:
        """The arguments that the builder expects from the program."""
        return {p.name for p in _parameters(self[name]) if not _is_setting(p)}

    def build(self, name: str, settings: dict[str, Any], **supplied: Any) -> T:
        parsed = self._parse(name, settings)
        values = {field: getattr(parsed, field) for field in type(parsed).model_fields}
        arguments = {argument: supplied[argument] for argument in self.takes(name) & supplied.keys()}
        result = self._call(name, arguments | values)
        if self.product is not None and not isinstance(result, self.product):
            product = self.product.__qualname__
            raise BuilderError(f"{self.kind} {name} gave {shorten(repr(result))}; expected: {product}")
        return result

    def _call(self, name: str, arguments: dict[str, Any]) -> T:
        try:
            return self[name](**arguments)
        except (ValueError, OSError, MemoryError):
            raise  # a message for people
        except (Exception, SystemExit) as e:
            if not is_import_path(name):
                raise
            raise BuilderError(f"{self.kind} {name} failed: {describe_error(e)}") from e


def import_submodules(package: str) -> None:
    """Import every module of a package except __main__, so that their builders register themselves."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")


def _parameters(builder: Callable[..., Any]) -> list[inspect.Parameter]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(builder).parameters.values() if p.kind not in variable]


def _is_setting(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.KEYWORD_ONLY


def _schema(name: str, builder: Callable[..., Any], supplied: tuple[str, ...]) -> type[StrictModel]:
    try:
        parameters, hints = _parameters(builder), _type_hints(builder)
        settings = [p for p in parameters if _is_setting(p)]
        _check_parameters(name, parameters, hints, supplied)
        fields: dict[str, Any] = {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in settings}
        return create_model("settings", __base__=StrictModel, **fields)
    except (NameError, TypeError, PydanticUserError) as e:
        raise BuilderError(f"{name}: its signature is no list of settings: {error_message(e)}") from e


def _check_parameters(
    name: str, parameters: list[inspect.Parameter], hints: dict[str, Any], supplied: tuple[str, ...]
) -> None:
    for parameter in parameters:
        if _is_setting(parameter) and parameter.name not in hints:
            example = f"{parameter.name}: int = 3"
            raise BuilderError(f"{name}: its keyword {parameter.name!r} has no type; write one, as in {example}")
        if not _is_setting(parameter) and parameter.name not in supplied:
            known = f"one of those that the program supplies ({', '.join(supplied)})" if supplied else "supplied"
            raise BuilderError(
                f"{name}: its parameter {parameter.name!r} is not {known}; put it behind a * if it is a setting"
            )


def _type_hints(builder: Callable[..., Any]) -> dict[str, Any]:
    function: Any = builder
    if isinstance(builder, type):
        function = builder.__init__  # type: ignore[misc]
    elif not inspect.isroutine(builder):
        function = type(builder).__call__
    return typing.get_type_hints(function, include_extras=True)
