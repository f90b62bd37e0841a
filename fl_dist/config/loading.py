"""A validated configuration: defaults < YAML file < `key.sub=value`; strict at every level."""

import functools
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fl_dist.algorithms import algorithms, build, parts
from fl_dist.algorithms.core import Algorithm, ChainError, part_name
from fl_dist.algorithms.privacy_accountant import has_opacus
from fl_dist.callbacks import callbacks
from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten, suggest
from fl_dist.common.hook_contract import HookContractError
from fl_dist.common.imports import UserImportError, is_import_path
from fl_dist.common.paths import expand_path
from fl_dist.common.registry import BuilderError, Registry, UnknownNameError, section_of
from fl_dist.common.yaml_reader import read_yaml
from fl_dist.config.optimizer_keys import check_optimizer_keys, neutral_keys
from fl_dist.config.overrides import NO_SOURCES, KeyPath, Sources, expand_names, merge_overrides, source_of
from fl_dist.config.schema import (
    BUILDER_SECTIONS,
    COMMON_KEYS,
    LAYOUT_KEYS,
    MAX_COUNT,
    RENAMED_KEYS,
    CallbackKeys,
    Config,
    DiagnosticKeys,
)
from fl_dist.diagnostics import build_diagnostics, diagnostics
from fl_dist.optimizers import depends_on_rounds

M = TypeVar("M", bound=BaseModel)
UNION_MEMBER = re.compile(r"int$|float$|bool$|str$|constrained-|.*\[")
"""How pydantic calls the types of a key that takes several."""
MISSING_REQUIREMENT = {
    "uniform weights": "bounds each client's part in the mean, which needs equal weights; set server.weighting=uniform",
    "all updates": "needs every client's update; set comm.reduce=gather",
    "opacus": "needs the package opacus for its accountant: pip install 'fl_dist[privacy]'",
}

YAML_TYPES = {
    "list_type": "a list such as [a, b]",
    "tuple_type": "a list such as [a, b]",
    "dict_type": "a mapping such as {key: value}",
    "model_type": "a mapping such as {key: value}",
}


def load(path: str | None, overrides: list[str]) -> Config:
    """The validated configuration of a file and overrides, with every default filled in."""
    return validate(*merge_overrides(path, overrides))


def validate(raw: dict[str, Any], sources: Sources = NO_SOURCES) -> Config:
    """The configuration, with the settings of its builders; ConfigError names the first key that is wrong."""
    config: Config = _parse(Config, expand_names(raw), (), sources)
    builders = {section: _validate_builder(section, get_key(config, section), sources) for section in BUILDER_SECTIONS}
    measured = {label: _validate_diagnostic(label, keys, sources) for label, keys in config.diagnostics.items()}
    listed = [_validate_callback(number, entry, sources) for number, entry in enumerate(config.callbacks)]
    config = _replace_keys(config, builders | {"diagnostics": measured, "callbacks": listed})
    config = _replace_keys(config, neutral_keys(config))
    _check_consistency(config)
    return config


def get_key(config: Config, key: str) -> Any:
    """The value of a key with dots."""
    return functools.reduce(getattr, key.split("."), config)


def _replace_keys(config: Config, values: dict[str, Any]) -> Config:
    """With other values of these keys, at the top level or in a section."""
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        inner = getattr(config, section).model_copy(update={name: value}) if section else value
        config = config.model_copy(update={section or name: inner})
    return config


