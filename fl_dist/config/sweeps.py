"""A sweep's file as runs: rows x columns x grid, each of them validated."""

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten, suggest
from fl_dist.common.imports import prepend_to_path
from fl_dist.common.paths import expand_path
from fl_dist.common.registry import StrictModel
from fl_dist.common.yaml_reader import read_yaml
from fl_dist.config.arguments import default_run_name, resolve_arguments
from fl_dist.config.overrides import expand_override
from fl_dist.config.schema import Config
from fl_dist.config.sources import COMMAND_LINE
from fl_dist.config.validation import validate_mapping

Change = dict[str, Any]
Changes = list[Change]
MAX_RUNS = 10_000
"""Of a sweep: each is validated before the first one starts."""
MAX_LIKE_DEPTH = 10
"""Files that build on one another through `like`."""
MAX_NAME_BYTES = 200
"""Of a run's name; file systems take 255."""
RESERVED_NAMES = ("", ".", "..", "jobs", "jobs.json")
"""Names in a sweep's folder that no run can have."""
ROW, COLUMN, LIST = "row", "column", "list"
"""Axes that are not a key of the grid."""
NOT_INHERITED = {"name", "dir", "like"}
"""Keys that a sweep does not inherit through `like`."""


class ExtraColumn(StrictModel):
    """A further number of the rows of metrics.jsonl that a table shows."""

    key: Annotated[str, Field(min_length=1, description="where it is in a row, such as diagnostics.lpf.lpf")]
    over: Annotated[
        Literal["last", "mean", "final_window"],
        Field(description="of the rounds that have it: the last, their mean, or that of the final window"),
    ] = "last"
    percent: Annotated[bool, Field(description="show 0.5 as 50")] = False
    best: Annotated[Literal["min", "max"], Field(description="which value of a column is bold")] = "min"
    columns: Annotated[list[str] | None, Field(description="that show it (default: those in which a run has it)")] = (
        None
    )


class TableSettings(StrictModel):
    """How the runs are shown as a table."""

    measure: Annotated[
        Literal["mean", "last", "best"], Field(description="of a run: the mean over its last rounds, last or best")
    ] = "mean"
    final_window: Annotated[
        int | None, Field(ge=1, description="last rounds of that mean (default: evaluate.final_window)")
    ] = None
    targets: Annotated[
        list[float] | dict[str, list[float]],
        Field(description="values of the metric whose first round is shown; a mapping: by column"),
    ] = []
    spread: Annotated[
        Literal["seeds", "rounds"] | None,
        Field(description="what ± is over (default: seeds or, of one run, the rounds of its mean)"),
    ] = None
    published_spread: Annotated[str | None, Field(description="what it is in the published numbers")] = None
    extra_columns: Annotated[
        dict[str, ExtraColumn], Field(description="by name, further numbers of the rows of metrics.jsonl")
    ] = {}
    means: Annotated[
        dict[str, list[str]], Field(description="by name, columns (or patterns) whose mean is a further column")
    ] = {}

    def targets_of(self, column: str) -> list[float]:
        return self.targets.get(column, []) if isinstance(self.targets, dict) else self.targets


class Sweep(StrictModel):
    like: Annotated[str | None, Field(description="another sweep, beside this file, whose keys are the defaults")] = (
        None
    )
    base: Annotated[str | None, Field(description="config that all runs start from, beside the sweep's file")] = None
    name: Annotated[str | None, Field(description="name of the sweep (default: that of its file)")] = None
    dir: Annotated[str | None, Field(description="folder of the runs (default runs/<name>)")] = None
    resources: Annotated[Change, Field(description="what a run requests from the cluster")] = {}
    rows: Annotated[
        dict[str, Change] | list[str], Field(description="label: values of keys; a list: labels of the sweep `like`")
    ] = {}
    columns: Annotated[dict[str, Change] | list[str], Field(description="likewise")] = {}
    grid: Annotated[dict[str, list[Any] | Change], Field(description="key: [values] or {label: value}")] = {}
    set: Annotated[Change, Field(description="values of keys, for all runs")] = {}
    list: Annotated[Changes, Field(description="one mapping of keys per run; label: its name")] = []
    table: TableSettings = TableSettings()


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
    sweep, overrides = _read(path), [expand_override(override) for override in overrides]
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
        (name, labels, _merge(_wandb_keys(title, labels) | sweep.set, change))
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


def _read(path: str, depth: int = 1) -> Sweep:
    """The file with what it inherits from the sweep that `like` names."""
    sweep: Sweep = validate_mapping(Sweep, read_yaml(path), path)
    folder = Path(path).parent
    if sweep.base is not None:
        sweep = sweep.model_copy(update={"base": os.path.relpath(folder / expand_path(sweep.base))})
    if sweep.like is None:
        for axis in ("rows", "columns"):
            if isinstance(getattr(sweep, axis), list):
                raise ConfigError(f"{path}: {axis} is a list of labels, but no `like` names the sweep that has them")
        return sweep
    if depth == MAX_LIKE_DEPTH:
        raise ConfigError(f"{path}: more than {MAX_LIKE_DEPTH} sweeps build on one another, or they form a circle")
    parent = _read(os.path.relpath(folder / expand_path(sweep.like)), depth + 1)
    own = sweep.model_fields_set
    inherited = {key: getattr(parent, key) for key in parent.model_fields_set - own - NOT_INHERITED}
    axes = {axis: _select(path, axis, sweep, parent) for axis in sorted(own & {"rows", "columns"})}
    return sweep.model_copy(update={**inherited, **axes, "set": _merge(parent.set, sweep.set)})


def _select(path: str, axis: str, sweep: Sweep, parent: Sweep) -> dict[str, Change]:
    """The values of an axis; a list of labels selects from those of the parent."""
    values, available = getattr(sweep, axis), getattr(parent, axis)
    if isinstance(values, dict):
        return values
    for label in values:
        if label not in available:
            raise ConfigError(f"{path}: {axis} names {shorten(repr(label))}; {suggest(label, available)}")
    return {label: available[label] for label in values}


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
        yield name, labels, _merge(*(value.change for value in values))


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


def _merge(*changes: Change) -> Change:
    """All changes, each key at its last position: a section discards earlier keys of its own."""
    merged: Change = {}
    for change in changes:
        merged = {key: value for key, value in merged.items() if key not in change} | change
    return merged


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
