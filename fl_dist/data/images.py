"""Image files as rows of one array, decoded by several threads."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.terminal import print_progress
from fl_dist.data.download_sources import SOURCES
from fl_dist.data.shared_arrays import Allocate

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG")  # Pillow would take others by their content, such as PostScript, for which it runs a program
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHUNK_IMAGES = 64  # decoded by a thread at a time
MIN_IMAGES_FOR_PROGRESS = 10_000

Transform = Callable[["Image", int], "Image"]
"""Scales an image to a square of so many pixels per side."""


class EncodedImage(NamedTuple):
    """The content of an image file."""

    content: bytes
    where: str
    """Where it was read, for errors."""

    def __str__(self) -> str:
        return self.where


def write_labelled_images(
    allocate: Allocate,
    split: str,
    files: Sequence[tuple[Path, int]],
    transform: Transform,
    size: int,
    name: str,
) -> None:
    """Arrays x and y of a split from (file, label)."""
    allocate(f"y_{split}", (len(files),), np.int64)[:] = [label for _, label in files]
    x = allocate(f"x_{split}", (len(files), 3, size, size), np.uint8)
    decode_images([file for file, _ in files], x, transform, name)


def decode_images(files: Sequence[Path | EncodedImage], out: np.ndarray, transform: Transform, name: str) -> None:
    """Each file as a row of uint8 [n, 3, size, size]."""
    try:
        from PIL import Image  # noqa: F401  (here, so that its absence is reported once)
    except ImportError:
        raise DataError(f"reading the images of {name} needs Pillow: pip install pillow") from None
    is_long, has_terminal = len(files) >= MIN_IMAGES_FOR_PROGRESS, sys.stderr.isatty()
    if is_long and not has_terminal:
        print_progress(f"decoding {len(files):,} images of {name}, once on this machine", sys.stdout)

    def decode_chunk(start: int) -> int:
        chunk = files[start : start + CHUNK_IMAGES]
        for row, file in enumerate(chunk, start):
            out[row] = _read_pixels(file, transform, out.shape[2], name)
        return len(chunk)

    is_quiet = not (is_long and has_terminal)
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        tqdm(total=len(files), unit="image", desc=name, leave=False, disable=is_quiet, dynamic_ncols=True) as bar,
    ):
        for count in pool.map(decode_chunk, range(0, len(files), CHUNK_IMAGES)):
            bar.update(count)


def list_images(folder: Path) -> list[Path]:
    """The images of a folder by name: the same order on every file system."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(SUFFIXES))
    except OSError as e:
        raise DataError(f"{folder} cannot be read ({error_message(e)})") from None
    return [folder / name for name in names if not name.startswith(".")]


def list_labelled_images(folders: Sequence[Path]) -> list[tuple[Path, int]]:
    """All images of one folder per class, with the index of the class; folders may be missing."""
    return [(file, label) for label, folder in enumerate(folders) if folder.is_dir() for file in list_images(folder)]


def subfolders(folder: Path) -> list[Path]:
    """By name, without hidden ones."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def resize(image: "Image", size: int) -> "Image":
    """The whole image, squeezed into a square."""
    from PIL.Image import Resampling

    return image if image.size == (size, size) else image.resize((size, size), Resampling.BILINEAR)


def center_crop(image: "Image", size: int) -> "Image":
    """The centre of the image, as is usual for ImageNet: its shorter side is scaled to 8/7 of the square."""
    from PIL.Image import Resampling

    scale = size * 8 / 7 / min(image.size)
    width, height = (max(size, round(scale * side)) for side in image.size)
    image = image.resize((width, height), Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _read_pixels(file: Path | EncodedImage, transform: Transform, size: int, name: str) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(file.content) if isinstance(file, EncodedImage) else file, formats=FORMATS) as image:
            pixels = np.asarray(transform(image.convert("RGB"), size)).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        hint = f"fetch {name} again" if name in SOURCES else "replace or remove it"
        raise DataError(f"image {file} cannot be read ({error_message(e)}); {hint}") from None
    if pixels.shape[1:] != (size, size):
        raise DataError(f"image {file} is {pixels.shape[2]}x{pixels.shape[1]}; images of {name} are {size}x{size}")
    return pixels
