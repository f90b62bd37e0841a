"""How the data is divided among clients, as a plot."""

from pathlib import Path

import numpy as np

from fl_dist.plots.base import COLOURS, new_figure

MAX_BUBBLES = 40
"""Clients and classes up to which each count is a bubble; beyond that it is a coloured square."""


def draw(counts: np.ndarray, file: Path, title: str) -> None:
    """`counts`: samples of [client, class]."""
    clients, classes = counts.shape
    use_bubbles = max(clients, classes) <= MAX_BUBBLES
    width, height = (0.22 * clients + 1.6, 0.22 * classes + 1.2) if use_bubbles else (8.0, 5.0)
    figure = new_figure(file, (max(4.0, width), max(2.6, height)))
    axes = figure.subplots()
    if use_bubbles:
        client, label = np.nonzero(counts)
        area = 130 * counts[client, label] / counts.max()
        axes.scatter(client, label, s=area, color=COLOURS[0], linewidths=0)
        axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3), xticks=range(clients), yticks=range(classes))
        axes.tick_params(labelsize=7)
    else:
        image = axes.imshow(counts.T, aspect="auto", origin="lower", cmap="Blues", interpolation="nearest")
        figure.colorbar(image, ax=axes, label="rows")
        axes.locator_params(integer=True)
    axes.set(xlabel="client", ylabel="class")
    axes.set_title(f"{title}\nlargest: {counts.max():,} rows" if use_bubbles else title, fontsize=9)
    figure.savefig(file)
