"""What sections of the page are built from: panels, figures by name, and parts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from fl_dist.report.figures import Curve, Figure, make_style
from fl_dist.report.run_reader import RunSnapshot
from fl_dist.report.run_source import RunGroup
from fl_dist.report.series import Line, Points, SeriesCache, combine_seeds, cost_axes
from fl_dist.report.tables import text
from fl_dist.results.run_result import common_metric
from fl_dist.results.table import build_table
from fl_dist.tasks import PrimaryMetric

Part = dict[str, Any]
Section = dict[str, Any]


class Panel(NamedTuple):
    """A column of a table: what is compared in one chart."""

    key: str
    title: str
    group: RunGroup
    column: str

    def cells(self) -> Iterator[tuple[str, list[RunSnapshot]]]:
        for row in self.group.collection.rows:
            if runs := self.group.cell(row, self.column):
                yield row, runs

    @property
    def primary_metric(self) -> PrimaryMetric:
        return common_metric([run.result for _, runs in self.cells() for run in runs])


class ReportBuilder:
    """The runs, and the figures that sections add."""

    def __init__(self, groups: Sequence[RunGroup], cache: SeriesCache) -> None:
        self.groups, self.cache = groups, cache
        self.figures: dict[str, Figure] = {}
        self.axes: dict[str, dict[str, list[float]]] = {}
        """By key: rounds, and the costs up to them."""
        rows = dict.fromkeys(row for group in groups for row in group.collection.rows)
        self.styles = {row: make_style(row, k) for k, row in enumerate(rows)}
        self.runs = [run for group in groups for run in group.runs]
        self.tables = [build_table(g.collection, g.collection.sweep.table, ["rounds"], g.published) for g in groups]

    @cached_property
    def panels(self) -> list[Panel]:
        several = len(self.groups) > 1
        return [
            Panel(
                f"{g}.{c}", ": ".join(filter(None, (group.collection.name if several else "", column))), group, column
            )
            for g, group in enumerate(self.groups)
            for c, column in enumerate(group.collection.columns)
        ]

    def cost_axes(self, runs: Sequence[RunSnapshot]) -> dict[str, list[float]]:
        return self.cache.get(runs, "axes", partial(cost_axes, runs))

    def add_axes(self, runs: Sequence[RunSnapshot]) -> str:
        """The key of the costs of these runs."""
        key = "+".join(str(self.number(run)) for run in runs)
        if axes := self.cost_axes(runs):
            self.axes[key] = axes
        return key

    def number(self, run: RunSnapshot) -> int:
        """Stands for the run in names of figures: readers of the page must not see its path."""
        return self._numbers[run.result.path]

    @cached_property
    def _numbers(self) -> dict[Path, int]:
        return {run.result.path: k for k, run in enumerate(self.runs)}

    def add_figure(self, name: str, figure: Figure | None) -> list[str]:
        """The name by which a part may show the figure; nothing if there is none."""
        if figure is None:
            return []
        self.figures[name] = figure
        return [name]

    def curves(self, panel: Panel, name: str, series: Callable[[RunSnapshot], Points], limit: int) -> list[Curve]:
        """The curve of each row of the panel that has one; the cache knows it by `name`."""
        curves = []
        for row, runs in panel.cells():
            line = self.cache.get(runs, name, partial(_line, runs, series, limit))
            if line is not None:
                curves.append(self.curve(row, runs, line))
        return curves

    def curve(self, row: str, runs: Sequence[RunSnapshot], line: Line) -> Curve:
        return Curve(self.styles[row], self.add_axes(runs), line)

    def per_panel(self, name: str, build: Callable[[Panel], list[Part]]) -> list[Part]:
        """The parts of one panel; readers choose it if there are several."""
        return choice(name, "shown", [(panel.title or "all", build(panel)) for panel in self.panels])

    def per_run(self, name: str, build: Callable[[RunSnapshot], list[Part]]) -> list[Part]:
        return choice(name, "run", [(run.name, build(run)) for run in self.runs])


def _line(runs: Sequence[RunSnapshot], series: Callable[[RunSnapshot], Points], limit: int) -> Line | None:
    return combine_seeds([series(run) for run in runs], limit)


def section(name: str, title: str, parts: Sequence[Part], note: str = "", over_rounds: bool = False) -> Section | None:
    """None if it has nothing to show. `over_rounds`: its curves can be drawn over costs instead of rounds."""
    if not parts:
        return None
    return {"id": name, "title": title, "note": note, "parts": list(parts), "overRounds": over_rounds}


def html(content: str) -> list[Part]:
    return [{"html": content}] if content else []


def heading(title: str) -> list[Part]:
    return html(f"<h3>{text(title)}</h3>" if title else "")


def charts(names: Sequence[str], kind: str = "") -> list[Part]:
    return [{"charts": list(names), "kind": kind}] if names else []


def choice(name: str, label: str, options: Iterable[tuple[str, list[Part]]]) -> list[Part]:
    """Readers choose one of the options that have anything to show, if there are several."""
    options = [(option, parts) for option, parts in options if parts]
    if len(options) < 2:
        return [part for _, parts in options for part in parts]
    return [{"choice": name, "label": label, "options": [{"label": o, "parts": parts} for o, parts in options]}]
