"""Text as plain data: JSON, or YAML with the types of its version 1.2; bounded, and every error is one line."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from fl_dist.common.errors import ConfigError, UserError
from fl_dist.common.formatting import shorten

MAX_DEPTH = 50
"""Levels of nested lists and mappings; deeper files are no configurations."""
MAX_FILE_BYTES = 64_000_000
"""Enough for a schedule of a million rounds."""

# libyaml, where PyYAML was built with it, is ten times as fast; only its events are used, which are the same.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_END_EVENTS = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


class YamlError(UserError):
    """Text that is not plain data; the message says what is wrong in which line."""


def read_yaml(path: str | Path) -> Any:
    """The value in a YAML or JSON file; an empty file is an error."""
    try:
        value = parse_yaml(_read_text(path))
    except OSError as e:
        raise ConfigError(f"cannot read {shorten(path)}: {e.strerror or e}") from None
    except YamlError as e:
        raise ConfigError(f"{shorten(path)} is not valid YAML: {e}") from None
    if value is None:
        raise ConfigError(f"{shorten(path)} is empty")
    return value


def _read_text(path: str | Path) -> str:
    with open(path, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise YamlError(f"it is larger than {MAX_FILE_BYTES // 10**6} MB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise YamlError(f"byte {e.start} is not UTF-8 text") from None


def parse_yaml(text: str) -> Any:
    """The value of a text; None if it is empty."""
    if text.lstrip()[:1] in ("{", "[", '"'):
        # What looks like JSON may be YAML after all, whose parser also says in which line an error is.
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
            if not _is_too_deep(value):
                return value
    try:
        return _build(text)
    except yaml.MarkedYAMLError as e:
        raise _error_at(e.problem_mark or e.context_mark, str(e.problem or e.context)) from None
    except (yaml.YAMLError, UnicodeEncodeError):
        raise YamlError("it holds characters that are not text") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key is given twice")
    return mapping


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for node in level for child in _children(node)]
    return bool(level)


def _children(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def _build(text: str) -> Any:
    """The value of a YAML document, built from its events: no recursion, no tags, nothing that grows."""
    documents: list[Any] = []
    containers: list[Any] = [documents]
    keys: list[str | None] = [None]
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, _END_EVENTS):
            containers.pop()
            keys.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        _check_event(event, len(containers), len(documents))
        value, container = _value(event), containers[-1]
        if isinstance(container, list):
            container.append(value)
        elif keys[-1] is None:
            keys[-1] = _key(event, container)
            continue
        else:
            container[keys[-1]], keys[-1] = value, None
        if not isinstance(event, yaml.ScalarEvent):
            containers.append(value)
            keys.append(None)
    return documents[0] if documents else None


def _check_event(event: Any, depth: int, documents: int) -> None:
    if isinstance(event, yaml.AliasEvent):
        raise _error_at(event.start_mark, f"aliases such as *{event.anchor} are not read; write the value out")
    if event.tag is not None:
        raise _error_at(event.start_mark, f"tags such as {event.tag} are not read; write the plain value")
    if depth == 1 and documents:
        raise _error_at(event.start_mark, "a second document begins; put it into a file of its own")
    if depth > MAX_DEPTH + 1:
        raise _error_at(event.start_mark, f"more than {MAX_DEPTH} levels of lists and mappings")


def _key(event: Any, mapping: dict[str, Any]) -> str:
    """The text of a key, whatever it looks like: as in JSON, every key is text."""
    if not isinstance(event, yaml.ScalarEvent):
        raise _error_at(event.start_mark, "a key must be a single word or text; quote values that begin with { or [")
    if event.value in mapping:
        raise _error_at(event.start_mark, f"the key {shorten(event.value)} is given twice")
    return event.value


def _value(event: Any) -> Any:
    if isinstance(event, yaml.ScalarEvent):
        return _parse_scalar(event) if event.implicit[0] else event.value
    return {} if isinstance(event, yaml.MappingStartEvent) else []


# The core schema of YAML 1.2: 010 is ten, and 1:30, 1_000 and yes are text.
_CONSTANTS = {
    word: value
    for value, words in {None: "null Null NULL ~", True: "true True TRUE", False: "false False FALSE"}.items()
    for word in words.split()
} | {"": None}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_PREFIXED_INTEGER = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _parse_scalar(event: Any) -> Any:
    text = event.value
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _PREFIXED_INTEGER.fullmatch(text):
            return int(text, 0)
    except ValueError:  # Python's limit on digits
        raise _error_at(event.start_mark, f"the number {shorten(text)} is too long") from None
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _NOT_FINITE.fullmatch(text) else text


def _error_at(mark: Any, problem: str) -> YamlError:
    position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return YamlError(f"{position}{shorten(problem, 200)}")


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else, and writes repeated values out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NUMBER = re.compile(f"^(?:{_INTEGER.pattern}|{_PREFIXED_INTEGER.pattern}|{_FLOAT.pattern})$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def to_yaml(data: Any) -> str:
    """Text that `parse_yaml` reads as the same data."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False))
