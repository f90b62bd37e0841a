"""Learning curves: one panel per column, one line per row, with a band over seeds."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from fl_dist.metrics.record import COSTS
from fl_dist.plots.base import COLOURS, DASHES, new_figure
from fl_dist.results.collect import Collection, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS_PER_ROW = 3


def draw(collection: Collection, file: Path, against: str = "rounds") -> bool:
    """All runs that have a score so far; False: no run has, and no file is written."""
    columns = [column for column in collection.columns if any(_cells_with_scores(collection, column).values())]
    if not columns:
        return False
    across = min(PANELS_PER_ROW, len(columns))
    down = -(-len(columns) // across)
    figure = new_figure(file, (1.2 + 4.6 * across, 3.7 * down + 0.4))
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel, column in zip(panels, columns, strict=False):
        _draw_panel(panel, _cells_with_scores(collection, column), column, against)
    for panel in panels[len(columns) :]:
        panel.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(file)
    return True


def _cells_with_scores(collection: Collection, column: str) -> dict[str, list[RunResult]]:
    return {row: [run for run in collection.cell(row, column) if run.scores] for row in collection.rows}


def _draw_panel(panel: "Axes", cells: dict[str, list[RunResult]], column: str, against: str) -> None:
    for k, (row, runs) in enumerate(cells.items()):
        colour, dash = COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)]
        (line,) = panel.plot([], [], color=colour, linestyle=dash, label=row, linewidth=1.6)
        if not runs:
            continue
        scale = 100 if runs[0].primary_metric.percent else 1
        # Only rounds that all seeds have, so that every mean is over the same runs.
        common = sorted(set.intersection(*({index for index, _ in run.scores} for run in runs)))
        scores = [dict(run.scores) for run in runs]
        values = [[scale * run[index] for run in scores] for index in common]
        x = [statistics.fmean(_position(run, against, index) for run in runs) for index in common]
        line.set_data(x, [statistics.fmean(v) for v in values])
        if len(runs) > 1:
            low, high = [min(v) for v in values], [max(v) for v in values]
            panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.relim()
    panel.autoscale_view()
    metric = next(run.primary_metric for runs in cells.values() for run in runs)
    ylabel = f"test {metric.name}{' (%)' if metric.percent else ''}"
    panel.set(xlabel=COSTS[against].label, ylabel=ylabel, title=column)
    panel.set_xlim(left=0)
    panel.grid(alpha=0.3, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _position(run: RunResult, against: str, index: int) -> float:
    return float(index) if against == "rounds" else run.cost_until(index, against)
