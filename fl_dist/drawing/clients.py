"""Who has what of the data, as a picture."""

from pathlib import Path

import numpy as np

from fl_dist.drawing.base import COLOURS, blank

BUBBLES = 40
"""Clients and classes up to which each count is a bubble; beyond that it is a coloured square."""


def draw(counts: np.ndarray, file: Path, title: str) -> None:
    """Rows of [client, class]."""
    clients, classes = counts.shape
    few = max(clients, classes) <= BUBBLES
    width, height = (0.22 * clients + 1.6, 0.22 * classes + 1.2) if few else (8.0, 5.0)
    figure = blank(file, (max(4.0, width), max(2.6, height)))
    axes = figure.subplots()
    if few:
        client, label = np.nonzero(counts)
        area = 130 * counts[client, label] / counts.max()
        axes.scatter(client, label, s=area, color=COLOURS[0], linewidths=0)
        axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3), xticks=range(clients), yticks=range(classes))
        axes.tick_params(labelsize=7)
    else:
        shown = axes.imshow(counts.T, aspect="auto", origin="lower", cmap="Blues", interpolation="nearest")
        figure.colorbar(shown, ax=axes, label="rows")
        axes.locator_params(integer=True)
    axes.set(xlabel="client", ylabel="class")
    axes.set_title(f"{title}\nlargest: {counts.max():,} rows" if few else title, fontsize=9)
    figure.savefig(file)
