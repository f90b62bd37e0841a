"""A file and overrides as a validated configuration: defaults < YAML file < `key.sub=value`; strict at every level."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fl_dist.algorithms import algorithms, build, parts
from fl_dist.common.imports import BadImport, is_path
from fl_dist.common.paths import expand
from fl_dist.common.reading import DEEPEST, ConfigError, Unreadable, parse, read_yaml
from fl_dist.common.registry import BadBuilder, Registry, UnknownName
from fl_dist.common.words import nearest, shortened
from fl_dist.config.schema import COMMON, LAYOUT, MOST, Config, Watch
from fl_dist.core import Clash
from fl_dist.data import datasets
from fl_dist.data.augment import augmentations
from fl_dist.data.partition import partitions
from fl_dist.diagnostics import diagnostics
from fl_dist.models import models
from fl_dist.tasks import tasks

NAMED: dict[str, Registry[Any]] = {
    "task": tasks,
    "data": datasets,
    "augment": augmentations,
    "partition": partitions,
    "model": models,
    "algorithm": algorithms,
}


def load(path: str | None, overrides: list[str]) -> Config:
    """The validated configuration of a file and overrides, with every default filled in."""
    raw, where = merged(path, overrides)
    return validate(raw, where)


def merged(
    path: str | None, overrides: list[str], given: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[tuple[Any, ...], str]]:
    """What the file, or what is given, and the overrides say, and where each key was set; nothing is checked yet."""
    where: dict[tuple[Any, ...], str] = {(): path or "the configuration"}
    raw = read_yaml(path) if path else given or {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not {type(raw).__name__}")
    if swept := sorted(raw.keys() & {"grid", "list", "rows", "columns"}):
        raise ConfigError(f"{path} is a sweep (it has the key {swept[0]}): run it with python -m launch.sweep {path}")
    raw = raw | {section: {"name": raw[section]} for section in NAMED if isinstance(raw.get(section), str)}
    for override in _names_first(map(spelt_out, overrides)):
        _apply(raw, override, where)
    return raw, where


def _names_first(overrides: Iterable[str]) -> list[str]:
    """A name before the settings of its section: choosing another builder discards those of the old one."""
    ordered: list[str] = []
    for override in overrides:
        key = override.partition("=")[0]
        section, dot, last = key.rpartition(".")
        if dot and last == "name":
            before = [k for k, other in enumerate(ordered, 1) if other.partition("=")[0] in (section, key)]
            ordered.insert(max(before, default=0), override)
        else:
            ordered.append(override)
    return ordered


def spelt_out(override: str) -> str:
    """An override that names a builder in short, such as model=cnn, with its whole key."""
    key, equals, text = override.partition("=")
    short = key in NAMED and equals and not text.lstrip().startswith(("{", "[", "null"))
    return f"{key}.name={text}" if short else override


def validate(raw: dict[str, Any], where: dict[tuple[Any, ...], str] | None = None) -> Config:
    where = where or {(): "the configuration"}
    raw = raw | {section: {"name": raw[section]} for section in NAMED if isinstance(raw.get(section), str)}
    try:
        config = Config.model_validate(raw)
    except ValidationError as e:
        raise ConfigError(_explain(e.errors()[0], (), Config, where)) from None
    named = {section: _named(section, getattr(config, section), where) for section in NAMED}
    watched = {label: _watched(label, given, where) for label, given in config.diagnostics.items()}
    config = config.model_copy(update=named | {"diagnostics": watched})
    _cross_check(config)
    return config


def checked(schema: type[Any], given: Any, where: str) -> Any:
    """A mapping from a file, validated; the error names the key and the file."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must be a mapping of keys, not {type(given).__name__}")
    try:
        return schema.model_validate(given)
    except ValidationError as e:
        error = e.errors()[0]
        key = shortened(".".join(map(str, error["loc"])))
        if error["type"] == "extra_forbidden" and key in Config.model_fields:
            raise ConfigError(
                f"{key} in {where} is a key of a configuration: run one with python -m fl_dist.main"
            ) from None
        if error["type"] == "extra_forbidden":
            hint = nearest(str(error["loc"][-1]), _siblings(schema, error["loc"]))
            raise ConfigError(f"unknown key {key} in {where}; {hint}") from None
        raise ConfigError(f"{where}: {key}: {error['msg'].lower()}, got {shortened(repr(error['input']))}") from None


def import_paths(config: Config) -> set[str]:
    """The names in a configuration that the user's own code stands behind."""
    chosen = [getattr(config, section).get("name") for section in NAMED]
    chosen += [name for part in config.algorithm.get("parts", []) for name in part]
    return {name for name in chosen if is_path(name)}


