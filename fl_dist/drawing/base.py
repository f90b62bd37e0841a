"""What all pictures share: files, colours, dashes, names."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people who do not see all colours can tell apart; then the same with other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
DASHES = ("-", "--", ":", "-.")
SLIMMEST = 2.0
"""Ratio of its sides up to which a plane is drawn true to scale; beyond that it would be a strip."""
SUFFIXES = (".png", ".pdf", ".svg")


def check(file: Path) -> None:
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} is not a picture: its name has to end in {', '.join(SUFFIXES)}")


def blank(file: Path, inches: tuple[float, float]) -> "Figure":
    """An empty figure that can be saved to the file, whose folder is there."""
    check(file)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from None
    file.parent.mkdir(parents=True, exist_ok=True)
    return Figure(figsize=inches, dpi=150, layout="constrained")


def told_apart(folders: Iterable[str | Path]) -> list[str]:
    """The name of each folder, with as many before it as it takes to tell it from the others."""
    paths = [Path(folder).parts for folder in folders]
    count = Counter(path[-k:] for path in paths for k in range(1, len(path) + 1))
    unlike = (next((k for k in range(1, len(path)) if count[path[-k:]] == 1), len(path)) for path in paths)
    return [str(Path(*path[-k:])) for path, k in zip(paths, unlike, strict=True)]


def widths(lines: int, least: float = 1.2, most: float = 6.0) -> list[float]:
    """Of lines that may lie on one another, the lowest first."""
    return [least + (most - least) * k / max(1, lines - 1) for k in reversed(range(lines))]
