"""What all plots share: files, colours, dashes, names."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fl_dist.common.errors import ConfigError, UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, safe for colour-blind readers; further lines repeat them with other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
DASHES = ("-", "--", ":", "-.")
MAX_ASPECT = 2.0
"""Ratio of its sides up to which a plane is drawn to scale; beyond that it would be a strip."""
SUFFIXES = (".png", ".pdf", ".svg")


def check_plot_file(file: Path) -> None:
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} is not an image file: its name has to end in {', '.join(SUFFIXES)}")


def new_figure(file: Path, inches: tuple[float, float]) -> "Figure":
    """An empty figure that can be saved to the file; creates its folder."""
    check_plot_file(file)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install matplotlib") from None
    file.parent.mkdir(parents=True, exist_ok=True)
    return Figure(figsize=inches, dpi=150, layout="constrained")


def distinct_names(folders: Iterable[str | Path]) -> list[str]:
    """The name of each folder, with as many parent folders as it takes to be unique."""
    paths = [Path(folder).parts for folder in folders]
    count = Counter(path[-k:] for path in paths for k in range(1, len(path) + 1))
    lengths = (next((k for k in range(1, len(path)) if count[path[-k:]] == 1), len(path)) for path in paths)
    return [str(Path(*path[-k:])) for path, k in zip(paths, lengths, strict=True)]


def line_widths(lines: int, thinnest: float = 1.2, widest: float = 6.0) -> list[float]:
    """Widths of lines that may overlap, the lowest line first and widest."""
    return [thinnest + (widest - thinnest) * k / max(1, lines - 1) for k in reversed(range(lines))]
