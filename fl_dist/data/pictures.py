"""Image files as rows of one array, decoded by several threads."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from fl_dist.common.words import message

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg")
PIECE = 64
"""Images that a thread decodes at a time."""
MANY = 10_000
"""From here on it takes long enough to say so."""

Fit = Callable[["Image"], "Image"]


def decode(files: Sequence[Path], into: np.ndarray, fit: Fit, name: str) -> None:
    """Each file as a row of uint8 [n, 3, H, W]; `fit` makes its image as large as the rows."""
    try:
        from PIL import Image  # noqa: F401  (here, so that its absence is told once)
    except ImportError:
        raise ValueError(f"reading the images of {name} needs Pillow: pip install pillow") from None
    if len(files) >= MANY and not sys.stderr.isatty():
        print(f"decoding {len(files):,} images of {name}, once on this machine", flush=True)

    def decode_piece(first: int) -> int:
        piece = files[first : first + PIECE]
        for row, file in enumerate(piece, first):
            into[row] = _pixels(file, fit, into.shape[2:], name)
        return len(piece)

    quiet = len(files) < MANY or not sys.stderr.isatty()
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        tqdm(total=len(files), unit="image", desc=name, leave=False, disable=quiet, dynamic_ncols=True) as bar,
    ):
        for done in pool.map(decode_piece, range(0, len(files), PIECE)):
            bar.update(done)


def images_in(folder: Path) -> list[Path]:
    """The images of a folder by name: the same order on every file system."""
    try:
        found = sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(SUFFIXES))
    except OSError as e:
        raise ValueError(f"{folder} cannot be read ({message(e)})") from None
    return [folder / name for name in found if not name.startswith(".")]


def as_it_is(image: "Image") -> "Image":
    return image


def resized(size: int) -> Fit:
    """The whole image, squeezed into a square."""

    def fit(image: "Image") -> "Image":
        from PIL.Image import Resampling

        return image if image.size == (size, size) else image.resize((size, size), Resampling.BILINEAR)

    return fit


def centre(size: int) -> Fit:
    """The middle of the image, as is usual for ImageNet: its shorter side is made 8/7 of the square."""

    def fit(image: "Image") -> "Image":
        from PIL.Image import Resampling

        scale = size * 8 / 7 / min(image.size)
        width, height = (max(size, round(scale * side)) for side in image.size)
        image = image.resize((width, height), Resampling.BILINEAR)
        left, top = (width - size) // 2, (height - size) // 2
        return image.crop((left, top, left + size, top + size))

    return fit


def _pixels(file: Path, fit: Fit, shape: tuple[int, ...], name: str) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file) as image:
            pixels = np.asarray(fit(image.convert("RGB"))).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        raise ValueError(f"image {file} cannot be read ({message(e)}); fetch {name} again") from None
    if pixels.shape[1:] != shape:
        raise ValueError(
            f"image {file} is {pixels.shape[2]}x{pixels.shape[1]}; images of {name} are {shape[1]}x{shape[0]}"
        )
    return pixels
