"""CINIC-10 (Darlow et al., 2018): 32x32 colour images of ten classes, 90,000 each to train, validate, test.

Read are `train` and `test`, as the experiments of FedGMT do.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fl_dist.common.paths import expand
from fl_dist.data.dataset import Dataset, datasets
from fl_dist.data.npz import read

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
IMAGE = (3, 32, 32)
PACKED = "cinic10.npz"
THREADS = 8


@datasets.register
def cinic10(
    *,
    root: Annotated[
        str,
        Field(min_length=1, description="folder with train/<class>/*.png and test/<class>/*.png, or cinic10.npz"),
    ],
) -> Dataset:
    """CINIC-10 from its published folders, or from one file cinic10.npz of the same arrays (quicker)."""
    folder = expand(root)
    if (folder / PACKED).is_file():
        return _packed(folder / PACKED)
    for part in ("train", "test"):
        if not (folder / part).is_dir():
            raise ValueError(
                f"no CINIC-10 in {folder}: {folder / part} is missing; set data.root to the folder that holds"
                f" train/<class>/*.png and test/<class>/*.png, or {PACKED}"
            )
    (x_train, y_train), (x_test, y_test) = _images(folder / "train"), _images(folder / "test")
    return Dataset(x_train, y_train, x_test, y_test, len(CLASSES), MEAN, STD)


def _packed(path: Path) -> Dataset:
    data = read(path)
    if data.shape != IMAGE or data.x_train.dtype != torch.uint8 or data.classes > len(CLASSES):
        raise ValueError(f"data file {path}: CINIC-10 needs uint8 images [n, 3, 32, 32] and labels 0..9")
    return replace(data, classes=len(CLASSES), mean=MEAN, std=STD)


def _images(folder: Path) -> tuple[Tensor, Tensor]:
    files = _files(folder)
    x = np.empty((len(files), *IMAGE), np.uint8)
    with ThreadPoolExecutor(THREADS) as pool:
        for row, image in enumerate(pool.map(_decode, [file for file, _ in files])):
            x[row] = image
    return torch.from_numpy(x), torch.tensor([label for _, label in files])


def _files(folder: Path) -> list[tuple[Path, int]]:
    """Every image with its label, by class and then by name: the same rows on every file system."""
    found = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if found != set(CLASSES):
        raise ValueError(
            f"{folder} is not of CINIC-10: missing classes {sorted(set(CLASSES) - found)}, unknown"
            f" {sorted(found - set(CLASSES))}; extract the archive again"
        )
    return [(file, label) for label, name in enumerate(CLASSES) for file in _pngs(folder / name)]


def _pngs(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.glob("*.png") if not file.name.startswith("."))
    if not files:
        raise ValueError(f"{folder} holds no .png file; extract the CINIC-10 archive again")
    return files


def _decode(file: Path) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("reading CINIC-10 images needs Pillow: pip install pillow") from None
    try:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"image {file} cannot be read ({error}); extract the CINIC-10 archive again") from None
    if pixels.shape != IMAGE:
        raise ValueError(f"image {file} is {pixels.shape[2]}x{pixels.shape[1]}; CINIC-10 images are 32x32")
    return pixels
