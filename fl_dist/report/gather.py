"""Runs as plain data: what their folders hold at this moment, whole or not."""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_dist.common.paths import expand
from fl_dist.common.reading import read_yaml
from fl_dist.common.words import counted, message, shortened
from fl_dist.drawing.base import told_apart
from fl_dist.results.collect import ACCURACY, Collection, Outcome, collect
from fl_dist.storage.folder import (
    ATTEMPTS,
    CLIENTS,
    CONFIG,
    DIAGNOSTICS,
    METRICS,
    MODEL,
    RECORD,
    locked,
    runs_below,
)
from fl_dist.storage.metrics import Row, parsed

FILES = (CONFIG, METRICS, MODEL, RECORD, CLIENTS, ATTEMPTS, DIAGNOSTICS)
"""Of a run, what the page is made from."""
FINISHED, RUNNING, INTERRUPTED, NEW = "finished", "running", "interrupted", "not begun"
Mark = tuple[Any, ...]


@dataclass
class Seen:
    """One run as its folder shows it."""

    outcome: Outcome
    name: str
    state: str
    config: dict[str, Any] = field(default_factory=dict)
    changed: float | None = None
    """When its last round ended, in unix seconds."""
    clients: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    diagnosed: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """Values by label and round."""
    troubles: list[str] = field(default_factory=list)
    mark: Mark = ()
    """Differs whenever its files do."""

    @property
    def rows(self) -> list[Row]:
        return self.outcome.history


@dataclass
class Group:
    """The runs of one sweep, or of all folders that were named."""

    found: Collection
    runs: list[Seen]
    published: Path | None

    def at(self, row: str, column: str) -> list[Seen]:
        return [run for run in self.runs if (run.outcome.row, run.outcome.column) == (row, column)]


class Source:
    """What was asked for; it is looked at again and again, and only what changed is read anew."""

    def __init__(self, words: Sequence[str], only: Sequence[str] = (), published: str | None = None) -> None:
        self._only, self._published = list(only), expand(published) if published else None
        self._sweeps, self._folders = _divided(words)
        self._of_sweeps = [collect(sweep, self._only) for sweep in self._sweeps]
        self._of_folders: tuple[Mark, Collection] | None = None
        self._read: dict[Path, tuple[Mark, Seen]] = {}

    def mark(self) -> Mark:
        """Differs whenever the runs do."""
        return tuple((path, _mark(path)) for path in self._paths())

    def groups(self) -> list[Group]:
        found = [*self._of_sweeps, *([self._folder_runs()] if self._folders else [])]
        paths = dict.fromkeys(outcome.path for collection in found for outcome in collection.outcomes)
        names = dict(zip(paths, told_apart(paths), strict=True))
        return [self._group(collection, names) for collection in found]

    def _paths(self) -> list[Path]:
        below = [run for folder in self._folders for run in runs_below(Path(folder))]
        return [*(outcome.path for sweep in self._of_sweeps for outcome in sweep.outcomes), *below]

    def _folder_runs(self) -> Collection:
        """Read again when there are other runs than before."""
        mark = tuple((run, _stat(run / CONFIG)) for folder in self._folders for run in runs_below(Path(folder)))
        if self._of_folders is None or self._of_folders[0] != mark:
            self._of_folders = mark, collect(self._folders, self._only, lenient=True)
        return self._of_folders[1]

    def _group(self, found: Collection, names: Mapping[Path, str]) -> Group:
        runs = [self._seen(outcome, names[outcome.path]) for outcome in found.outcomes]
        published = self._published or found.published
        known = published if self._published or published and published.exists() else None
        return Group(replace(found, outcomes=[run.outcome for run in runs]), runs, known)

    def _seen(self, outcome: Outcome, name: str) -> Seen:
        mark = _mark(outcome.path)
        known = self._read.get(outcome.path)
        if known is None or known[0] != mark:
            self._read[outcome.path] = known = mark, _look(replace(outcome), name)
        return replace(known[1], name=name, mark=mark, outcome=_placed(known[1].outcome, outcome))


def _divided(words: Sequence[str]) -> tuple[list[list[str]], list[str]]:
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


def _placed(read: Outcome, outcome: Outcome) -> Outcome:
    """What was read, at the place that the run has in its table now."""
    placed = copy(read)  # with what it has computed, unlike a replacement
    placed.row, placed.column = outcome.row, outcome.column
    return placed


def _mark(run: Path) -> Mark:
    return (*(_stat(run / name) for name in FILES), locked(run))


def _stat(file: Path) -> Mark | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _look(outcome: Outcome, name: str) -> Seen:
    """All that a folder holds; what cannot be read is told in words."""
    path, troubles = outcome.path, list[str]()
    config = _config(path / CONFIG, troubles)
    outcome.history = _rows(path / METRICS, troubles)
    try:
        _ = outcome.headline, outcome.finished
    except (ValueError, TypeError, OSError) as e:
        troubles.append(message(e))
        outcome.headline, outcome.finished = ACCURACY, False
    _ = outcome.scores
    return Seen(
        outcome,
        name,
        _state(outcome),
        config=config,
        changed=_changed(path / METRICS, outcome.history),
        clients=_clients(path / CLIENTS, troubles),
        attempts=_objects(path / ATTEMPTS, troubles),
        diagnosed=_diagnosed(
            outcome.history, _objects(path / DIAGNOSTICS, troubles), mapping(config.get("diagnostics"))
        ),
        troubles=[*dict.fromkeys(troubles)],
    )


