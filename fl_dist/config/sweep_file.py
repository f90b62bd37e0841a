"""A sweep's file: its keys, and those that it inherits from another one."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import shorten, suggest
from fl_dist.common.paths import expand_path
from fl_dist.common.registry import StrictModel
from fl_dist.common.yaml_reader import read_yaml
from fl_dist.config.validation import validate_mapping

Change = dict[str, Any]
Changes = list[Change]
MAX_LIKE_DEPTH = 10
"""Files that build on one another through `like`."""
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


def read_sweep_file(path: str, depth: int = 1) -> Sweep:
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
    parent = read_sweep_file(os.path.relpath(folder / expand_path(sweep.like)), depth + 1)
    own = sweep.model_fields_set
    inherited = {key: getattr(parent, key) for key in parent.model_fields_set - own - NOT_INHERITED}
    axes = {axis: _select(path, axis, sweep, parent) for axis in sorted(own & {"rows", "columns"})}
    return sweep.model_copy(update={**inherited, **axes, "set": merge_changes(parent.set, sweep.set)})


def _select(path: str, axis: str, sweep: Sweep, parent: Sweep) -> dict[str, Change]:
    """The values of an axis; a list of labels selects from those of the parent."""
    values, available = getattr(sweep, axis), getattr(parent, axis)
    if isinstance(values, dict):
        return values
    for label in values:
        if label not in available:
            raise ConfigError(f"{path}: {axis} names {shorten(repr(label))}; {suggest(label, available)}")
    return {label: available[label] for label in values}


def merge_changes(*changes: Change) -> Change:
    """All changes, each key at its last position: a section discards earlier keys of its own."""
    merged: Change = {}
    for change in changes:
        merged = {key: value for key, value in merged.items() if key not in change} | change
    return merged
