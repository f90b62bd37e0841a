"""The runs of a sweep: rows x columns x grid, each of them validated."""

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten, suggest
from fl_dist.common.imports import prepend_to_path
from fl_dist.common.paths import expand_path
from fl_dist.config.arguments import default_run_name, resolve_arguments
from fl_dist.config.overrides import expand_override
from fl_dist.config.schema import Config
from fl_dist.config.sources import COMMAND_LINE
from fl_dist.config.sweep_file import Change, Sweep, merge_changes, read_sweep_file

MAX_RUNS = 10_000
"""Of a sweep: each is validated before the first one starts."""
MAX_NAME_BYTES = 200
"""Of a run's name; file systems take 255."""
RESERVED_NAMES = ("", ".", "..", "jobs", "jobs.json")
"""Names in a sweep's folder that no run can have."""
ROW, COLUMN, LIST = "row", "column", "list"
"""Axes that are not a key of the grid."""


class AxisValue(NamedTuple):
    """One value of an axis: its piece of the run's name, its label, the keys that it sets."""

    name: str
    label: str
    change: Change


@dataclass
class SweepRun:
    """One run of a sweep."""

    name: str
    run: Path
    labels: dict[str, str]
    """The label on each axis."""
    config: Config
    command: list[str]

    @property
    def rounds(self) -> int:
        return self.config.rounds


def read_sweep(path: str, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> tuple[Sweep, list[SweepRun]]:
    """The sweep and its runs; overrides hold for all of them, `only` are patterns of names or labels."""
    sweep, overrides = read_sweep_file(path), [expand_override(override) for override in overrides]
    prepend_to_path(Path(path).parent)
    if malformed := [override for override in overrides if "=" not in override]:
        raise ConfigError(f"override {shorten(repr(malformed[0]))} is not of the form key.sub=value")
    title = sweep.name or Path(path).stem
    folder = expand_path(sweep.dir or f"runs/{title}")
    folder = folder.with_name(default_run_name(f"{folder.name}.yaml", overrides))
    runs = list(_expand(sweep, path))
    if duplicates := [name for name, count in Counter(name for name, _, _ in runs).items() if count > 1]:
        raise ConfigError(f"{path}: several runs are named {min(duplicates)}; give the values labels")
    selected = [
        (name, labels, merge_changes(_wandb_keys(title, labels) | sweep.set, change))
        for name, labels, change in runs
        if matches_any(name, labels.values(), only)
    ]
    if not selected:
        known = {name for name, _, _ in runs} | {label for _, labels, _ in runs for label in labels.values()}
        raise ConfigError(f"{path}: no run is {' or '.join(map(repr, only))}; {suggest(only[0], known)}")
    return sweep, [_build_run(folder / name, labels, sweep.base, keys, overrides) for name, labels, keys in selected]


def _wandb_keys(title: str, labels: dict[str, str]) -> Change:
    """A sweep is a group of W&B, the label on its first axis a job type."""
    kind = next((label for axis, label in labels.items() if axis != "seed"), None)
    return {"monitor.wandb.group": title} | ({} if kind is None else {"monitor.wandb.job_type": kind})


def axis_names(sweep: Sweep) -> list[str]:
    """The names of the axes, in the order of the runs."""
    axes = {ROW: sweep.rows, COLUMN: sweep.columns, LIST: sweep.list}
    return [name for name, values in axes.items() if values] + [*sweep.grid]


def _expand(sweep: Sweep, path: str) -> Iterator[tuple[str, dict[str, str], Change]]:
    """Every run's name, labels and changes."""
    tables = [values for values in (sweep.rows, sweep.columns) if isinstance(values, dict) and values]
    axes = [[AxisValue(_safe_name(label), label, change) for label, change in values.items()] for values in tables]
    axes += [[_list_value(entry) for entry in sweep.list]] if sweep.list else []
    axes += [[_grid_value(key, label, value) for label, value in _labelled(v)] for key, v in sweep.grid.items()]
    if not axes or not all(axes):
        raise ConfigError(f"{path} names no run: give rows, a grid or a list with values")
    if (runs := math.prod(map(len, axes))) > MAX_RUNS:
        raise ConfigError(f"{path} names {runs:,} runs, more than {MAX_RUNS:,}; divide it into several sweeps")
    for values in itertools.product(*axes):
        labels = dict(zip(axis_names(sweep), (value.label for value in values), strict=True))
        name = _check_name("-".join(value.name for value in values), path)
        yield name, labels, merge_changes(*(value.change for value in values))


def _build_run(
    folder: Path, labels: dict[str, str], base: str | None, change: Change, overrides: Sequence[str]
) -> SweepRun:
    changes = [f"{key}={json.dumps(value)}" for key, value in change.items()]
    arguments = [*([] if base is None else [base]), *changes, *overrides, f"run.dir={folder}"]
    try:
        config, command = resolve_arguments(arguments)
    except ConfigError as e:
        message = str(e) if overrides else str(e).replace(f"(set on {COMMAND_LINE})", "(set in the sweep)")
        raise ConfigError(f"run {folder.name}: {message}") from e.__cause__
    return SweepRun(folder.name, folder, labels, config, command)


def matches_any(name: str, labels: Iterable[str], only: Sequence[str]) -> bool:
    """Whether one of the patterns, if there are any, fits the run's name or one of its labels."""
    return not only or any(fnmatchcase(text, pattern) for text in (name, *labels) for pattern in only)


def _check_name(name: str, path: str) -> str:
    if name in RESERVED_NAMES or len(os.fsencode(name)) > MAX_NAME_BYTES:
        problem = "cannot be" if name in RESERVED_NAMES else "is too long for"
        raise ConfigError(f"{path}: the name {shorten(repr(name))} {problem} a folder; give the values labels")
    return name


def _labelled(values: Any) -> list[tuple[str | None, Any]]:
    return list(values.items()) if isinstance(values, dict) else [(None, value) for value in values]


def _grid_value(key: str, label: str | None, value: Any) -> AxisValue:
    last = key.rpartition(".")[2]
    text = value if isinstance(value, str) else json.dumps(value)
    if label or last == "name":
        return AxisValue(_safe_name(label or text), label or text, {key: value})
    return AxisValue(_safe_name(last + text), f"{last}={text}", {key: value})


def _list_value(entry: Change) -> AxisValue:
    change = {key: value for key, value in entry.items() if key != "label"}
    values = [_grid_value(key, None, value) for key, value in change.items()]
    label = entry.get("label")
    name = str(label or "-".join(value.name for value in values))
    return AxisValue(_safe_name(name), str(label or ", ".join(value.label for value in values)), change)


def _safe_name(label: str) -> str:
    """A label as the name of a folder."""
    return "".join(c if c.isalnum() or c in "._+" else "_" for c in label)
