"""What the plots of a table share: one panel per column, colours by row, axes of a score."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_dist.plots.base import COLOURS, DASHES, new_figure
from fl_dist.tasks import PrimaryMetric

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

PANELS_PER_ROW = 3
MARKERS = ("o", "s", "^", "D")
MAX_LINEAR_SPAN = 30
"""Ratio of the largest to the smallest value up to which an axis is linear."""


def draw_panels(file: Path, titles: Sequence[str], draw: Callable[["Axes", str], None]) -> None:
    """A figure with one panel per title, and one legend for all of them."""
    across = min(PANELS_PER_ROW, len(titles))
    down = -(-len(titles) // across)
    figure = new_figure(file, (1.2 + 4.6 * across, 3.7 * down + 0.4))
    panels = figure.subplots(down, across, squeeze=False).ravel()
    handles: dict[str, Artist] = {}
    for panel, title in zip(panels, titles, strict=False):
        draw(panel, title)
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    for panel in panels[len(titles) :]:
        panel.set_axis_off()
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(file)


def line_style(k: int) -> tuple[str, str, str]:
    """Colour, dash and marker of the k-th row."""
    repeat = k // len(COLOURS)
    return COLOURS[k % len(COLOURS)], DASHES[repeat % len(DASHES)], MARKERS[repeat % len(MARKERS)]


def label_panel(panel: "Axes", title: str, xlabel: str, metric: PrimaryMetric) -> None:
    ylabel = f"test {metric.name}{' (%)' if metric.percent else ''}"
    panel.set(xlabel=xlabel, ylabel=ylabel, title=title)
    panel.grid(alpha=0.3, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def scale_x(panel: "Axes", values: Sequence[float]) -> None:
    """A logarithmic axis if the values span more than MAX_LINEAR_SPAN; linear around zero if some are not positive."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > MAX_LINEAR_SPAN * min(positive):
        if len(positive) == len(values):
            panel.set_xscale("log")
        else:
            panel.set_xscale("symlog", linthresh=min(positive))
