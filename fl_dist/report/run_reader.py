"""A run folder as plain data, whatever it holds at this moment; what cannot be read is described as a problem."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fl_dist.common.errors import error_message
from fl_dist.common.files import parse_lines, parse_object, read_file
from fl_dist.common.formatting import pluralize, shorten
from fl_dist.config.overrides import read_recorded_config
from fl_dist.metrics.file import describe_repeated, drop_repeated
from fl_dist.metrics.record import RoundRecord, parse_record
from fl_dist.report.numbers import finite_or_none, mapping_or_empty, number_grid, number_list
from fl_dist.results.run_result import ACCURACY, RunResult
from fl_dist.storage.folder_lock import is_locked
from fl_dist.storage.run_folder import ATTEMPTS, CLIENTS, CONFIG, DIAGNOSTICS, METRICS, MODEL, RUN_INFO

T = TypeVar("T")
FILES = (CONFIG, METRICS, MODEL, RUN_INFO, CLIENTS, ATTEMPTS, DIAGNOSTICS)
"""Files of a run that the page shows."""
FINISHED, RUNNING, INTERRUPTED, NEW = "finished", "running", "interrupted", "not begun"
Fingerprint = tuple[Any, ...]
"""Differs whenever the files do."""


@dataclass
class RunSnapshot:
    """One run as its folder shows it."""

    result: RunResult
    name: str
    state: str
    config: dict[str, Any]
    last_change: float | None
    """When its last round ended, in Unix seconds."""
    clients: dict[str, Any]
    attempts: list[dict[str, Any]]
    diagnostics: dict[str, dict[int, Mapping[str, Any]]]
    """Values by label and round."""
    problems: list[str]
    fingerprint: Fingerprint

    @property
    def records(self) -> list[RoundRecord]:
        return self.result.records


def run_fingerprint(run: Path) -> Fingerprint:
    return (*(file_fingerprint(run / name) for name in FILES), is_locked(run))


def file_fingerprint(file: Path) -> Fingerprint | None:
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_run(result: RunResult, name: str, fingerprint: Fingerprint) -> RunSnapshot:
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
