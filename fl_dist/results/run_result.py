"""One run of a table: its records, scores, numbers and costs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_dist.common.errors import ConfigError, DataError
from fl_dist.common.files import parse_object, read_lines
from fl_dist.common.formatting import shorten
from fl_dist.metrics.costs import cumulative_costs
from fl_dist.metrics.file import read_records
from fl_dist.metrics.record import RoundRecord
from fl_dist.metrics.summary import Scores, finite_scores
from fl_dist.storage.run_folder import DIAGNOSTICS, METRICS, RunFolder
from fl_dist.tasks import PrimaryMetric

ACCURACY = PrimaryMetric("accuracy", "max", percent=True)


@dataclass
class RunResult:
    """One run and its place in the table."""

    name: str
    row: str
    column: str
    path: Path
    rounds: int
    final_window: int
    """Rounds over which the run itself averages its final score."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its configuration as key.sub: value, without its seed, its rounds and keys that change no result."""

    @cached_property
    def primary_metric(self) -> PrimaryMetric:
        facts = RunFolder(self.path).read_facts() if self.records else {}
        return PrimaryMetric(**facts["primary_metric"]) if "primary_metric" in facts else ACCURACY

    @cached_property
    def records(self) -> list[RoundRecord]:
        return read_records(self.path / METRICS)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The records as in `metrics.jsonl`."""
        return [record.to_json() for record in self.records]

    @property
    def last_round(self) -> int:
        return self.records[-1].round if self.records else 0

    @cached_property
    def finished(self) -> bool:
        """Also if it stopped before its last round."""
        folder = RunFolder(self.path)
        return folder.is_finished(self.rounds) or folder.is_finished_record(self.rounds)

    @cached_property
    def diagnostics(self) -> list[Mapping[str, Any]]:
        """The values of all diagnostics, by increasing round: of its records, then those measured later."""
        values = [values for record in self.records for values in (record.diagnostics or {}).values()]
        later = read_lines(self.path / DIAGNOSTICS, parse_object, "a JSON object")
        return values + [entry["values"] for entry in later]

    @cached_property
    def scores(self) -> Scores:
        return finite_scores(self.records, self.primary_metric)

    def start_of_window(self, final_window: int | None) -> int:
        """The round before its last ones, over which its final score is a mean."""
        return self.last_round - (final_window or self.final_window)

    def numbers(self, key: str, after: int = 0) -> list[float | None]:
        """The values under a dotted key, in the rounds that have it; None: it could not be measured."""
        return [value for row in self.rows if row["round"] > after for value in self._lookup(row, key)]

    def _lookup(self, value: Any, key: str) -> list[float | None]:
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                return []
            value = value[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{key} in {self.path / METRICS} is {shorten(repr(value))}, not a number")
        return [value]

    def costs_until(self, rounds: Iterable[int], cost: str) -> list[float]:
        """What all rounds up to each of these cost together."""
        totals = cumulative_costs(self.records, cost)
        if not totals.keys() >= {*rounds}:
            raise DataError(f"{self.path / METRICS} lacks the {cost} of some rounds; choose another cost")
        return [totals[index] for index in rounds]


def common_metric(runs: Sequence[RunResult]) -> PrimaryMetric:
    """That of the first run with records; without any, the default."""
    return next((run.primary_metric for run in runs if run.records), runs[0].primary_metric)
