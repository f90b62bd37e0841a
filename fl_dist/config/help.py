"""What `--help` shows of the configuration: every key with type, default and one line.

python -m fl_dist.config.help   write the listing that `--help` shows if it names no builder
"""

import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fl_dist.algorithms import parts
from fl_dist.callbacks import callbacks
from fl_dist.common.files import write_atomically
from fl_dist.common.key_listing import KEY_LISTING
from fl_dist.common.registry import Registry, section_of
from fl_dist.config.arguments import add_search_paths, split_arguments
from fl_dist.config.builder_sections import BUILDER_SECTIONS, COMMON_KEYS, CallbackKeys, DiagnosticKeys
from fl_dist.config.overrides import merge_overrides
from fl_dist.config.schema import Config
from fl_dist.diagnostics import diagnostics


def help_lines(arguments: Sequence[str] = ()) -> Iterator[str]:
    """Every key or, if the command line names builders, theirs."""
    builders = _find_builders(arguments) if arguments else []
    lines = (
        itertools.chain.from_iterable(_builder_lines(*builder) for builder in builders) if builders else _all_lines()
    )
    yield from map(str.rstrip, lines)


def _find_builders(arguments: Sequence[str]) -> list[tuple[str, Registry[Any], str]]:
    """Section, registry and name of each builder that the command line names."""
    path, overrides = split_arguments(arguments)
    add_search_paths(path)
    raw, _ = merge_overrides(path, overrides)
    builders = []
    for section, registry in BUILDER_SECTIONS.items():
        keys = _find_section(raw, section)
        builders += [(section, registry, keys["name"])] if "name" in keys else []
        chain = [*(keys.get("parts") or []), *(keys.get("with") or [])] if section == "algorithm" else []
        builders += [("", parts, part if isinstance(part, str) else next(iter(part))) for part in chain]
    listed = raw.get("callbacks") or []
    return builders + [("", callbacks, entry if isinstance(entry, str) else next(iter(entry))) for entry in listed]


def _find_section(raw: Any, section: str) -> dict[str, Any]:
    """The mapping at this key; empty if there is none."""
    for step in section.split("."):
        raw = raw.get(step) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}


def _builder_lines(section: str, registry: Registry[Any], name: str) -> Iterator[str]:
    title = f"{section}.name={name}" if section else f"{registry.kind} {name}"
    yield f"{title}   {summary_of(registry[name])}".rstrip()
    prefix = f"{section}." if section else ""
    yield from _key_lines(registry.schema(name), prefix, indent="  ")
    if section in COMMON_KEYS:
        yield from _key_lines(COMMON_KEYS[section], prefix, indent="  ")


def summary_of(builder: Any) -> str:
    """The first paragraph of a builder's docstring, in one line."""
    return " ".join((builder.__doc__ or "").strip().split("\n\n")[0].split())  # not inherited, unlike inspect.getdoc


def _all_lines() -> Iterator[str]:
    yield from _key_lines(Config, "")
    for section, registry in BUILDER_SECTIONS.items():
        for name in registry:
            yield f"{section}.name={name}"
            yield from _key_lines(registry.schema(name), f"{section}.", indent="  ")
        if section in COMMON_KEYS:
            yield f"{section}, whatever its name"
            yield from _key_lines(COMMON_KEYS[section], f"{section}.", indent="  ")
        yield f"{section}.name=<module>:<name>   your own; --help {section}=<module>:<name> shows its settings"
    yield "diagnostics.<label>, measured during training; <label> is one of these, or any word with name="
    yield from _key_lines(DiagnosticKeys, "diagnostics.<label>.", indent="  ")
    for name in diagnostics:
        yield f"diagnostics.{name}   {summary_of(diagnostics[name])}"
        yield from _key_lines(diagnostics.schema(name), f"diagnostics.{name}.", indent="  ")
    yield "callbacks=[<callback>, {<callback>: {<settings>}}, ...], of these or <module>:<name>; each also has:"
    yield from _key_lines(CallbackKeys, "", indent="  ")
    for name in callbacks:
        yield f"  {name}   {summary_of(callbacks[name])}"
        yield from _key_lines(callbacks.schema(name), "", indent="    ")
    yield "algorithm.parts=[{<part>: {<settings>}}, ...], innermost first, or"
    yield "algorithm.with=[{<part>: {<settings>}}, ...], after the parts of the algorithm that is named, of:"
    for name in parts:
        yield f"  {name}"
        yield from _key_lines(parts.schema(name), "", indent="    ")


class KeyInfo(NamedTuple):
    """A key of a configuration, as people read it."""

    name: str
    """With dots, as on the command line."""
    type: str
    default: str
    meaning: str


def list_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[KeyInfo]:
    """Every key of a section, also those of the sections in it."""
    for name, field in schema.model_fields.items():
        kind, section = field.annotation, section_of(field.annotation)
        if section is not kind or section is None:
            default = "required" if field.default is PydanticUndefined else _format_default(field.default)
            yield KeyInfo(f"{prefix}{name}", type_name(kind), default, field.description or "")
        if section is not None:
            yield from list_keys(section, f"{prefix}{name}.")


def _key_lines(schema: type[BaseModel], prefix: str, indent: str = "") -> Iterator[str]:
    for name, kind, default, meaning in list_keys(schema, prefix):
        yield f"{indent + name:<34} {kind:<24} {default:<22} {meaning}"


def _format_default(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...").strip()


def type_name(kind: Any) -> str:
    """The name of a type in terms of YAML."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_name(inner[0])
    if origin is typing.Literal:
        return "|".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(type_name, inner))
    if origin is list:
        return f"[{type_name(inner[0])}]"
    if origin is tuple:
        return f"[{', '.join(map(type_name, inner))}]"
    if origin is dict or section_of(kind) is not None:
        return "mapping"
    names = {types.NoneType: "null", str: "text", bool: "true|false", Any: "any"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


if __name__ == "__main__":
    write_atomically(KEY_LISTING, "".join(f"{line}\n" for line in help_lines()).encode())
