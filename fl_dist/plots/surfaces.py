"""Plots of the loss around models: contours and 3d surfaces, planes with paths, profiles; all runs on one scale."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_dist.plots.base import COLOURS, DASHES, MAX_ASPECT, distinct_names, line_widths, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import SubFigure

LEVELS = 24
WIDTH, HEIGHT = 3.6, 3.3
"""Of a panel, in inches."""

Values = Mapping[str, Any]


def draw(diagnostics: Mapping[str, Sequence[Values]], file: Path) -> bool:
    """Draw the newest surface, plane and profile of each run (by its folder); False: there is none, and no file."""
    by_run = dict(zip(distinct_names(diagnostics), diagnostics.values(), strict=True))
    bands = [(draw_band, runs, rows) for fits, draw_band, rows in KINDS if (runs := _newest(by_run, fits))]
    if not bands:
        return False
    widest = max(len(PROFILES) if draw_band is _draw_profiles else len(runs) for draw_band, runs, _ in bands)
    heights = [HEIGHT * rows for _, _, rows in bands]
    figure = new_figure(file, (max(5.0, WIDTH * widest + 0.9), sum(heights)))
    parts = figure.subfigures(len(bands), 1, height_ratios=heights, squeeze=False)
    for part, (draw_band, runs, _) in zip(parts, bands, strict=True):
        draw_band(part[0], runs)
    figure.savefig(file)
    return True


def can_draw(values: Values) -> bool:
    """Whether these values can be drawn."""
    return any(fits(values) for fits, _, _ in KINDS)


def _newest(by_run: Mapping[str, Sequence[Values]], fits: Callable[[Values], bool]) -> dict[str, Values]:
    """The last values of this kind of each run."""
    of_kind = {run: [values for values in diagnostics if fits(values)] for run, diagnostics in by_run.items()}
    return {run: diagnostics[-1] for run, diagnostics in of_kind.items() if diagnostics}


def _draw_surfaces(figure: "SubFigure", runs: Mapping[str, Values]) -> None:
    """Contours above, 3d below."""
    scale = _log_scale([_numbers(values["loss"]) for values in runs.values()])
    panels = [figure.add_subplot(2, len(runs), 1 + k) for k in range(len(runs))]
    for k, (panel, (run, values)) in enumerate(zip(panels, runs.items(), strict=True)):
        x, y, loss = (_numbers(values[name]) for name in ("x", "y", "loss"))
        contours = _draw_contours(panel, x, y, loss, scale)
        panel.plot(0, 0, "+", color="black")
        panel.set_title(run, fontsize=9)
        space: Any = figure.add_subplot(2, len(runs), 1 + len(runs) + k, projection="3d")
        space.plot_surface(*np.meshgrid(x, y), loss, cmap="viridis", norm=scale, linewidth=0, antialiased=False)
        space.set_zlim(scale.vmin, scale.vmax)
        space.set_zlabel("loss", fontsize=7)
        space.locator_params(nbins=4)
        space.tick_params(labelsize=6)
    figure.colorbar(contours, ax=panels, label="loss", format="%.3g")


def _draw_planes(figure: "SubFigure", runs: Mapping[str, Values]) -> None:
    """The loss of the client, of all, and both together, with the paths of the methods."""
    panels = figure.subplots(len(LOSSES), len(runs), squeeze=False)
    for line, (title, loss) in zip(panels, LOSSES.items(), strict=True):
        grids = [loss(values) for values in runs.values()]
        scale = _log_scale(grids) if loss is not _both else _unit_scale()
        for panel, grid, (run, values) in zip(line, grids, runs.items(), strict=True):
            contours = _draw_contours(panel, _numbers(values["x"]), _numbers(values["y"]), grid, scale)
            _draw_paths(panel, values["paths"])
            panel.set_title(f"{run}: {title}", fontsize=8)
        figure.colorbar(contours, ax=line, format="%.3g")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _draw_paths(panel: "Axes", paths: Mapping[str, Any]) -> None:
    """Each path is thinner than those below it, so that none hides another."""
    for k, ((name, path), width) in enumerate(zip(paths.items(), line_widths(len(paths)), strict=True)):
        colour = COLOURS[(k + 1) % len(COLOURS)]
        panel.plot(path["x"], path["y"], ".-", color=colour, linewidth=width, markersize=2 + 1.6 * width, label=name)
    panel.plot(0, 0, "*", color="black")


def _both(values: Values) -> np.ndarray:
    mean: np.ndarray = (_normalize(_numbers(values["client_loss"])) + _normalize(_numbers(values["global_loss"]))) / 2
    return mean


LOSSES = {
    "the client's loss": lambda values: _numbers(values["client_loss"]),
    "the loss of all": lambda values: _numbers(values["global_loss"]),
    "both, each from 0 to 1": _both,
}
"""What the panels of a plane show, by title."""


def _draw_profiles(figure: "SubFigure", runs: Mapping[str, Values]) -> None:
    panels = figure.subplots(1, len(PROFILES))
    for panel, (name, title) in zip(panels, PROFILES.items(), strict=True):
        for k, (run, values) in enumerate(runs.items()):
            colour, dash = COLOURS[k % len(COLOURS)], DASHES[k // len(COLOURS) % len(DASHES)]
            panel.plot(_numbers(values["radii"]), _numbers(values[name]), dash, color=colour, label=run, linewidth=1.5)
        panel.set(xlabel="distance from the model")
        panel.set_title(title, fontsize=9)
        panel.grid(alpha=0.3, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="loss of all clients")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)


PROFILES = {"random": "random directions", "gradient": "along the gradient"}


def _is_plane(values: Values) -> bool:
    paths = values.get("paths")
    return isinstance(paths, Mapping) and _has_grids(values, "client_loss", "global_loss") and _are_paths(paths)


def _are_paths(paths: Mapping[str, Any]) -> bool:
    mappings = [path if isinstance(path, Mapping) else {} for path in paths.values()]
    points = [(_numbers(path.get("x")), _numbers(path.get("y"))) for path in mappings]
    return all(x.ndim == 1 and x.shape == y.shape for x, y in points)


def _is_surface(values: Values) -> bool:
    return _has_grids(values, "loss")


def _is_profile(values: Values) -> bool:
    radii, *lines = (_numbers(values.get(name)) for name in ("radii", *PROFILES))
    return radii.ndim == 1 and all(line.shape == radii.shape for line in lines)


def _has_grids(values: Values, *names: str) -> bool:
    """Whether there are such losses over x and y; some values may be missing, but not all."""
    x, y, *grids = (_numbers(values.get(name)) for name in ("x", "y", *names))
    if not (x.ndim == y.ndim == 1 and min(x.size, y.size) > 1 and np.isfinite([*x, *y]).all()):
        return False
    return all(grid.shape == (y.size, x.size) and np.isfinite(grid).any() for grid in grids)


KINDS = ((_is_plane, _draw_planes, 3), (_is_surface, _draw_surfaces, 2), (_is_profile, _draw_profiles, 1))
"""Test of the values, how they are drawn, and how many panels high."""


def _draw_contours(panel: "Axes", x: np.ndarray, y: np.ndarray, loss: np.ndarray, scale: "Normalize") -> Any:
    levels = scale.inverse(np.linspace(0.0, 1.0, LEVELS))
    contours = panel.contourf(x, y, loss, levels=levels, cmap="viridis", norm=scale, extend="both")
    panel.contour(x, y, loss, levels=levels, colors="white", linewidths=0.3)
    panel.tick_params(labelsize=7)
    is_strip = max(np.ptp(x), np.ptp(y)) > MAX_ASPECT * min(np.ptp(x), np.ptp(y))
    panel.set_aspect("auto" if is_strip else "equal", adjustable="box")
    return contours


def _log_scale(grids: Sequence[np.ndarray]) -> "Normalize":
    from matplotlib.colors import LogNorm

    low, high = min(np.nanmin(grid) for grid in grids), max(np.nanmax(grid) for grid in grids)
    low = max(low, high * 1e-6, 1e-12)
    return LogNorm(low, max(high, low * 1.01))


def _unit_scale() -> "Normalize":
    from matplotlib.colors import Normalize

    return Normalize(0.0, 1.0)


def _numbers(value: Any) -> np.ndarray:
    """As an array, with NaN for what could not be measured; a single NaN if the value holds no numbers."""
    try:
        return np.array(value, dtype=float)
    except (TypeError, ValueError):
        return np.array(np.nan)


def _normalize(grid: np.ndarray) -> np.ndarray:
    low, high = np.nanmin(grid), np.nanmax(grid)
    normalized: np.ndarray = (grid - low) / max(high - low, 1e-12)
    return normalized
