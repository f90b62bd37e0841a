"""Text as plain data: JSON, or YAML with the types of its version 1.2; bounded, and every error is one line."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from fl_dist.common.words import shortened

DEEPEST = 50
"""Levels of lists and mappings within each other; what is deeper is no configuration."""
LARGEST = 64_000_000
"""Bytes of a file; a schedule of a million rounds fits."""

# libyaml, where PyYAML was built with it, is ten times as fast; only its events are used, which are the same.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_ENDS = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key, where it was set and a remedy."""


class Unreadable(ValueError):
    """Text that is not plain data; the message says what is wrong in which line."""


def read_yaml(path: str | Path) -> Any:
    """What a file of YAML or JSON holds, which is not nothing."""
    try:
        value = parse(_text(path))
    except OSError as e:
        raise ConfigError(f"cannot read {shortened(path)}: {e.strerror or e}") from None
    except Unreadable as e:
        raise ConfigError(f"{shortened(path)} is not valid YAML: {e}") from None
    if value is None:
        raise ConfigError(f"{shortened(path)} is empty")
    return value


def _text(path: str | Path) -> str:
    with open(path, "rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST // 10**6} MB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise Unreadable(f"byte {e.start} is not UTF-8 text") from None


def parse(text: str) -> Any:
    """The value that a text stands for; None if it is empty."""
    if text.lstrip()[:1] in ("{", "[", '"'):
        # Much of what looks like JSON is only YAML, which also says in which line an error is.
        with contextlib.suppress(json.JSONDecodeError, RecursionError, NotJson):
            value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
            if not _too_deep(value):
                return value
    try:
        return _built(text)
    except yaml.MarkedYAMLError as e:
        raise _at(e.problem_mark or e.context_mark, str(e.problem or e.context)) from None
    except (yaml.YAMLError, UnicodeEncodeError):
        raise Unreadable("it holds characters that are not text") from None


class NotJson(Exception):
    """Text that only YAML can read, or refuse with its line."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise NotJson
    return made


def _constant(name: str) -> Any:
    raise NotJson


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise NotJson from None


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [child for node in level for child in _children(node)]
    return bool(level)


def _children(node: Any) -> Any:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def _built(text: str) -> Any:
    """The value of a document of YAML, built from its events: no recursion, no tags, nothing that grows."""
    documents: list[Any] = []
    inside: list[Any] = [documents]
    keys: list[str | None] = [None]
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, _ENDS):
            inside.pop()
            keys.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        _check(event, len(inside), len(documents))
        value, holder = _value(event), inside[-1]
        if isinstance(holder, list):
            holder.append(value)
        elif keys[-1] is None:
            keys[-1] = _key(event, holder)
            continue
        else:
            holder[keys[-1]], keys[-1] = value, None
        if not isinstance(event, yaml.ScalarEvent):
            inside.append(value)
            keys.append(None)
    return documents[0] if documents else None


def _check(event: Any, depth: int, documents: int) -> None:
    if isinstance(event, yaml.AliasEvent):
        raise _at(event.start_mark, f"aliases such as *{event.anchor} are not read; write the value out")
    if event.tag is not None:
        raise _at(event.start_mark, f"tags such as {event.tag} are not read; write the plain value")
    if depth == 1 and documents:
        raise _at(event.start_mark, "a second document begins; put it into a file of its own")
    if depth > DEEPEST + 1:
        raise _at(event.start_mark, f"more than {DEEPEST} levels of lists and mappings")


def _key(event: Any, holder: dict[str, Any]) -> str:
    """The text of a key, whatever it looks like: as in JSON, every key is text."""
    if not isinstance(event, yaml.ScalarEvent):
        raise _at(event.start_mark, "a key must be a single word or text; quote values that begin with { or [")
    if event.value in holder:
        raise _at(event.start_mark, f"the key {shortened(event.value)} is given twice")
    return event.value


def _value(event: Any) -> Any:
    if isinstance(event, yaml.ScalarEvent):
        return _plain(event) if event.implicit[0] else event.value
    return {} if isinstance(event, yaml.MappingStartEvent) else []


# The core schema of YAML 1.2: 010 is ten, and 1:30, 1_000 and yes are text.
_WORDS = {
    w: v
    for v, ws in {None: "null Null NULL ~", True: "true True TRUE", False: "false False FALSE"}.items()
    for w in ws.split()
} | {"": None}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _plain(event: Any) -> Any:
    text = event.value
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _BASED.fullmatch(text):
            return int(text, 0)
    except ValueError:  # Python's limit on digits
        raise _at(event.start_mark, f"the number {shortened(text)} is too long") from None
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else text


def _at(mark: Any, problem: str) -> Unreadable:
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return Unreadable(f"{where}{shortened(problem, 200)}")


class _Dumper(yaml.SafeDumper):
    """Quotes the text that either version of YAML would take for something else, and writes repeated values out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NUMBER = re.compile(f"^(?:{_INTEGER.pattern}|{_BASED.pattern}|{_FLOAT.pattern})$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def as_yaml(data: Any) -> str:
    """Text that `parse` reads as the same data."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False))
