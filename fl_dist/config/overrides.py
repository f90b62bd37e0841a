"""A YAML file and overrides `key.sub=value` as one mapping, with the source of each key."""

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten
from fl_dist.common.yaml_reader import MAX_DEPTH, YamlError, parse_yaml, read_yaml
from fl_dist.config.builder_sections import BUILDER_SECTIONS
from fl_dist.config.schema import RENAMED_KEYS
from fl_dist.config.sources import COMMAND_LINE, NO_SOURCES, KeyPath, Sources


def merge_overrides(
    path: str | None, overrides: Iterable[str], base: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Sources]:
    """The keys of a file, or of a base, with overrides, and where each was set; nothing is validated yet."""
    sources: dict[KeyPath, str] = {(): path} if path else dict(NO_SOURCES)
    raw = read_yaml(path) if path else base or {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not {type(raw).__name__}")
    if sweep_keys := sorted(raw.keys() & {"grid", "list", "rows", "columns"}):
        raise ConfigError(f"{path} is a sweep (it has the key {sweep_keys[0]}): run it with fl-dist sweep {path}")
    raw = expand_names(raw)
    for override in _names_first(map(expand_override, overrides)):
        _apply(raw, override, sources)
        raw = expand_names(raw)
    return raw, sources


def expand_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Sections that only name a builder, such as `model: cnn`, as mappings; the name of a single callback as a list."""
    listed = {"callbacks": [raw["callbacks"]]} if isinstance(raw.get("callbacks"), str) else {}
    paths = (section.split(".") for section in BUILDER_SECTIONS)
    expanded: dict[str, Any] = functools.reduce(_expand_name, paths, raw | listed)
    return expanded


def _expand_name(node: Any, path: list[str]) -> Any:
    """With the builder at this path, if only its name is there, as a mapping."""
    if not path:
        return {"name": node} if isinstance(node, str) else node
    if not isinstance(node, dict) or path[0] not in node:
        return node
    return node | {path[0]: _expand_name(node[path[0]], path[1:])}


def expand_override(override: str) -> str:
    """An override that only names a builder, such as model=cnn, with its full key."""
    key, equals, text = override.partition("=")
    is_name = key in BUILDER_SECTIONS and equals and not text.lstrip().startswith(("{", "[", "null"))
    return f"{key}.name={text}" if is_name else override


def _names_first(overrides: Iterable[str]) -> list[str]:
    """A name before the settings of its section: choosing another builder discards those of the old one."""
    ordered: list[str] = []
    for override in overrides:
        key = override.partition("=")[0]
        section, dot, last = key.rpartition(".")
        if dot and last == "name":
            earlier = [k for k, other in enumerate(ordered, 1) if other.partition("=")[0] in (section, key)]
            ordered.insert(max(earlier, default=0), override)
        else:
            ordered.append(override)
    return ordered


def _apply(raw: dict[str, Any], override: str, sources: dict[KeyPath, str]) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shorten(repr(override))} is not of the form key.sub=value")
    try:
        value = parse_yaml(text)
    except YamlError as e:
        raise ConfigError(f"override {shorten(repr(override))}: the value is not valid YAML: {e}") from None
    path = tuple(key.split("."))
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"override {shorten(repr(override))}: a key has no {len(path)} levels")
    node = raw
    for depth, step in enumerate(path[:-1], 1):
        if step not in node:
            sources[path[:depth]] = COMMAND_LINE
        node[step] = dict(node[step]) if isinstance(node.get(step), dict) else {}
        node = node[step]
    if path[-1] == "name" and ".".join(path[:-1]) in BUILDER_SECTIONS and node.get("name") != value:
        node.clear()
    node[path[-1]] = value
    sources[path] = COMMAND_LINE


def read_recorded_config(path: str | Path) -> Any:
    """What the config.yaml of a run folder holds, with today's names of its keys."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{path} is not a regular file; restore the configuration of the run")
    raw = read_yaml(path)
    for old, new in RENAMED_KEYS.items():
        (section, key), new_key = old.split("."), new.partition(".")[2]
        keys = raw.get(section) if isinstance(raw, dict) else None
        if isinstance(keys, dict) and key in keys:
            raw[section] = {new_key if name == key else name: value for name, value in keys.items()}
    return raw
