"""A sweep's file as runs: rows x columns x grid, every one of them validated."""

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

from fl_dist.common.imports import search_in
from fl_dist.common.paths import expand
from fl_dist.common.reading import ConfigError, read_yaml
from fl_dist.common.registry import Strict
from fl_dist.common.words import nearest, shortened
from fl_dist.config.arguments import default_name, resolve
from fl_dist.config.loading import checked, spelt_out
from fl_dist.config.schema import Config

Change = dict[str, Any]
Changes = list[Change]
MOST = 10_000
"""Runs of a sweep: each is validated before the first one starts."""
DEEPEST = 10
"""Files that start from one another through `like`."""
RESERVED = ("", ".", "..", "jobs", "jobs.json")
"""Names in a sweep's folder that no run can have."""
LONGEST_NAME = 200
"""Bytes of a run's name; file systems take 255."""
ROW, COLUMN, LIST = "row", "column", "list"
"""Axes that are not a key of the grid."""
OWN = ("name", "dir", "like")
"""Keys that a sweep does not take over from the one it is like."""


class Also(Strict):
    """A number of the rows of metrics.jsonl that a table shows besides."""

    key: Annotated[str, Field(min_length=1, description="where it is in a row, such as diagnostics.lpf.lpf")]
    over: Annotated[
        Literal["last", "mean"], Field(description="of the rounds that have it: the last, or their mean")
    ] = "last"
    percent: bool = False
    best: Literal["min", "max"] = "min"
    columns: Annotated[list[str] | None, Field(description="that show it (default: those in which a run has it)")] = (
        None
    )


class Table(Strict):
    """How the runs are shown as a table."""

    measure: Annotated[
        Literal["mean", "last", "best"], Field(description="of a run: the mean over its last rounds, last or best")
    ] = "mean"
    last: Annotated[int | None, Field(ge=1, description="rounds of that mean (default: evaluate.last)")] = None
    targets: Annotated[
        list[float] | dict[str, list[float]],
        Field(description="values of the metric whose first round is shown; a mapping: by column"),
    ] = []
    spread: Annotated[
        Literal["seeds", "rounds"] | None,
        Field(description="what ± is over (default: seeds or, of one run, the rounds of its mean)"),
    ] = None
    published_spread: Annotated[str | None, Field(description="what it is in the published numbers")] = None
    also: Annotated[dict[str, Also], Field(description="by name, further numbers of the rows of metrics.jsonl")] = {}

    def targets_of(self, column: str) -> list[float]:
        return self.targets.get(column, []) if isinstance(self.targets, dict) else self.targets


class Sweep(Strict):
    like: Annotated[str | None, Field(description="another sweep, beside this file, whose keys hold unless given")] = (
        None
    )
    base: Annotated[str | None, Field(description="config that all runs start from, beside the sweep's file")] = None
    name: str | None = None
    dir: Annotated[str | None, Field(description="folder of the runs (default runs/<name>)")] = None
    resources: Annotated[Change, Field(description="what a run asks of the cluster")] = {}
    rows: Annotated[
        dict[str, Change] | list[str], Field(description="label: values of keys; a list: labels of what it is like")
    ] = {}
    columns: Annotated[dict[str, Change] | list[str], Field(description="likewise")] = {}
    grid: Annotated[dict[str, list[Any] | Change], Field(description="key: [values] or {label: value}")] = {}
    set: Annotated[Change, Field(description="values of keys, for all runs")] = {}
    list: Annotated[Changes, Field(description="one mapping of keys a run; label: its name")] = []
    table: Table = Table()


class Point(NamedTuple):
    """One value of an axis."""

    folder: str
    label: str
    change: Change


@dataclass
class Cell:
    """One run of a sweep."""

    name: str
    run: Path
    at: dict[str, str]
    """The label on each axis."""
    config: Config
    command: list[str]

    @property
    def rounds(self) -> int:
        return self.config.rounds


