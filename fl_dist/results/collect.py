"""Runs with their places in a table: from a sweep's file, or from folders whose configurations differ."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_dist.common.reading import ConfigError, read_yaml
from fl_dist.common.words import message, nearest, shortened
from fl_dist.config import LAYOUT
from fl_dist.config.loading import leaves
from fl_dist.config.sweeps import COLUMN, LIST, ROW, Sweep, axes, is_meant, read
from fl_dist.storage.folder import CONFIG, METRICS, RunFolder, runs_below
from fl_dist.storage.metrics import Row, rows_in
from fl_dist.tasks import Headline

SEED = "seed"
ACCURACY = Headline("accuracy", "max", percent=True)


@dataclass
class Outcome:
    """What became of one run."""

    name: str
    row: str
    column: str
    path: Path
    rounds: int
    last: int
    """Rounds over which the run itself averages its final score."""

    @cached_property
    def headline(self) -> Headline:
        facts = RunFolder(self.path).facts() if self.history else {}
        return Headline(**facts["headline"]) if "headline" in facts else ACCURACY

    @cached_property
    def history(self) -> list[Row]:
        return rows_in(self.path / METRICS)

    @property
    def done(self) -> int:
        return int(self.history[-1]["round"]) if self.history else 0

    @cached_property
    def finished(self) -> bool:
        return self.done >= self.rounds and RunFolder(self.path).finished(self.rounds)

    @cached_property
    def scores(self) -> list[tuple[int, float]]:
        """Round and headline metric, of the rounds that were evaluated."""
        name = f"test_{self.headline.name}"
        found = [(row["round"], row.get(name)) for row in self.history]
        return [(index, score) for index, score in found if score is not None and math.isfinite(score)]

    def numbers(self, key: str) -> list[float | None]:
        """What stands under a key with dots, in the rows that have it; None: it could not be measured."""
        return [value for row in self.history for value in self._under(row, key)]

    def _under(self, row: Any, key: str) -> list[float | None]:
        for name in key.split("."):
            if not isinstance(row, dict) or name not in row:
                return []
            row = row[name]
        if row is not None and (isinstance(row, bool) or not isinstance(row, int | float)):
            raise ConfigError(f"{key} in {self.path / METRICS} is {shortened(repr(row))}, not a number")
        return [row]

    def spent(self, cost: str, until: int) -> float:
        """What the first rounds cost."""
        return sum(COSTS[cost](row) for row in self.history if row["round"] <= until)


COSTS = {
    "rounds": lambda row: 1,
    "gigabytes": lambda row: (row["bytes_down"] + row["bytes_up"]) / 1e9,
    "passes": lambda row: row["forwards"] + row["backwards"],
    "minutes": lambda row: row["seconds"]["total"] / 60,
    "local_minutes": lambda row: row["seconds"]["local"] / 60,
}
"""By name, what a round costs."""


@dataclass
class Collection:
    """The runs of a table, and the order of its rows and columns."""

    name: str
    outcomes: list[Outcome]
    sweep: Sweep
    published: Path | None = None
    """Where numbers to compare with may stand."""
    unread: dict[Path, str] = field(default_factory=dict)
    """Runs that were left out, and why."""

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(outcome.row for outcome in self.outcomes))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(outcome.column for outcome in self.outcomes))

    def at(self, row: str, column: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if (outcome.row, outcome.column) == (row, column)]


def collect(words: Sequence[str], only: Sequence[str] = (), lenient: bool = False) -> Collection:
    """Of `SWEEP.yaml key=value ...`, or of folders of runs; a lenient one does without those that cannot be read."""
    if not words:
        raise ConfigError("name a sweep's file, or folders of runs")
    first = Path(words[0])
    if first.is_dir() or not first.suffix:
        return _of_folders(words, only, lenient)
    sweep, cells = read(words[0], words[1:], only)
    row, columns = _table_axes(sweep)
    outcomes = [
        Outcome(
            cell.name,
            cell.at[row],
            ", ".join(cell.at[axis] for axis in columns),
            cell.run,
            cell.rounds,
            cell.config.evaluate.last,
        )
        for cell in cells
    ]
    return Collection(first.stem, outcomes, sweep, first.parent / "published.csv")


def _table_axes(sweep: Sweep) -> tuple[str, list[str]]:
    """Which axis is the rows, and which make the columns; over seeds the table averages."""
    names = [axis for axis in axes(sweep) if axis != SEED] or [SEED]
    row = next((axis for axis in (ROW, LIST, "algorithm", "algorithm.name") if axis in names), names[0])
    rest = [axis for axis in names if axis != row]
    return row, sorted(rest, key=lambda axis: axis != COLUMN)


def _of_folders(folders: Sequence[str], only: Sequence[str], lenient: bool) -> Collection:
    if odd := [word for word in folders if "=" in word and not Path(word).exists()]:
        raise ConfigError(f"{odd[0]} overrides nothing: runs that are there have their settings; name folders only")
    found = {run.resolve(): run for folder in folders for run in runs_below(Path(folder))}
    if not found:
        raise ConfigError(f"no run in {', '.join(folders)}; a run's folder has a {CONFIG}")
    configs, unread = _configs(found.values(), lenient)
    by_name: dict[Any, list[dict[str, Any]]] = {}
    for config in configs.values():
        by_name.setdefault(config.get("algorithm.name"), []).append(config)
    within = {name: _differing(group, "algorithm.") for name, group in by_name.items()}
    elsewhere = [key for key in _differing([*configs.values()], "") if not key.startswith("algorithm.")]
    outcomes = []
    for path, config in configs.items():
        name = config.get("algorithm.name")
        row = " ".join([str(name or "parts"), *(_told(config, key) for key in within[name])])
        column = ", ".join(_told(config, key) for key in elsewhere)
        outcomes.append(Outcome(str(path), row, column, path, RunFolder(path).rounds(), config.get("evaluate.last", 1)))
    chosen = [o for o in outcomes if is_meant(o.path.name, (o.name, o.row, o.column), only)]
    if not chosen:
        raise ConfigError(f"no run is {' or '.join(map(repr, only))}; {nearest(only[0], {o.row for o in outcomes})}")
    return Collection("runs", chosen, Sweep(), unread=unread)


def _configs(paths: Iterable[Path], lenient: bool) -> tuple[dict[Path, dict[str, Any]], dict[Path, str]]:
    """Of each run, or why there is none; one at least has to be readable."""
    configs, unread = dict[Path, dict[str, Any]](), dict[Path, str]()
    for path in paths:
        try:
            configs[path] = _plain(path)
        except ConfigError as e:
            if not lenient:
                raise
            unread[path] = message(e)
    if not configs:
        raise ConfigError(next(iter(unread.values())))
    return configs, unread


def _plain(path: Path) -> dict[str, Any]:
    """The configuration as key.sub: value, without what changes no result; seeds are what a table averages over."""
    given = read_yaml(path / CONFIG)
    if not isinstance(given, dict) or type(given.get("rounds")) is not int:
        raise ConfigError(f"{path / CONFIG} is not a configuration")
    return {k: v for k, v in leaves(given) if k not in (SEED, "rounds") and not f"{k}.".startswith(_PLACES)}


_PLACES = tuple(f"{key}." for key in LAYOUT)


def _differing(configs: Sequence[dict[str, Any]], prefix: str) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config if key.startswith(prefix))
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def _told(config: dict[str, Any], key: str) -> str:
    section, _, last = key.rpartition(".")
    value = config.get(key, "–")
    return str(value) if last == "name" else f"{last}={value}" if section else f"{key}={value}"
