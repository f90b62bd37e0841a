"""Learning curves: one panel per column, one line per row, with a band over seeds."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from fl_dist.metrics.costs import COSTS
from fl_dist.results.collect import Collection
from fl_dist.results.panels import draw_panels, label_panel, line_style
from fl_dist.results.run_result import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(collection: Collection, file: Path, against: str = "rounds") -> bool:
    """All runs that have a score so far; False: no run has, and no file is written."""
    cells = {column: _cells_with_scores(collection, column) for column in collection.columns}
    columns = [column for column in collection.columns if any(cells[column].values())]
    if columns:
        draw_panels(file, columns, lambda panel, column: _draw_panel(panel, cells[column], column, against))
    return bool(columns)


def _cells_with_scores(collection: Collection, column: str) -> dict[str, list[RunResult]]:
    return {row: [run for run in collection.cell(row, column) if run.scores] for row in collection.rows}


def _draw_panel(panel: "Axes", cells: dict[str, list[RunResult]], column: str, against: str) -> None:
    for k, (row, runs) in enumerate(cells.items()):
        colour, dash, _ = line_style(k)
        (line,) = panel.plot([], [], color=colour, linestyle=dash, label=row, linewidth=1.6)
        if not runs:
            continue
        scale = 100 if runs[0].primary_metric.percent else 1
        # Only rounds that all seeds have, so that every mean is over the same runs.
        common = sorted(set.intersection(*({index for index, _ in run.scores} for run in runs)))
        scores = [dict(run.scores) for run in runs]
        values = [[scale * run[index] for run in scores] for index in common]
        positions = [common if against == "rounds" else run.costs_until(common, against) for run in runs]
        x = [*map(statistics.fmean, zip(*positions, strict=True))]
        line.set_data(x, [*map(statistics.fmean, values)])
        if len(runs) > 1:
            low, high = [min(v) for v in values], [max(v) for v in values]
            panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.relim()
    panel.autoscale_view()
    metric = next(run.primary_metric for runs in cells.values() for run in runs)
    label_panel(panel, column, COSTS[against].label, metric)
    panel.set_xlim(left=0)