def read(path: str, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> tuple[Sweep, list[Cell]]:
    """The sweep and its runs; overrides hold for all of them, `only` are patterns of names or labels."""
    sweep, given = _read(path), [spelt_out(override) for override in overrides]
    search_in(Path(path).parent)
    name = sweep.name or Path(path).stem
    if odd := [override for override in given if "=" not in override]:
        raise ConfigError(f"override {shortened(repr(odd[0]))} is not of the form key.sub=value")
    folder = expand(sweep.dir or f"runs/{name}")
    folder = folder.with_name(default_name(f"{folder.name}.yaml", given))
    base = [] if sweep.base is None else [sweep.base]
    found = list(_changes(sweep, path))
    double = [run for run, count in Counter(run for run, _, _ in found).items() if count > 1]
    if double:
        raise ConfigError(f"{path}: several runs are named {min(double)}; give the values labels")
    chosen = [
        (run, at, _after(_on_wandb(name, at) | sweep.set, change))
        for run, at, change in found
        if is_meant(run, at.values(), only)
    ]
    if not chosen:
        known = [run for run, _, _ in found] + [label for _, at, _ in found for label in at.values()]
        raise ConfigError(f"{path}: no run is {' or '.join(map(repr, only))}; {nearest(only[0], set(known))}")
    return sweep, [_cell(run, at, folder, base, change, given) for run, at, change in chosen]


def _on_wandb(name: str, at: dict[str, str]) -> Change:
    """A sweep is a group, and what its first axis says the type of the job."""
    kind = next((label for axis, label in at.items() if axis != "seed"), None)
    return {"monitor.wandb.group": name} | ({} if kind is None else {"monitor.wandb.job_type": kind})


def axes(sweep: Sweep) -> list[str]:
    """The names of the axes, in the order of the runs."""
    own = {ROW: sweep.rows, COLUMN: sweep.columns, LIST: sweep.list}
    return [name for name, values in own.items() if values] + [*sweep.grid]


def _read(path: str, depth: int = 1) -> Sweep:
    """The file with what it takes over from the sweep that it is like."""
    sweep: Sweep = checked(Sweep, read_yaml(path), path)
    folder = Path(path).parent
    if sweep.base is not None:
        sweep = sweep.model_copy(update={"base": os.path.relpath(folder / expand(sweep.base))})
    if sweep.like is None:
        for axis in ("rows", "columns"):
            if isinstance(getattr(sweep, axis), list):
                raise ConfigError(f"{path}: {axis} is a list of labels, but no `like` names the sweep that has them")
        return sweep
    if depth == DEEPEST:
        raise ConfigError(f"{path}: more than {DEEPEST} sweeps start from one another, or they do so in a circle")
    model = _read(os.path.relpath(folder / expand(sweep.like)), depth + 1)
    taken = {key: getattr(model, key) for key in model.model_fields_set - sweep.model_fields_set - {*OWN}}
    chosen = {axis: _selected(path, axis, getattr(sweep, axis), getattr(model, axis)) for axis in ("rows", "columns")}
    own = {axis: values for axis, values in chosen.items() if axis in sweep.model_fields_set}
    return sweep.model_copy(update={**taken, **own, "set": _after(model.set, sweep.set)})


def _selected(path: str, axis: str, given: dict[str, Change] | list[str], model: Any) -> dict[str, Change]:
    if isinstance(given, dict):
        return given
    for label in given:
        if label not in model:
            raise ConfigError(f"{path}: {axis} names {shortened(repr(label))}; {nearest(label, model)}")
    return {label: model[label] for label in given}


def _changes(sweep: Sweep, path: str) -> Iterator[tuple[str, dict[str, str], Change]]:
    """Every run's name, place and changes."""
    tables = [_labelled(values) for values in (sweep.rows, sweep.columns) if isinstance(values, dict)]
    grid = [[_point(key, label, value) for label, value in _values(v)] for key, v in sweep.grid.items()]
    points = [*(t for t in tables if t), *([[_listed(entry) for entry in sweep.list]] if sweep.list else []), *grid]
    if not points or not all(points):
        raise ConfigError(f"{path} names no run: give rows, a grid or a list with values")
    if (runs := math.prod(map(len, points))) > MOST:
        raise ConfigError(f"{path} names {runs:,} runs, more than {MOST:,}; divide it into several sweeps")
    for choice in itertools.product(*points):
        change = _after(*(point.change for point in choice))
        at = dict(zip(axes(sweep), (point.label for point in choice), strict=True))
        yield _folder_name("-".join(point.folder for point in choice), path), at, change


def _cell(name: str, at: dict[str, str], folder: Path, base: list[str], change: Change, given: list[str]) -> Cell:
    overrides = [f"{key}={json.dumps(value)}" for key, value in change.items()]
    try:
        config, command = resolve([*base, *overrides, *given, f"run.dir={folder / name}"])
    except ConfigError as e:
        told = str(e) if given else str(e).replace("(set in the command line)", "(set in the sweep)")
        raise ConfigError(f"run {name}: {told}") from e.__cause__
    return Cell(name, folder / name, at, config, command)


def _after(*changes: Change) -> Change:
    """All of them, each key where it was said last: a section discards what was said of it before."""
    merged: Change = {}
    for change in changes:
        merged = {key: value for key, value in merged.items() if key not in change} | change
    return merged


def is_meant(name: str, labels: Iterable[str], only: Sequence[str]) -> bool:
    """Whether one of the patterns, if there are any, fits the run's name or one of its labels."""
    return not only or any(fnmatchcase(text, pattern) for text in (name, *labels) for pattern in only)


def _folder_name(name: str, path: str) -> str:
    if name in RESERVED or len(os.fsencode(name)) > LONGEST_NAME:
        why = "is too long for" if name not in RESERVED else "cannot be"
        raise ConfigError(f"{path}: the name {shortened(repr(name))} {why} a folder; give the values labels")
    return name


def _labelled(values: dict[str, Change]) -> list[Point]:
    return [Point(_safe(label), label, change) for label, change in values.items()]


def _values(values: Any) -> list[tuple[str | None, Any]]:
    return list(values.items()) if isinstance(values, dict) else [(None, value) for value in values]


def _point(key: str, label: str | None, value: Any) -> Point:
    *_, last = key.split(".")
    text = value if isinstance(value, str) else json.dumps(value)
    if label or last == "name":
        return Point(_safe(label or text), label or text, {key: value})
    return Point(_safe(last + text), f"{last}={text}", {key: value})


def _listed(entry: Change) -> Point:
    change = {key: value for key, value in entry.items() if key != "label"}
    parts = [_point(key, None, value) for key, value in change.items()]
    label = entry.get("label")
    return Point(
        _safe(str(label or "-".join(p.folder for p in parts))), str(label or ", ".join(p.label for p in parts)), change
    )


def _safe(label: str) -> str:
    """A label that can be the name of a folder."""
    return "".join(c if c.isalnum() or c in "._+" else "_" for c in label)