def validate_mapping(schema: type[M], raw: Any, source: str) -> M:
    """A mapping from a file, validated; the error names the key and the file."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{source} must be a mapping of keys, not {type(raw).__name__}")
    try:
        return schema.model_validate(raw)
    except ValidationError as e:
        error = e.errors()[0]
        key = _dotted(error["loc"])
        if error["type"] != "extra_forbidden":
            message = f"{source}: {key}: {_expected(error)}, got {shorten(repr(error['input']))}"
        elif key in RENAMED_KEYS:
            message = f"{key} is now {RENAMED_KEYS[key]} (set in {source})"
        elif key in Config.model_fields:
            message = f"{key} in {source} is a key of a configuration: run one with fl-dist run"
        else:
            hint = suggest(str(error["loc"][-1]), _siblings(schema, error["loc"]))
            message = f"unknown key {key} in {source}; {hint}"
        raise ConfigError(message) from None


def user_import_paths(config: Config) -> set[str]:
    """The names `module:name` in a configuration."""
    names = [get_key(config, section).get("name") for section in BUILDER_SECTIONS]
    names += [name for key in ("parts", "with") for part in config.algorithm.get(key, []) for name in part]
    return {name for name in names if is_import_path(name)}


def _parse(schema: type[Any], raw: dict[str, Any], path: KeyPath, sources: Sources) -> Any:
    try:
        return schema.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(_explain(_clearest(e.errors()), path, schema, sources)) from None


def _validate_builder(section: str, keys: dict[str, Any], sources: Sources) -> dict[str, Any]:
    """Validate `{name: ..., settings}` against the signature of the builder of that name."""
    settings, path = dict(keys), tuple(section.split("."))
    if section == "algorithm":
        return _validate_algorithm(settings, path, sources)
    common = _pop_common_keys(COMMON_KEYS[section], settings, path, sources) if section in COMMON_KEYS else {}
    name = settings.pop("name", get_key(Config(), section)["name"])
    checked = _validate_settings(BUILDER_SECTIONS[section], name, settings, path, sources, tuple(common))
    return {"name": name, **common, **checked}


def _pop_common_keys(schema: type[Any], settings: dict[str, Any], path: KeyPath, sources: Sources) -> dict[str, Any]:
    """The keys that every builder of a section has, taken out of its settings."""
    raw = {key: settings.pop(key) for key in schema.model_fields if key in settings}
    common: dict[str, Any] = _parse(schema, raw, path, sources).model_dump()
    return common


def _validate_callback(number: int, entry: Any, sources: Sources) -> dict[str, Any]:
    """Validate a callback `name` or `{name: {optional: ..., settings}}`."""
    path, entry = ("callbacks", number), {entry: {}} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or len(entry) != 1 or not isinstance(next(iter(entry.values())) or {}, dict):
        example = "such as tensorboard or {early_stopping: {patience: 30}}"
        raise ConfigError(f"{_dotted(path)} must be one callback with its settings, {example}")
    name, settings = next((name, dict(settings or {})) for name, settings in entry.items())
    common = _pop_common_keys(CallbackKeys, settings, (*path, name), sources)
    return {name: {**common, **_validate_settings(callbacks, name, settings, (*path, name), sources, ("optional",))}}


def _validate_diagnostic(label: str, keys: Any, sources: Sources) -> dict[str, Any]:
    """Validate a diagnostic `label: {name: ..., every: ..., settings}`."""
    path, keys = ("diagnostics", label), {} if keys is None else keys
    if not isinstance(keys, dict):
        raise ConfigError(f"{_dotted(path)} must be a mapping such as {{every: 10}}, {source_of(path, sources)}")
    common = DiagnosticKeys.model_fields
    own: DiagnosticKeys = _parse(DiagnosticKeys, {k: keys[k] for k in common if k in keys}, path, sources)
    name, settings = own.name or label, {k: v for k, v in keys.items() if k not in common}
    checked = _validate_settings(diagnostics, name, settings, path, sources, ("every",))
    for key in getattr(diagnostics[name], "algorithms", ()):
        methods = (checked[key] or {}).items()
        checked[key] = {inner: _validate_method(raw, (*path, key, inner), sources) for inner, raw in methods} or None
    return {"name": name, "every": own.every, **checked}


def _validate_method(raw: Any, path: KeyPath, sources: Sources) -> dict[str, Any]:
    """Validate one of several algorithms of a diagnostic, and that its parts fit together."""
    section = _validate_algorithm({"name": raw} if isinstance(raw, str) else dict(raw), path, sources)
    _check_chain(section, path)
    return section


def _validate_algorithm(settings: dict[str, Any], path: KeyPath, sources: Sources) -> dict[str, Any]:
    """Validate `{name: ..., settings}` or `{parts: [...]}`, each of them perhaps with further parts in `with`."""
    added = {"with": _validate_parts(settings.pop("with"), (*path, "with"), sources)} if "with" in settings else {}
    if "parts" in settings:
        chain, prefix = settings.pop("parts"), _dotted(path)
        if settings:
            others = ", ".join(f"{prefix}.{key}" for key in sorted(settings))
            raise ConfigError(
                f"{others}: not beside {prefix}.parts; replace the whole section: {prefix}={{parts: [...]}}"
            )
        return {"parts": _validate_parts(chain, (*path, "parts"), sources), **added}
    name = settings.pop("name", Config.model_fields["algorithm"].default["name"])
    return {"name": name, **_validate_settings(algorithms, name, settings, path, sources, ("with",)), **added}


def _validate_parts(chain: Any, path: KeyPath, sources: Sources) -> list[dict[str, Any]]:
    prefix = _dotted(path)
    if not isinstance(chain, list):
        raise ConfigError(f"{prefix} must be a list such as [{{sam: {{rho: 0.05}}}}, {{scaffold: {{}}}}]")
    checked = []
    for k, part in enumerate(chain):
        part = {part: {}} if isinstance(part, str) else part
        if not isinstance(part, dict) or len(part) != 1:
            raise ConfigError(f"{prefix}.{k} must be one part with its settings, such as {{sam: {{rho: 0.05}}}}")
        name, part_settings = next(iter(part.items()))
        if name in algorithms and name not in parts:
            own_parts = build({"name": name}).describe()
            raise ConfigError(f"{prefix}.{k}: {name} is an algorithm, not a part; its parts are {own_parts}")
        at = (*path, k, name)
        checked.append({name: _validate_settings(parts, name, part_settings or {}, at, sources)})
    return checked


def _validate_settings(
    registry: Registry[Any], name: Any, settings: Any, path: KeyPath, sources: Sources, common: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The settings of a builder with its defaults; `common` are keys that its section has for every builder."""
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise ConfigError(f"{_dotted(path)}: expected a name and a mapping of settings, {source_of(path, sources)}")
    try:
        if clashes := sorted(registry.schema(name).model_fields.keys() & set(common)):
            raise BuilderError(
                f"{name}: its keyword {clashes[0]!r} has to have another name; {_dotted(path)}.{clashes[0]} is taken"
            )
        return registry.validate(name, settings)
    except (UnknownNameError, UserImportError, BuilderError) as e:
        raise ConfigError(f"{_dotted(path)}: {e} (set {source_of((*path, 'name'), sources)})") from e
    except ValidationError as e:
        message = _explain(_clearest(e.errors()), path, registry.schema(name), sources, ("name", *common))
        raise ConfigError(message) from None