def _apply(raw: dict[str, Any], override: str, where: dict[tuple[Any, ...], str]) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"override {shortened(repr(override))} is not of the form key.sub=value")
    try:
        value = parse(text)
    except Unreadable as e:
        raise ConfigError(f"override {shortened(repr(override))}: the value is not valid YAML: {e}") from None
    path = tuple(name.split("."))
    if len(path) > DEEPEST:
        raise ConfigError(f"override {shortened(repr(override))}: a key has no {len(path)} levels")
    node = raw
    for depth, step in enumerate(path[:-1]):
        if step not in node:
            where[path[: depth + 1]] = "the command line"
        node[step] = dict(node[step]) if isinstance(node.get(step), dict) else {}
        node = node[step]
    if path[-1] == "name" and path[0] in NAMED and node.get("name") != value:
        node.clear()
    node[path[-1]] = value
    where[path] = "the command line"


def _named(section: str, given: dict[str, Any], where: dict[tuple[Any, ...], str]) -> dict[str, Any]:
    """Validate `{name: ..., settings}` against the signature of the builder of that name."""
    registry, settings = NAMED[section], dict(given)
    if section == "algorithm":
        return _algorithm(settings, (section,), where)
    common = _common(section, settings, where)
    name = settings.pop("name", Config.model_fields[section].default["name"])
    return {"name": name, **common, **_validated(registry, name, settings, (section,), where, tuple(common))}


def _watched(label: str, given: Any, where: dict[tuple[Any, ...], str]) -> dict[str, Any]:
    """Validate a diagnostic `label: {name: ..., every: ..., settings}`."""
    path, given = ("diagnostics", label), {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f"{_dotted(path)} must be a mapping such as {{every: 10}}, in {_source(path, where)}")
    keys = Watch.model_fields
    try:
        watch = Watch.model_validate({k: given[k] for k in keys if k in given})
    except ValidationError as e:
        raise ConfigError(_explain(e.errors()[0], path, Watch, where)) from None
    name, settings = watch.name or label, {k: v for k, v in given.items() if k not in keys}
    checked = _validated(diagnostics, name, settings, path, where, ("every",))
    for key in getattr(diagnostics[name], "algorithms", ()):
        sections = (checked[key] or {}).items()
        checked[key] = {inner: _method(given, (*path, key, inner), where) for inner, given in sections} or None
    return {"name": name, "every": watch.every, **checked}


def _method(given: Any, path: tuple[Any, ...], where: dict[tuple[Any, ...], str]) -> dict[str, Any]:
    """Validate one of several algorithms of a diagnostic, and that its parts fit together."""
    section = _algorithm({"name": given} if isinstance(given, str) else dict(given), path, where)
    _build(section, path)
    return section


def _algorithm(settings: dict[str, Any], path: tuple[Any, ...], where: dict[tuple[Any, ...], str]) -> dict[str, Any]:
    """Validate `{name: ..., settings}` or `{parts: [...]}`."""
    if "parts" in settings:
        return {"parts": _parts(settings, path, where)}
    name = settings.pop("name", Config.model_fields["algorithm"].default["name"])
    return {"name": name, **_validated(algorithms, name, settings, path, where)}


def _build(section: dict[str, Any], path: tuple[Any, ...]) -> None:
    try:
        build(section)
    except (Clash, BadBuilder) as e:
        raise ConfigError(f"{_dotted(path)}: {e}") from None


def _common(section: str, settings: dict[str, Any], where: dict[tuple[Any, ...], str]) -> dict[str, Any]:
    """The keys that every builder of the section has, taken out of its settings."""
    if section not in COMMON:
        return {}
    keys = COMMON[section].model_fields
    try:
        return COMMON[section].model_validate({k: settings.pop(k) for k in keys if k in settings}).model_dump()
    except ValidationError as e:
        raise ConfigError(_explain(e.errors()[0], (section,), COMMON[section], where)) from None


def _parts(settings: dict[str, Any], at: tuple[Any, ...], where: dict[tuple[Any, ...], str]) -> list[dict[str, Any]]:
    chain, own = settings.pop("parts"), _dotted(at)
    if settings:
        raise ConfigError(f"{own}: give either a name or parts, not {sorted(settings)} beside parts")
    if not isinstance(chain, list):
        raise ConfigError(f"{own}.parts must be a list such as [{{sam: {{rho: 0.05}}}}, {{scaffold: {{}}}}]")
    checked = []
    for k, part in enumerate(chain):
        part = {part: {}} if isinstance(part, str) else part
        if not isinstance(part, dict) or len(part) != 1:
            raise ConfigError(f"{own}.parts.{k} must be one part with its settings, such as {{sam: {{rho: 0.05}}}}")
        (name, given), path = next(iter(part.items())), (*at, "parts", k)
        if name in algorithms and name not in parts:
            chain_of = build({"name": name}).describe()
            raise ConfigError(f"{own}.parts.{k}: {name} is an algorithm, not a part; its parts are {chain_of}")
        checked.append({name: _validated(parts, name, given or {}, (*path, name), where)})
    return checked


