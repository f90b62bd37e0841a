"""A validated configuration: defaults < YAML file < `key.sub=value`; strict at every level."""

from typing import Any

from pydantic import ValidationError

from fl_dist.algorithms import algorithms, build, parts
from fl_dist.callbacks import callbacks
from fl_dist.common.errors import ConfigError
from fl_dist.common.imports import UserImportError
from fl_dist.common.registry import BuilderError, Registry, StrictModel, UnknownNameError
from fl_dist.config.builder_sections import (
    BUILDER_SECTIONS,
    COMMON_KEYS,
    CallbackKeys,
    DiagnosticKeys,
    default_name,
    get_key,
)
from fl_dist.config.consistency import check_chain, check_consistency
from fl_dist.config.optimizer_keys import neutral_keys
from fl_dist.config.overrides import expand_names, merge_overrides
from fl_dist.config.schema import Config
from fl_dist.config.sources import NO_SOURCES, Location, Sources
from fl_dist.config.validation import explain, validate_keys
from fl_dist.diagnostics import diagnostics


def load(path: str | None, overrides: list[str]) -> Config:
    """The validated configuration of a file and overrides, with every default filled in."""
    return validate(*merge_overrides(path, overrides))


def validate(raw: dict[str, Any], sources: Sources = NO_SOURCES) -> Config:
    """The configuration, with the settings of its builders; ConfigError names the first key that is wrong."""
    root = Location((), sources)
    config = validate_keys(Config, expand_names(raw), root)
    builders = {
        section: _validate_builder(section, get_key(config, section), root.at(*section.split(".")))
        for section in BUILDER_SECTIONS
    }
    measured = {
        label: _validate_diagnostic(label, keys, root.at("diagnostics", label))
        for label, keys in config.diagnostics.items()
    }
    listed = [_validate_callback(entry, root.at("callbacks", k)) for k, entry in enumerate(config.callbacks)]
    config = _replace_keys(config, builders | {"diagnostics": measured, "callbacks": listed})
    config = _replace_keys(config, neutral_keys(config))
    check_consistency(config)
    return config


def _replace_keys(config: Config, values: dict[str, Any]) -> Config:
    """With other values of these keys, at the top level or in a section."""
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        inner = getattr(config, section).model_copy(update={name: value}) if section else value
        config = config.model_copy(update={section or name: inner})
    return config


def _validate_builder(section: str, keys: dict[str, Any], at: Location) -> dict[str, Any]:
    """Validate `{name: ..., settings}` against the signature of the builder of that name."""
    settings = dict(keys)
    if section == "algorithm":
        return _validate_algorithm(settings, at)
    common = _pop_common_keys(COMMON_KEYS[section], settings, at) if section in COMMON_KEYS else {}
    name = settings.pop("name", default_name(section))
    return {"name": name, **common, **_validate_settings(BUILDER_SECTIONS[section], name, settings, at, tuple(common))}


def _pop_common_keys(schema: type[StrictModel], settings: dict[str, Any], at: Location) -> dict[str, Any]:
    """The keys that every builder of a section has, taken out of its settings."""
    raw = {key: settings.pop(key) for key in schema.model_fields if key in settings}
    return validate_keys(schema, raw, at).model_dump()


def _validate_callback(entry: Any, at: Location) -> dict[str, Any]:
    """Validate a callback `name` or `{name: {optional: ..., settings}}`."""
    entry = {entry: {}} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or len(entry) != 1 or not isinstance(next(iter(entry.values())) or {}, dict):
        example = "such as tensorboard or {early_stopping: {patience: 30}}"
        raise ConfigError(f"{at.key} must be one callback with its settings, {example}")
    name, settings = next((name, dict(settings or {})) for name, settings in entry.items())
    common = _pop_common_keys(CallbackKeys, settings, at.at(name))
    return {name: {**common, **_validate_settings(callbacks, name, settings, at.at(name), ("optional",))}}


def _validate_diagnostic(label: str, keys: Any, at: Location) -> dict[str, Any]:
    """Validate a diagnostic `label: {name: ..., every: ..., settings}`."""
    settings = {} if keys is None else keys
    if not isinstance(settings, dict):
        raise ConfigError(f"{at.key} must be a mapping such as {{every: 10}}, {at.source}")
    settings = dict(settings)
    common = _pop_common_keys(DiagnosticKeys, settings, at)
    name = common["name"] or label
    checked = _validate_settings(diagnostics, name, settings, at, ("every",))
    for key in getattr(diagnostics[name], "algorithms", ()):
        methods = (checked[key] or {}).items()
        checked[key] = {inner: _validate_method(raw, at.at(key, inner)) for inner, raw in methods} or None
    return {**common, "name": name, **checked}


def _validate_method(raw: Any, at: Location) -> dict[str, Any]:
    """Validate one of several algorithms of a diagnostic, and that its parts fit together."""
    section = _validate_algorithm({"name": raw} if isinstance(raw, str) else dict(raw), at)
    check_chain(section, at.key)
    return section


def _validate_algorithm(settings: dict[str, Any], at: Location) -> dict[str, Any]:
    """Validate `{name: ..., settings}` or `{parts: [...]}`, each of them perhaps with further parts in `with`."""
    added = {"with": _validate_parts(settings.pop("with"), at.at("with"))} if "with" in settings else {}
    if "parts" in settings:
        chain = settings.pop("parts")
        if settings:
            others = ", ".join(f"{at.key}.{key}" for key in sorted(settings))
            raise ConfigError(
                f"{others}: not beside {at.key}.parts; replace the whole section: {at.key}={{parts: [...]}}"
            )
        return {"parts": _validate_parts(chain, at.at("parts")), **added}
    name = settings.pop("name", default_name("algorithm"))
    return {"name": name, **_validate_settings(algorithms, name, settings, at, ("with",)), **added}


def _validate_parts(chain: Any, at: Location) -> list[dict[str, Any]]:
    if not isinstance(chain, list):
        raise ConfigError(f"{at.key} must be a list such as [{{sam: {{rho: 0.05}}}}, {{scaffold: {{}}}}]")
    return [_validate_part({part: {}} if isinstance(part, str) else part, at.at(k)) for k, part in enumerate(chain)]


def _validate_part(part: Any, at: Location) -> dict[str, Any]:
    if not isinstance(part, dict) or len(part) != 1:
        raise ConfigError(f"{at.key} must be one part with its settings, such as {{sam: {{rho: 0.05}}}}")
    name, settings = next(iter(part.items()))
    if name in algorithms and name not in parts:
        own_parts = build({"name": name}).describe()
        raise ConfigError(f"{at.key}: {name} is an algorithm, not a part; its parts are {own_parts}")
    return {name: _validate_settings(parts, name, settings or {}, at.at(name))}


def _validate_settings(
    registry: Registry[Any], name: Any, settings: Any, at: Location, common: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The settings of a builder with its defaults; `common` are keys that its section has for every builder."""
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise ConfigError(f"{at.key}: expected a name and a mapping of settings, {at.source}")
    try:
        if clashes := sorted(registry.schema(name).model_fields.keys() & set(common)):
            raise BuilderError(
                f"{name}: its keyword {clashes[0]!r} has to have another name; {at.key}.{clashes[0]} is taken"
            )
        return registry.validate(name, settings)
    except (UnknownNameError, UserImportError, BuilderError) as e:
        raise ConfigError(f"{at.key}: {e} (set {at.at('name').source})") from e
    except ValidationError as e:
        raise ConfigError(explain(e, registry.schema(name), at, ("name", *common))) from None
