"""Pictures of the loss around models: contours and reliefs, planes with paths, lines; all runs on one scale."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_dist.drawing.base import COLOURS, DASHES, SLIMMEST, blank, told_apart, widths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import SubFigure

LEVELS = 24
WIDTH, HEIGHT = 3.6, 3.3
"""Of a panel, in inches."""

Values = Mapping[str, Any]


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> bool:
    """Of each run (by its folder) the newest surface, plane and profile; False: there is none, and no picture."""
    named = dict(zip(told_apart(found), found.values(), strict=True))
    bands = [(make, of, rows) for fits, make, rows in KINDS if (of := _newest(named, fits))]
    if not bands:
        return False
    widest = max(len(PROFILES) if make is _lines else len(of) for make, of, _ in bands)
    heights = [HEIGHT * rows for _, _, rows in bands]
    figure = blank(file, (max(5.0, WIDTH * widest + 0.9), sum(heights)))
    for part, (make, of, _) in zip(
        figure.subfigures(len(bands), 1, height_ratios=heights, squeeze=False), bands, strict=True
    ):
        make(part[0], of)
    figure.savefig(file)
    return True


def can_draw(values: Values) -> bool:
    """Whether a picture shows these values."""
    return any(fits(values) for fits, _, _ in KINDS)


def _newest(found: Mapping[str, Sequence[Mapping[str, Any]]], fits: Any) -> dict[str, Values]:
    """Of each run, the last values of this kind."""
    values = {run: [entry["values"] for entry in of if fits(entry["values"])] for run, of in found.items()}
    return {run: of[-1] for run, of in values.items() if of}


def _surfaces(figure: "SubFigure", of: Mapping[str, Values]) -> None:
    """Contours above, reliefs below."""
    scale = _scale([_numbers(values["loss"]) for values in of.values()])
    panels = [figure.add_subplot(2, len(of), 1 + k) for k in range(len(of))]
    for k, (panel, (run, values)) in enumerate(zip(panels, of.items(), strict=True)):
        x, y, loss = (_numbers(values[name]) for name in ("x", "y", "loss"))
        shown = _contours(panel, x, y, loss, scale)
        panel.plot(0, 0, "+", color="black")
        panel.set_title(run, fontsize=9)
        relief: Any = figure.add_subplot(2, len(of), 1 + len(of) + k, projection="3d")
        relief.plot_surface(*np.meshgrid(x, y), loss, cmap="viridis", norm=scale, linewidth=0, antialiased=False)
        relief.set_zlim(scale.vmin, scale.vmax)
        relief.set_zlabel("loss", fontsize=7)
        relief.locator_params(nbins=4)
        relief.tick_params(labelsize=6)
    figure.colorbar(shown, ax=panels, label="loss", format="%.3g")


def _planes(figure: "SubFigure", of: Mapping[str, Values]) -> None:
    """The loss of the client, of all, and both together, with the methods' paths."""
    panels = figure.subplots(len(LOSSES), len(of), squeeze=False)
    for line, (title, loss) in zip(panels, LOSSES.items(), strict=True):
        grids = [loss(values) for values in of.values()]
        scale = _scale(grids) if loss is not _both else _evenly()
        for panel, grid, (run, values) in zip(line, grids, of.items(), strict=True):
            shown = _contours(panel, _numbers(values["x"]), _numbers(values["y"]), grid, scale)
            _paths(panel, values["paths"])
            panel.set_title(f"{run}: {title}", fontsize=8)
        figure.colorbar(shown, ax=line, format="%.3g")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _paths(panel: "Axes", paths: Mapping[str, Any]) -> None:
    """Each thinner than those below it, so that none hides another."""
    for k, ((name, path), width) in enumerate(zip(paths.items(), widths(len(paths)), strict=True)):
        colour = COLOURS[(k + 1) % len(COLOURS)]
        panel.plot(path["x"], path["y"], ".-", color=colour, linewidth=width, markersize=2 + 1.6 * width, label=name)
    panel.plot(0, 0, "*", color="black")


def _both(values: Values) -> np.ndarray:
    return (_stretched(_numbers(values["client_loss"])) + _stretched(_numbers(values["global_loss"]))) / 2


LOSSES = {
    "the client's loss": lambda values: _numbers(values["client_loss"]),
    "the loss of all": lambda values: _numbers(values["global_loss"]),
    "both, each from 0 to 1": _both,
}
"""By title, what the panels of a plane show."""


def _lines(figure: "SubFigure", of: Mapping[str, Values]) -> None:
    panels = figure.subplots(1, len(PROFILES))
    for panel, (name, title) in zip(panels, PROFILES.items(), strict=True):
        for k, (run, values) in enumerate(of.items()):
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
    return isinstance(paths, Mapping) and _has_grids(values, "client_loss", "global_loss") and _lie_in(paths)


def _lie_in(paths: Mapping[str, Any]) -> bool:
    known = [path if isinstance(path, Mapping) else {} for path in paths.values()]
    ends = [(_numbers(path.get("x")), _numbers(path.get("y"))) for path in known]
    return all(x.ndim == 1 and x.shape == y.shape for x, y in ends)


def _is_surface(values: Values) -> bool:
    return _has_grids(values, "loss")


def _is_profile(values: Values) -> bool:
    radii, *lines = (_numbers(values.get(name)) for name in ("radii", *PROFILES))
    return radii.ndim == 1 and all(line.shape == radii.shape for line in lines)


def _has_grids(values: Values, *names: str) -> bool:
    """Whether there are such losses over x and y; some may be holes, but not all."""
    x, y, *grids = (_numbers(values.get(name)) for name in ("x", "y", *names))
    if not (x.ndim == y.ndim == 1 and min(x.size, y.size) > 1 and np.isfinite([*x, *y]).all()):
        return False
    return all(grid.shape == (y.size, x.size) and np.isfinite(grid).any() for grid in grids)


KINDS = ((_is_plane, _planes, 3), (_is_surface, _surfaces, 2), (_is_profile, _lines, 1))
"""By what the values are, how they are drawn, and how many panels high."""


def _contours(panel: "Axes", x: np.ndarray, y: np.ndarray, loss: np.ndarray, scale: "Normalize") -> Any:
    levels = scale.inverse(np.linspace(0.0, 1.0, LEVELS))
    shown = panel.contourf(x, y, loss, levels=levels, cmap="viridis", norm=scale, extend="both")
    panel.contour(x, y, loss, levels=levels, colors="white", linewidths=0.3)
    panel.tick_params(labelsize=7)
    slim = max(np.ptp(x), np.ptp(y)) > SLIMMEST * min(np.ptp(x), np.ptp(y))
    panel.set_aspect("auto" if slim else "equal", adjustable="box")
    return shown


def _scale(grids: Sequence[np.ndarray]) -> "Normalize":
    from matplotlib.colors import LogNorm

    low, high = min(np.nanmin(grid) for grid in grids), max(np.nanmax(grid) for grid in grids)
    low = max(low, high * 1e-6, 1e-12)
    return LogNorm(low, max(high, low * 1.01))


def _evenly() -> "Normalize":
    from matplotlib.colors import Normalize

    return Normalize(0.0, 1.0)


def _numbers(value: Any) -> np.ndarray:
    """What could not be measured is a hole; what are no numbers is a single one."""
    try:
        return np.array(value, dtype=float)
    except (TypeError, ValueError):
        return np.array(np.nan)


def _stretched(grid: np.ndarray) -> np.ndarray:
    low, high = np.nanmin(grid), np.nanmax(grid)
    return (grid - low) / max(high - low, 1e-12)
