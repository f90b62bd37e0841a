"""The arguments of `fl_dist.run` as a configuration: a file or a mapping, and overrides that may be Python objects."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fl_dist.common.errors import ConfigError
from fl_dist.config.arguments import QUICKSTART, add_search_paths, default_run_name
from fl_dist.config.builder_sections import BUILDER_SECTIONS
from fl_dist.config.loading import validate
from fl_dist.config.overrides import merge_overrides
from fl_dist.config.schema import Config


def load_arguments(config: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Config:
    """The validated configuration, with a run folder."""
    path = str(config) if isinstance(config, str | Path) else str(QUICKSTART) if config is None else None
    add_search_paths(None if config is None else path)
    base = _to_plain_data(config) if isinstance(config, Mapping) else {}
    words = _override_words(overrides)
    validated = validate(*merge_overrides(path, words, base))
    if validated.run.dir is None:
        name = default_run_name(path or "run", [*_override_words(base), *words])
        validated = validated.model_copy(update={"run": validated.run.model_copy(update={"dir": f"runs/{name}"})})
    return validated


def _override_words(keys: Mapping[str, Any]) -> list[str]:
    """Keys as overrides of the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in _flatten(keys)]


def _flatten(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, as on the command line, and their values as plain data."""
    for key, value in keys.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and "parts" not in value:
            yield from _flatten(value, f"{name}.")
        else:
            is_builder = name in BUILDER_SECTIONS and not isinstance(value, Mapping)
            yield (f"{name}.name" if is_builder else name), _to_plain_data(value)


def _to_plain_data(value: Any) -> Any:
    """Data for YAML; functions and classes become the `module:name` by which they are imported."""
    if isinstance(value, Mapping):
        return {_to_plain_data(key): _to_plain_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_data(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    return _import_path(value) if callable(value) else value


def _import_path(builder: Callable[..., Any]) -> str:
    if not hasattr(builder, "__qualname__"):
        raise ConfigError(f"a {type(builder).__name__} cannot be named; give the function or class that builds it")
    if "<locals>" in builder.__qualname__:
        raise ConfigError(f"{builder.__qualname__} is defined inside a function and cannot be imported; move it out")
    return f"{builder.__module__}:{builder.__qualname__}"