def _validated(
    registry: Registry[Any],
    name: Any,
    settings: Any,
    path: tuple[Any, ...],
    where: dict[tuple[Any, ...], str],
    also: tuple[str, ...] = (),
) -> dict[str, Any]:
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise ConfigError(f"{_dotted(path)}: expected a name and a mapping of settings, in {_source(path, where)}")
    try:
        if taken := sorted(registry.schema(name).model_fields.keys() & set(also)):
            raise BadBuilder(
                f"{name}: its keyword {taken[0]!r} has to have another name; {path[0]}.{taken[0]} is taken"
            )
        return registry.validate(name, settings)
    except (UnknownName, BadImport, BadBuilder) as e:
        raise ConfigError(f"{_dotted(path)}: {e} (set in {_source((*path, 'name'), where)})") from e
    except ValidationError as e:
        raise ConfigError(_explain(e.errors()[0], path, registry.schema(name), where, ("name", *also))) from None


def _cross_check(config: Config) -> None:
    c = config.clients
    if c.schedule is None and c.per_round > c.total:
        raise ConfigError(f"clients.per_round is {c.per_round}, more than the {c.total} of clients.total")
    if config.local.batch_size != "full" and not 1 <= config.local.batch_size <= MOST:
        raise ConfigError(f"local.batch_size must be full, or from 1 to {MOST:,}, not {config.local.batch_size}")
    _build(config.algorithm, ("algorithm",))
    _check_watched(config)
    given = schedule(config)
    fewest = c.per_round if given is None else min(map(len, given))
    if c.min_survivors > fewest:
        raise ConfigError(f"clients.min_survivors is {c.min_survivors}, but a round may have only {fewest} clients")


def _check_watched(config: Config) -> None:
    """That the clients which diagnostics name are there."""
    for label, given in config.diagnostics.items():
        for key in getattr(diagnostics[given["name"]], "clients", ()):
            if given[key] is not None and given[key] >= config.clients.total:
                known = f"there are clients 0 to {config.clients.total - 1}"
                raise ConfigError(f"diagnostics.{label}.{key} is {given[key]}; {known}")


def schedule(config: Config) -> list[list[int]] | None:
    """The explicit schedule, checked, or None."""
    given = config.clients.schedule
    if given is None:
        return None
    source = "clients.schedule" if not isinstance(given, str) else f"the schedule {shortened(given)}"
    rounds = read_yaml(expand(given)) if isinstance(given, str) else given
    is_table = isinstance(rounds, list) and all(isinstance(r, list) and all(type(c) is int for c in r) for r in rounds)
    if not is_table:
        raise ConfigError(f"{source} must be a list of lists of client ids, one list a round")
    if len(rounds) < config.rounds:
        raise ConfigError(f"{source} has {len(rounds)} rounds, but rounds is {config.rounds}")
    for index, clients in enumerate(rounds):
        if not clients or len(set(clients)) < len(clients):
            raise ConfigError(f"{source}: round {index} names {'no client' if not clients else 'a client twice'}")
        for client in clients:
            if not 0 <= client < config.clients.total:
                known = f"there are clients 0 to {config.clients.total - 1}"
                raise ConfigError(f"{source}: round {index} names client {shortened(client)}; {known}")
    return rounds


def _explain(
    error: ErrorDetails,
    path: tuple[Any, ...],
    schema: type[BaseModel],
    where: dict[tuple[Any, ...], str],
    also: tuple[str, ...] = (),
) -> str:
    """One line for the first validation error: key, file, what is wrong, what would be right."""
    location = tuple(step for step in error["loc"] if not (isinstance(step, str) and "[" in step))
    full = path + location
    at = f"{_dotted(full)} (set in {_source(full, where)})"
    if error["type"] == "extra_forbidden":
        valid = [*_siblings(schema, location), *also]
        return f"unknown key {at}; {nearest(str(location[-1]), valid)}"
    if error["type"] == "missing":
        return f"missing key {_dotted(full)}: {path[0] if path else 'the configuration'} needs it"
    return f"{at}: {error['msg'][0].lower()}{error['msg'][1:]}, got {shortened(repr(error['input']))}"


def _siblings(schema: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    for step in location[:-1]:
        inner = schema.model_fields[step].annotation if step in schema.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        schema = inner
    return list(schema.model_fields)


def _dotted(path: tuple[Any, ...]) -> str:
    return shortened(".".join(map(str, path)))


def _source(path: tuple[Any, ...], where: dict[tuple[Any, ...], str]) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in where:
            return where[path[:end]]
    return where[()]


def dump(config: Config) -> dict[str, Any]:
    """Plain data: what `config.yaml` in the run folder holds."""
    return config.model_dump()


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys whose values differ in a way that changes results so far, as `key: old -> new`."""
    before, after = dict(leaves(old)), dict(leaves(new))
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
    ignored = tuple(f"{k}." for k in LAYOUT)
    # No round depends on how many follow: rates, cohorts and batches come from the round's own number.
    ignored += ("rounds.",) if new["rounds"] > old["rounds"] else ()
    told = [k for k in changed if not f"{k}.".startswith(ignored)]
    return [f"{shortened(k)}: {shortened(before.get(k))} -> {shortened(after.get(k))}" for k in told]


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys with dots, and their values."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
