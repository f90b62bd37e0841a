"""What `--help` says of the configuration: every key with type, default and one line."""

import types
import typing
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fl_dist.config.loading import NAMED
from fl_dist.config.schema import Config
from fl_dist.core import parts


def help_lines() -> Iterator[str]:
    yield from _section(Config, "")
    for section, registry in NAMED.items():
        for name in registry:
            yield f"{section}.name={name}"
            yield from _section(registry.schema(name), f"{section}.", indent="  ")
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