def _state(outcome: Outcome) -> str:
    if outcome.finished:
        return FINISHED
    if locked(outcome.path):
        return RUNNING
    return INTERRUPTED if outcome.history else NEW


def _config(file: Path, troubles: list[str]) -> dict[str, Any]:
    """Empty if there is none: the run's state says so already."""
    try:
        return mapping(read_yaml(file)) if file.exists() else {}
    except (ValueError, OSError) as e:
        troubles.append(message(e))
        return {}


def _rows(file: Path, troubles: list[str]) -> list[Row]:
    """Whole rows in the order of their rounds; a line that is still being written does not count."""
    rows = [parsed(line) for line in _lines(file, troubles)]
    _tell_odd(file, rows, troubles)
    found = {row["round"]: row for row in rows if row is not None}
    return [found[index] for index in sorted(found)]


def _objects(file: Path, troubles: list[str]) -> list[dict[str, Any]]:
    found = [_object(line) for line in _lines(file, troubles)]
    _tell_odd(file, found, troubles)
    return [value for value in found if value is not None]


def _object(text: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


def _lines(file: Path, troubles: list[str]) -> list[bytes]:
    return [line for line in _bytes(file, troubles).splitlines(keepends=True) if line.endswith(b"\n")]


def _bytes(file: Path, troubles: list[str]) -> bytes:
    """Nothing, if there is no such file."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as e:
        troubles.append(message(e))
        return b""


def _tell_odd(file: Path, found: Sequence[Any], troubles: list[str]) -> None:
    if odd := [k for k, value in enumerate(found, 1) if value is None]:
        troubles.append(f"{counted(len(odd), 'line')} of {file.name} cannot be read, the first is line {odd[0]:,}")


def _changed(file: Path, rows: Sequence[Row]) -> float | None:
    if not rows:
        return None
    told = finite(rows[-1].get("time"))
    try:
        return told if told is not None else os.stat(file).st_mtime
    except OSError:
        return None


def _clients(file: Path, troubles: list[str]) -> dict[str, Any]:
    """Sizes and, if there are any, classes: both whole numbers, as many as there are clients."""
    data = _bytes(file, troubles)
    told = _object(data) if data else {}
    if told is None:
        troubles.append(f"{file.name} cannot be read")
        return {}
    sizes, classes = numbers(told.get("sizes")), told.get("classes")
    if not sizes:
        return {}
    counts = grid(classes)
    return {"sizes": sizes, "classes": counts if len(counts) == len(sizes) else None}


def _diagnosed(
    rows: Iterable[Row], later: Iterable[Mapping[str, Any]], own: Mapping[str, Any]
) -> dict[str, dict[int, dict[str, Any]]]:
    """What a run measured with its `own` settings, and what was measured of it later, perhaps with others."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    usual = {label: mapping(settings) for label, settings in own.items()}
    for row in rows:
        for label, values in mapping(row.get("diagnostics")).items():
            found.setdefault(str(label), {})[row["round"]] = mapping(values)
    for line in later:
        index = line.get("round")
        if isinstance(index, int):
            label, settings = str(line.get("label", "")), mapping(line.get("settings"))
            named = _label(label, settings, usual.setdefault(label, settings)) if settings else label
            found.setdefault(named, {})[index] = mapping(line.get("values"))
    return found


def _label(label: str, settings: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """With the settings that are not the usual ones."""
    other = [key for key, value in settings.items() if key not in ("name", "every") and value != usual.get(key)]
    return f"{label} ({', '.join(f'{key}={shortened(settings[key], 30)}' for key in other)})" if other else label


def mapping(value: Any) -> dict[str, Any]:
    """The value, if it is one."""
    return value if isinstance(value, dict) else {}


def finite(value: Any) -> float | None:
    """The value, if it is a number that a picture can show."""
    return value if type(value) in (int, float) and -LARGEST < value < LARGEST else None


def number(value: Any) -> float | None:
    """The same with as many digits as a picture shows."""
    known = finite(value)
    return float(f"{known:.6g}") if isinstance(known, float) else known


LARGEST = 1e300
"""Beyond that a number is as good as infinite, and no picture can show it."""


def numbers(value: Any) -> list[float | None]:
    """A list of numbers, with gaps where they are not finite; empty if it is none."""
    if not isinstance(value, list):
        return []
    found = [number(entry) for entry in value]
    return found if any(entry is not None for entry in found) else []


def grid(value: Any) -> list[list[float | None]]:
    """Equally long lists of numbers; empty if the value is nothing of that kind."""
    if not isinstance(value, list) or not all(isinstance(line, list) for line in value):
        return []
    found = [[number(entry) for entry in line] for line in value]
    return found if found and found[0] and len({len(line) for line in found}) == 1 else []
