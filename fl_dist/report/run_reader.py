"""Run folders as plain data, whatever they hold at this moment; what cannot be read is described as a problem."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fl_dist.common.errors import ConfigError, error_message
from fl_dist.common.files import parse_lines, parse_object, read_file
from fl_dist.common.formatting import pluralize, shorten
from fl_dist.config import read_recorded_config
from fl_dist.metrics.file import describe_repeated, drop_repeated
from fl_dist.metrics.record import RoundRecord, parse_record
from fl_dist.plots.base import distinct_names
from fl_dist.results.collect import ACCURACY, Collection, RunResult, collect
from fl_dist.storage.folder_lock import is_locked
from fl_dist.storage.run_folder import ATTEMPTS, CLIENTS, CONFIG, DIAGNOSTICS, METRICS, MODEL, RUN_INFO, find_runs

T = TypeVar("T")
FILES = (CONFIG, METRICS, MODEL, RUN_INFO, CLIENTS, ATTEMPTS, DIAGNOSTICS)
"""Files of a run that the page shows."""
FINISHED, RUNNING, INTERRUPTED, NEW = "finished", "running", "interrupted", "not begun"
Fingerprint = tuple[Any, ...]
"""Differs whenever the files do."""
MAX_NUMBER = 1e300
"""Larger numbers count as infinite: no chart can show them."""


@dataclass
class RunSnapshot:
    """One run as its folder shows it."""

    result: RunResult
    name: str
    state: str
    config: dict[str, Any] = field(default_factory=dict)
    last_change: float | None = None
    """When its last round ended, in Unix seconds."""
    clients: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    diagnostics: dict[str, dict[int, Mapping[str, Any]]] = field(default_factory=dict)
    """Values by label and round."""
    problems: list[str] = field(default_factory=list)
    fingerprint: Fingerprint = ()

    @property
    def records(self) -> list[RoundRecord]:
        return self.result.records


@dataclass
class RunGroup:
    """The runs of one sweep, or of all folders."""

    collection: Collection
    runs: list[RunSnapshot]
    published: Path | None

    def cell(self, row: str, column: str) -> list[RunSnapshot]:
        return [run for run in self.runs if (run.result.row, run.result.column) == (row, column)]


class RunSource:
    """The runs of the command line; reading them again reads only what has changed."""

    def __init__(
        self,
        words: Sequence[str],
        only: Sequence[str] = (),
        published: str | None = None,
        archives: Sequence[Path] = (),
    ) -> None:
        """`archives`: folders to read the runs of the sweep from, instead of their own."""
        self._only, self._published = list(only), published
        sweeps, self._folders = _split_arguments(words)
        if archives and (self._folders or len(sweeps) != 1):
            raise ConfigError("an archive has the runs of one sweep; name its file alone")
        self._sweeps = [collect(sweep, self._only, archives=archives) for sweep in sweeps]
        self._folder_runs: tuple[Fingerprint, Collection] | None = None
        self._snapshots: dict[Path, RunSnapshot] = {}

    def fingerprint(self) -> Fingerprint:
        paths = [*(run.path for sweep in self._sweeps for run in sweep.runs), *self._find_folder_runs()]
        return tuple((path, _fingerprint(path)) for path in paths)

    def groups(self) -> list[RunGroup]:
        collections = [*self._sweeps, *([self._collect_folders()] if self._folders else [])]
        paths = dict.fromkeys(run.path for collection in collections for run in collection.runs)
        names = dict(zip(paths, distinct_names(paths), strict=True))
        return [self._group(collection, names) for collection in collections]

    def _find_folder_runs(self) -> list[Path]:
        return [run for folder in self._folders for run in find_runs(Path(folder))]

    def _collect_folders(self) -> Collection:
        """Again only if runs or their configurations have changed."""
        fingerprint = tuple((run, _stat(run / CONFIG)) for run in self._find_folder_runs())
        if self._folder_runs is None or self._folder_runs[0] != fingerprint:
            self._folder_runs = fingerprint, collect(self._folders, self._only, lenient=True)
        return self._folder_runs[1]

    def _group(self, collection: Collection, names: Mapping[Path, str]) -> RunGroup:
        runs = [self._snapshot(run, names[run.path]) for run in collection.runs]
        collection = replace(collection, runs=[run.result for run in runs])
        return RunGroup(collection, runs, collection.published_file(self._published))

    def _snapshot(self, run: RunResult, name: str) -> RunSnapshot:
        fingerprint = _fingerprint(run.path)
        snapshot = self._snapshots.get(run.path)
        if snapshot is None or snapshot.fingerprint != fingerprint:
            snapshot = self._snapshots[run.path] = _read_run(replace(run), name, fingerprint)
        result = copy(snapshot.result)  # with its cached properties, unlike dataclasses.replace
        result.row, result.column = run.row, run.column
        return replace(snapshot, name=name, result=result)


def _split_arguments(words: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Sweeps, each with its overrides, and folders."""
    sweeps: list[list[str]] = []
    folders: list[str] = []
    for word in words:
        path = Path(word)
        if "=" in word and not path.exists():
            (sweeps[-1] if sweeps else folders).append(word)
        elif path.is_dir() or not path.suffix:
            folders.append(word)
        else:
            sweeps.append([word])
    return sweeps, folders


def _fingerprint(run: Path) -> Fingerprint:
    return (*(_stat(run / name) for name in FILES), is_locked(run))


