"""What `--help` says of the configuration: every key with type, default and one line."""

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fl_dist.common.registry import Registry
from fl_dist.config.arguments import divide, look_around
from fl_dist.config.loading import NAMED, merged
from fl_dist.config.schema import COMMON, Config, Watch
from fl_dist.core import parts
from fl_dist.diagnostics import diagnostics


def help_lines(words: Sequence[str] = ()) -> Iterator[str]:
    """Every key; if a command line names builders, theirs."""
    named = _named(words) if words else []
    for section, registry, name in named:
        yield from _builder(section, registry, name)
    if not named:
        yield from _everything()


def _named(words: Sequence[str]) -> list[tuple[str, Registry[Any], str]]:
    path, overrides = divide(words)
    look_around(path)
    raw, _ = merged(path, overrides)
    found = []
    for section, registry in NAMED.items():
        given = raw.get(section, {})
        given = {"name": given} if isinstance(given, str) else given
        found += [(section, registry, given["name"])] if isinstance(given, dict) and "name" in given else []
        chain = given.get("parts", []) if section == "algorithm" and isinstance(given, dict) else []
        found += [("", parts, part if isinstance(part, str) else next(iter(part))) for part in chain]
    return found


def _builder(section: str, registry: Registry[Any], name: str) -> Iterator[str]:
    described = _described(registry[name])
    yield f"{section}.name={name}   {described}".rstrip() if section else f"part {name}   {described}".rstrip()
    prefix = f"{section}." if section else ""
    yield from _section(registry.schema(name), prefix, indent="  ")
    if section in COMMON:
        yield from _section(COMMON[section], prefix, indent="  ")


def _described(builder: Any) -> str:
    return (builder.__doc__ or "").strip().split("\n")[0]  # its own, not that of a parent


def _everything() -> Iterator[str]:
    yield from _section(Config, "")
    for section, registry in NAMED.items():
        for name in registry:
            yield f"{section}.name={name}"
            yield from _section(registry.schema(name), f"{section}.", indent="  ")
        if section in COMMON:
            yield f"{section}, whatever its name"
            yield from _section(COMMON[section], f"{section}.", indent="  ")
        yield f"{section}.name=<module>:<name>   your own; --help {section}=<module>:<name> shows its settings"
    yield "diagnostics.<label>, measured on the way; <label> is one of these, or any word with name="
    yield from _section(Watch, "diagnostics.<label>.", indent="  ")
    for name in diagnostics:
        yield f"diagnostics.{name}   {_described(diagnostics[name])}"
        yield from _section(diagnostics.schema(name), f"diagnostics.{name}.", indent="  ")
    yield "algorithm.parts=[{<part>: {<settings>}}, ...], innermost first, of:"
    for name in parts:
        yield f"  {name}"
        yield from _section(parts.schema(name), "", indent="    ")


def _section(schema: type[BaseModel], prefix: str, indent: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _section(kind, f"{prefix}{name}.", indent)
        else:
            default = "required" if field.default is PydanticUndefined else _plain(field.default)
            yield f"{indent + prefix + name:<34} {type_name(kind):<24} {default:<22} {field.description or ''}"


def _plain(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...").strip()


def type_name(kind: Any) -> str:
    """A type as a user of YAML would call it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_name(inner[0])
    if origin is typing.Literal:
        return "|".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(type_name, inner))
    if origin is list:
        return f"[{type_name(inner[0])}]"
    if origin is dict:
        return "mapping"
    return {types.NoneType: "null", str: "text", bool: "true|false"}.get(kind, getattr(kind, "__name__", str(kind)))