def _check_consistency(config: Config) -> None:
    """Keys that depend on each other."""
    clients = config.clients
    if clients.schedule is None and clients.per_round > clients.total:
        raise ConfigError(f"clients.per_round is {clients.per_round}, more than the {clients.total} of clients.total")
    if config.local.batch_size != "full" and not 1 <= config.local.batch_size <= MAX_COUNT:
        raise ConfigError(f"local.batch_size must be full, or from 1 to {MAX_COUNT:,}, not {config.local.batch_size}")
    if config.local.batch_size == "full" and config.local.compile:
        raise ConfigError("local.compile needs batches of one size; set local.batch_size to a number")
    algorithm = _check_chain(config.algorithm, ("algorithm",))
    check_optimizer_keys(config)
    _check_diagnostics(config)
    _check_placement(config)
    schedule = read_schedule(config)
    smallest = clients.per_round if schedule is None else min(map(len, schedule))
    _check_requirements(config, algorithm, smallest)
    if clients.min_survivors > smallest:
        raise ConfigError(
            f"clients.min_survivors is {clients.min_survivors}, but a round may have only {smallest} clients"
        )


def _check_chain(section: dict[str, Any], path: KeyPath) -> Algorithm:
    try:
        return build(section)
    except (ChainError, HookContractError, BuilderError) as e:
        raise ConfigError(f"{_dotted(path)}: {e}") from None


def _check_requirements(config: Config, algorithm: Algorithm, smallest: int) -> None:
    """What parts need of other keys; `smallest`: clients of the smallest round."""
    have = {
        "uniform weights": config.server.weighting == "uniform",
        "all updates": config.comm.reduce == "gather",
        "opacus": has_opacus(),
    }
    for part in algorithm.parts:
        for need in (need for need in part.needs if not have.get(need, True)):
            raise ConfigError(f"algorithm: part {part_name(part)} {MISSING_REQUIREMENT[need]}")
        if part.min_clients > smallest:
            raise ConfigError(
                f"algorithm: part {part_name(part)} needs {part.min_clients} clients, but a round may have only"
                f" {smallest}; raise clients.per_round, or change the part's settings"
            )


def _check_diagnostics(config: Config) -> None:
    """Whether there are the clients and the rows that diagnostics measure."""
    for label, keys in config.diagnostics.items():
        for key in getattr(diagnostics[keys["name"]], "clients", ()):
            if keys[key] is not None and keys[key] >= config.clients.total:
                raise ConfigError(f"diagnostics.{label}.{key} is {keys[key]}; {_client_range(config)}")
        if "validation rows" in getattr(diagnostics[keys["name"]], "needs", ()) and not config.clients.validation:
            raise ConfigError(
                f"diagnostics.{label} measures rows that clients hold out, but clients.validation is 0; set it when a"
                " run starts, such as clients.validation=0.2"
            )