def _stat(file: Path) -> Fingerprint | None:
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read_run(result: RunResult, name: str, fingerprint: Fingerprint) -> RunSnapshot:
    path, problems = result.path, list[str]()
    config = _read_config(path / CONFIG, problems)
    result.records = _read_records(path / METRICS, problems)
    try:
        _ = result.primary_metric, result.finished
    except (ValueError, TypeError, OSError) as e:
        problems.append(error_message(e))
        result.primary_metric, result.finished = ACCURACY, False
    _ = result.scores  # cached for all copies of the result
    later = _parse_lines(path / DIAGNOSTICS, parse_object, problems)
    return RunSnapshot(
        result,
        name,
        _state(result),
        config=config,
        last_change=_last_change(path / METRICS, result.records),
        clients=_read_clients(path / CLIENTS, problems),
        attempts=_parse_lines(path / ATTEMPTS, parse_object, problems),
        diagnostics=_merge_diagnostics(result.records, later, mapping_or_empty(config.get("diagnostics"))),
        problems=[*dict.fromkeys(problems)],
        fingerprint=fingerprint,
    )


def _state(result: RunResult) -> str:
    if result.finished:
        return FINISHED
    if is_locked(result.path):
        return RUNNING
    return INTERRUPTED if result.records else NEW


def _read_config(file: Path, problems: list[str]) -> dict[str, Any]:
    """Empty if there is none: the run's state says so already."""
    with _add_errors(problems):
        return mapping_or_empty(read_recorded_config(file)) if file.exists() else {}
    return {}


def _read_records(file: Path, problems: list[str]) -> list[RoundRecord]:
    records, repeated = drop_repeated(_parse_lines(file, parse_record, problems))
    if repeated:
        problems.append(describe_repeated(Path(file.name), repeated))
    return records


def _parse_lines(file: Path, parse: Callable[[bytes], T | None], problems: list[str]) -> list[T]:
    """What every line holds; a last line that is still being written does not count."""
    values, bad = list[T](), list[int]()
    with _add_errors(problems):
        values, bad = parse_lines(file, parse)
    if bad:
        problems.append(f"{pluralize(len(bad), 'line')} of {file.name} cannot be read, the first is line {bad[0]:,}")
    return values


@contextlib.contextmanager
def _add_errors(problems: list[str]) -> Iterator[None]:
    """An error of a file or of its content is a problem of the run."""
    try:
        yield
    except (ValueError, OSError) as e:
        problems.append(error_message(e))


def _last_change(file: Path, records: Sequence[RoundRecord]) -> float | None:
    if not records:
        return None
    time = finite_or_none(records[-1].time)
    try:
        return time if time is not None else os.stat(file).st_mtime
    except OSError:
        return None


def _read_clients(file: Path, problems: list[str]) -> dict[str, Any]:
    """Sizes and, if there are any, counts of classes, as many as there are clients."""
    content: dict[str, Any] | None = {}
    with _add_errors(problems):
        content = parse_object(read_file(file)) if file.exists() else {}
    if content is None:
        problems.append(f"{file.name} cannot be read")
        return {}
    sizes, classes = number_list(content.get("sizes")), number_grid(content.get("classes"))
    return {"sizes": sizes, "classes": classes if len(classes) == len(sizes) else None} if sizes else {}


def _merge_diagnostics(
    records: Iterable[RoundRecord], later: Iterable[Mapping[str, Any]], config: Mapping[str, Any]
) -> dict[str, dict[int, Mapping[str, Any]]]:
    """What the run measured with the settings of its `config`, and what was measured later, perhaps with others."""
    merged: dict[str, dict[int, Mapping[str, Any]]] = {}
    usual = {label: mapping_or_empty(settings) for label, settings in config.items()}
    for record in records:
        for label, values in (record.diagnostics or {}).items():
            merged.setdefault(label, {})[record.round] = values
    for line in later:
        index = line.get("round")
        if isinstance(index, int):
            label, settings = str(line.get("label", "")), mapping_or_empty(line.get("settings"))
            if settings:
                label = _describe_label(label, settings, usual.setdefault(label, settings))
            merged.setdefault(label, {})[index] = mapping_or_empty(line.get("values"))
    return merged


def _describe_label(label: str, settings: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """With the settings that are not the usual ones."""
    other = [key for key, value in settings.items() if key not in ("name", "every") and value != usual.get(key)]
    return f"{label} ({', '.join(f'{key}={shorten(settings[key], 30)}' for key in other)})" if other else label


def mapping_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def finite_or_none(value: Any) -> float | None:
    """The value, if it is a number that a chart can show."""
    return value if type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER else None


def rounded_number(value: Any) -> float | None:
    """The same with as many digits as a chart shows."""
    number = finite_or_none(value)
    return float(f"{number:.6g}") if isinstance(number, float) else number


def number_list(value: Any) -> list[float | None]:
    """A list of numbers, None where they are not finite; empty if it is none."""
    numbers = [rounded_number(entry) for entry in value] if isinstance(value, list) else []
    return numbers if any(number is not None for number in numbers) else []


def number_grid(value: Any) -> list[list[float | None]]:
    """Equally long lists of numbers; empty if it is none."""
    if not isinstance(value, list) or not all(isinstance(line, list) for line in value):
        return []
    grid = [[rounded_number(entry) for entry in line] for line in value]
    return grid if grid and grid[0] and len({len(line) for line in grid}) == 1 else []
