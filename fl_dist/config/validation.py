"""Keys against their schema; an error names the key, where it was set, and what would be right."""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten, suggest
from fl_dist.common.registry import section_of
from fl_dist.config.schema import RENAMED_KEYS, Config
from fl_dist.config.sources import KeyPath, Location

M = TypeVar("M", bound=BaseModel)
UNION_MEMBER = re.compile(r"int$|float$|bool$|str$|constrained-|.*\[")
"""How pydantic calls the types of a key that takes several."""

YAML_TYPES = {
    "list_type": "a list such as [a, b]",
    "tuple_type": "a list such as [a, b]",
    "dict_type": "a mapping such as {key: value}",
    "model_type": "a mapping such as {key: value}",
}


def validate_keys(schema: type[M], raw: dict[str, Any], location: Location) -> M:
    """The keys of a section; ConfigError names the first that is wrong."""
    try:
        return schema.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(explain(e, schema, location)) from None


def validate_mapping(schema: type[M], raw: Any, source: str) -> M:
    """A mapping from a file that is not a configuration."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{source} must be a mapping of keys, not {type(raw).__name__}")
    return validate_keys(schema, raw, Location((), {(): source}))


def explain(error: ValidationError, schema: type[BaseModel], location: Location, common: tuple[str, ...] = ()) -> str:
    """One line for a validation error; `common` are keys that are valid besides those of the schema."""
    details = _clearest(error.errors())
    steps = _keys_of(details)
    at = location.at(*steps)
    if details["type"] == "missing":
        return f"missing key {at.key}: {location.key or location.sources[()]} needs it"
    if details["type"] != "extra_forbidden":
        return f"{at.key} (set {at.source}): {_expected(details)}, got {shorten(repr(details['input']))}"
    if at.key in RENAMED_KEYS:
        return f"{at.key} is now {RENAMED_KEYS[at.key]} (set {at.source})"
    if at.key in Config.model_fields:
        return f"{at.key} (set {at.source}) is a key of a configuration: run one with fl-dist run"
    if schema is Config and len(steps) == 1 and (nested := _keys_of_sections(at.key)):
        return f"unknown key {at.key} (set {at.source}); did you mean {nested}?"
    siblings = [*_siblings(schema, steps), *(common if len(steps) == 1 else ())]
    return f"unknown key {at.key} (set {at.source}); {suggest(str(steps[-1]), siblings)}"


def _expected(error: ErrorDetails) -> str:
    """What a value should be, in the words of YAML instead of Python's or JSON's."""
    if error["type"] in YAML_TYPES:
        return f"input should be {YAML_TYPES[error['type']]}"
    return f"{error['msg'][0].lower()}{error['msg'][1:]}"


def _keys_of_sections(name: str) -> str:
    """Keys of this name in the sections of a configuration, for a reader who left the section out."""
    sections = {key: section_of(field.annotation) for key, field in Config.model_fields.items()}
    return " or ".join(f"{key}.{name}" for key, section in sections.items() if section and name in section.model_fields)


def _clearest(errors: list[ErrorDetails]) -> ErrorDetails:
    """The first; of a key that takes several types, the error for the one that the value has."""
    key = _keys_of(errors[0])
    of_key = [error for error in errors if _keys_of(error)[: len(key)] == key]
    return max(of_key, key=lambda error: (not error["type"].endswith(("_type", "literal_error")), len(error["loc"])))


def _keys_of(error: ErrorDetails) -> KeyPath:
    """Where the error is, without the types among which a key may choose."""
    return tuple(step for step in error["loc"] if not (isinstance(step, str) and UNION_MEMBER.match(step)))


def _siblings(schema: type[BaseModel], location: KeyPath) -> list[str]:
    """The keys that are valid where an unknown one stands."""
    for step in location[:-1]:
        inner = section_of(schema.model_fields[step].annotation) if step in schema.model_fields else None
        if inner is None:
            return []
        schema = inner
    return list(schema.model_fields)
