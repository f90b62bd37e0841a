"""Learning curves: one panel a column, one line a row, the band over seeds."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from fl_dist.drawing.base import COLOURS, DASHES, blank
from fl_dist.results.collect import COSTS, Collection, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS = 3
"""Panels side by side."""


def draw(found: Collection, file: Path, against: str = "rounds") -> bool:
    """All runs that have a score so far; False: there are none, and no picture."""
    columns = [column for column in found.columns if any(o.scores for row in found.rows for o in found.at(row, column))]
    if not columns:
        return False
    across = min(ACROSS, len(columns))
    down = -(-len(columns) // across)
    figure = blank(file, (1.2 + 4.6 * across, 3.7 * down + 0.4))
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel, column in zip(panels, columns, strict=False):
        _panel(panel, found, column, against)
    for panel in panels[len(columns) :]:
        panel.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(file)
    return True


def _panel(panel: "Axes", found: Collection, column: str, against: str) -> None:
    for k, row in enumerate(found.rows):
        runs = [run for run in found.at(row, column) if run.scores]
        colour, dash = COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)]
        (line,) = panel.plot([], [], color=colour, linestyle=dash, label=row, linewidth=1.6)
        if not runs:
            continue
        scale = 100 if runs[0].headline.percent else 1
        # Up to where all of its seeds are, so that the mean is of the same runs everywhere.
        common = sorted(set.intersection(*({index for index, _ in run.scores} for run in runs)))
        scores = [dict(run.scores) for run in runs]
        values = [[scale * run[index] for run in scores] for index in common]
        places = [statistics.fmean(_place(run, against, index) for run in runs) for index in common]
        line.set_data(places, [statistics.fmean(v) for v in values])
        if len(runs) > 1:
            panel.fill_between(
                places, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, linewidth=0
            )
    panel.relim()
    panel.autoscale_view()
    metric = next(run.headline for row in found.rows for run in found.at(row, column) if run.scores)
    panel.set(xlabel=LABELS[against], ylabel=f"test {metric.name}{' (%)' if metric.percent else ''}", title=column)
    panel.set_xlim(left=0)
    panel.grid(alpha=0.3, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


LABELS = {"rounds": "round", "gigabytes": "sent to and from clients (GB)", "passes": "passes", "minutes": "minutes"}
LABELS |= {"local_minutes": "minutes of local training"}
assert LABELS.keys() == COSTS.keys()


def _place(run: Outcome, against: str, index: int) -> float:
    return float(index) if against == "rounds" else run.spent(against, index)
