"""Runs with their places in a table: from a sweep's file, or from folders whose configurations differ."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_dist.common.errors import ConfigError, error_message
from fl_dist.common.formatting import suggest
from fl_dist.common.paths import expand_path
from fl_dist.config.comparison import flatten_keys
from fl_dist.config.overrides import read_recorded_config
from fl_dist.config.schema import LAYOUT_KEYS
from fl_dist.config.sweep_file import Sweep
from fl_dist.config.sweeps import COLUMN, LIST, ROW, SweepRun, axis_names, matches_any, read_sweep
from fl_dist.metrics.file import read_records
from fl_dist.results.run_result import RunResult
from fl_dist.storage.run_folder import CONFIG, METRICS, find_runs

SEED = "seed"
_LAYOUT_PREFIXES = tuple(f"{key}." for key in LAYOUT_KEYS)


@dataclass
class Collection:
    """The runs of a table, and the order of its rows and columns."""

    name: str
    runs: list[RunResult]
    sweep: Sweep
    published: Path | None = None
    """File that may hold published numbers to compare with."""
    unreadable: dict[Path, str] = field(default_factory=dict)
    """Runs that were left out, and why."""

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(run.row for run in self.runs))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(run.column for run in self.runs))

    def cell(self, row: str, column: str) -> list[RunResult]:
        return [run for run in self.runs if (run.row, run.column) == (row, column)]

    def published_file(self, chosen: str | None) -> Path | None:
        """The chosen file, or the one beside the sweep if it exists."""
        if chosen:
            return expand_path(chosen)
        return self.published if self.published and self.published.exists() else None


def collect(
    words: Sequence[str],
    only: Sequence[str] = (),
    lenient: bool = False,
    archives: Sequence[Path] = (),
    own_first: bool = False,
) -> Collection:
    """The runs of `SWEEP.yaml key=value ...` or of folders; `lenient` leaves out runs that cannot be read.

    `archives`: folders with runs of the sweep, which are read instead of the runs' own folders or, with `own_first`, if
    these have no records.
    """
    if not words:
        raise ConfigError("name a sweep's file, or folders of runs")
    first = Path(words[0])
    if first.is_dir() or not first.suffix:
        if archives:
            raise ConfigError(f"an archive has the runs of a sweep; name its file instead of {first}")
        return _collect_folders(words, only, lenient)
    sweep, sweep_runs = read_sweep(words[0], words[1:], only)
    row, columns = _table_axes(sweep)
    runs = [
        RunResult(
            run.name,
            run.labels[row],
            ", ".join(run.labels[axis] for axis in columns),
            _find_run(run, archives, own_first),
            run.rounds,
            run.config.evaluate.final_window,
            _table_settings(run.config.model_dump(mode="json")),
        )
        for run in sweep_runs
    ]
    if archives and not any((archive / run.name).exists() for archive in archives for run in runs):
        raise ConfigError(f"there is no run of {first} in {', '.join(archive.name for archive in archives)}")
    return Collection(first.stem, runs, sweep, first.parent / "published.csv")


def _find_run(run: SweepRun, archives: Sequence[Path], own_first: bool) -> Path:
    """The first folder of the run that has records."""
    own = [run.run] if own_first or not archives else []
    *earlier, last = [*own, *(archive / run.name for archive in archives)]
    return next((folder for folder in earlier if read_records(folder / METRICS)), last)


def _table_axes(sweep: Sweep) -> tuple[str, list[str]]:
    """The axis of the rows and those of the columns; the table averages over seeds."""
    names = [axis for axis in axis_names(sweep) if axis != SEED] or [SEED]
    row = next((axis for axis in (ROW, LIST, "algorithm", "algorithm.name") if axis in names), names[0])
    rest = [axis for axis in names if axis != row]
    return row, sorted(rest, key=lambda axis: axis != COLUMN)


def _collect_folders(folders: Sequence[str], only: Sequence[str], lenient: bool) -> Collection:
    if overrides := [word for word in folders if "=" in word and not Path(word).exists()]:
        raise ConfigError(f"{overrides[0]} overrides nothing: existing runs have their settings; name folders only")
    paths = {run.resolve(): run for folder in folders for run in find_runs(Path(folder))}
    if not paths:
        raise ConfigError(f"no run in {', '.join(folders)}; a run's folder has a {CONFIG}")
    configs, unreadable = _read_configs(paths.values(), lenient)
    runs = _place_runs(configs)
    selected = [run for run in runs if matches_any(run.path.name, (run.name, run.row, run.column), only)]
    if not selected:
        raise ConfigError(f"no run is {' or '.join(map(repr, only))}; {suggest(only[0], {run.row for run in runs})}")
    return Collection("runs", selected, Sweep(), unreadable=unreadable)


def _place_runs(configs: dict[Path, dict[str, Any]]) -> list[RunResult]:
    """Rows are algorithms with their settings, columns whatever else differs between the runs."""
    settings = {path: _table_settings(config) for path, config in configs.items()}
    by_algorithm: dict[Any, list[dict[str, Any]]] = {}
    for own in settings.values():
        by_algorithm.setdefault(own.get("algorithm.name"), []).append(own)
    row_keys = {name: differing_keys(group, "algorithm.") for name, group in by_algorithm.items()}
    column_keys = [key for key in differing_keys([*settings.values()], "") if not key.startswith("algorithm.")]
    runs = []
    for path, own in settings.items():
        name = own.get("algorithm.name")
        row = " ".join([str(name or "parts"), *(format_setting(own, key) for key in row_keys[name])])
        column = ", ".join(format_setting(own, key) for key in column_keys)
        rounds, final_window = configs[path]["rounds"], own.get("evaluate.final_window", 1)
        runs.append(RunResult(str(path), row, column, path, rounds, final_window, own))
    return runs


def _read_configs(paths: Iterable[Path], lenient: bool) -> tuple[dict[Path, dict[str, Any]], dict[Path, str]]:
    """Configurations, and the errors of those that cannot be read; at least one has to be readable."""
    configs, unreadable = dict[Path, dict[str, Any]](), dict[Path, str]()
    for path in paths:
        try:
            configs[path] = _read_config(path)
        except ConfigError as e:
            if not lenient:
                raise
            unreadable[path] = error_message(e)
    if not configs:
        raise ConfigError(next(iter(unreadable.values())))
    return configs, unreadable


def _read_config(path: Path) -> dict[str, Any]:
    config = read_recorded_config(path / CONFIG)
    if not isinstance(config, dict) or type(config.get("rounds")) is not int:
        raise ConfigError(f"{path / CONFIG} is not a configuration")
    return config


def _table_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as key.sub: value, without what changes no result and what a table averages over."""
    return {key: value for key, value in settings_of(config).items() if key not in (SEED, "rounds")}


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as key.sub: value, without keys that change no result."""
    return {key: value for key, value in flatten_keys(config) if not f"{key}.".startswith(_LAYOUT_PREFIXES)}


def differing_keys(configs: Sequence[dict[str, Any]], prefix: str) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config if key.startswith(prefix))
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def format_setting(config: dict[str, Any], key: str) -> str:
    section, _, last = key.rpartition(".")
    value = config.get(key, "–")
    return str(value) if last == "name" else f"{last if section else key}={value}"