def _check_placement(config: Config) -> None:
    """Whether the rows that the run needs are where it needs them."""
    if config.clients.placement != "process":
        if config.data["local"]:
            raise ConfigError("data.local is true, which needs clients.placement=process")
        return
    if config.data["local"] and config.partition["name"] != "given":
        raise ConfigError("data.local is true, so each client has the rows of its own files; set partition=given")
    if config.clients.validation and config.evaluate.where == "server":
        raise ConfigError("evaluate.where is server, but only workers have validation rows; set it to auto or workers")
    if config.data["local"] and not config.clients.validation and config.evaluate.where == "workers":
        raise ConfigError("evaluate.where is workers, but only rank 0 has test rows; set it to auto or server")
    for label, _, diagnostic in build_diagnostics(config.diagnostics):
        if "train_client" in diagnostic.needs:
            raise ConfigError(
                f"diagnostics.{label} trains a client on rank 0, which has no client's rows; remove it, or set "
                "clients.placement=balanced"
            )


def _client_range(config: Config) -> str:
    return f"there are clients 0 to {config.clients.total - 1}"


def read_schedule(config: Config) -> list[list[int]] | None:
    """The explicit schedule, checked, or None."""
    schedule = config.clients.schedule
    if schedule is None:
        return None
    source = f"the schedule {shorten(schedule)}" if isinstance(schedule, str) else "clients.schedule"
    rounds = _read_schedule_file(expand_path(schedule)) if isinstance(schedule, str) else schedule
    is_table = isinstance(rounds, list) and all(isinstance(r, list) and all(type(c) is int for c in r) for r in rounds)
    if not is_table:
        raise ConfigError(f"{source} must be a list of lists of client ids, one list per round")
    if len(rounds) < config.rounds:
        raise ConfigError(f"{source} has {len(rounds)} rounds, but rounds is {config.rounds}")
    for index, clients in enumerate(rounds):
        if not clients or len(set(clients)) < len(clients):
            raise ConfigError(f"{source}: round {index} names {'no client' if not clients else 'a client twice'}")
        for client in clients:
            if not 0 <= client < config.clients.total:
                raise ConfigError(f"{source}: round {index} names client {shorten(client)}; {_client_range(config)}")
    return rounds


def _read_schedule_file(path: Path) -> Any:
    """Validation and the experiment both ask for it: a file is read again only if it has changed."""
    stat = os.stat(path) if os.path.exists(path) else None
    return _read_cached(path, stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=1)
def _read_cached(path: Path, version: tuple[int, ...] | None) -> Any:
    return read_yaml(path)


def _explain(
    error: ErrorDetails, path: KeyPath, schema: type[BaseModel], sources: Sources, common: tuple[str, ...] = ()
) -> str:
    """One line for a validation error: key, file, what is wrong, what would be right."""
    location = _keys_of(error)
    full = path + location
    key, source = _dotted(full), f"(set {source_of(full, sources)})"
    if error["type"] == "extra_forbidden" and key in RENAMED_KEYS:
        return f"{key} is now {RENAMED_KEYS[key]} {source}"
    if error["type"] == "extra_forbidden":
        if schema is Config and len(location) == 1 and (nested := _keys_of_sections(str(location[0]))):
            return f"unknown key {key} {source}; did you mean {nested}?"
        siblings = [*_siblings(schema, location), *(common if len(location) == 1 else ())]
        return f"unknown key {key} {source}; {suggest(str(location[-1]), siblings)}"
    if error["type"] == "missing":
        return f"missing key {key}: {_dotted(path) or 'the configuration'} needs it"
    return f"{key} {source}: {_expected(error)}, got {shorten(repr(error['input']))}"


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


def _dotted(path: KeyPath) -> str:
    return shorten(".".join(map(str, path)))


def dump(config: Config) -> dict[str, Any]:
    """Plain data: what `config.yaml` in the run folder holds."""
    return config.model_dump()


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys whose values differ in a way that changes results so far, as `key: old -> new`."""
    before, after = dict(flatten_keys(old)), dict(flatten_keys(new))
    defaults = dict(flatten_keys(dump(validate({}))))
    before = {k: defaults.get(k) for k in after} | before  # an older version recorded fewer keys
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
    ignored = tuple(f"{k}." for k in LAYOUT_KEYS)
    # Cohorts and batches depend on the round's own number, rates only with some schedules on how many follow.
    scheduled = [
        f"{section}.schedule" for section in ("local", "server") if depends_on_rounds(new[section]["schedule"])
    ]
    reasons = {"rounds": f", used by {' and '.join(scheduled)}" if scheduled else ", which may only be raised"}
    ignored += ("rounds.",) if new["rounds"] > old["rounds"] and not scheduled else ()
    changed = [k for k in changed if not f"{k}.".startswith(ignored)]
    return [f"{shorten(k)}: {shorten(before.get(k))} -> {shorten(after.get(k))}{reasons.get(k, '')}" for k in changed]


def flatten_keys(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys with dots, and their values."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from flatten_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
