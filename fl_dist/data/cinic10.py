"""CINIC-10 (Darlow et al., 2018): 32x32 colour images of ten classes, 90,000 each to train, validate, test.

Read are `train` and `test`, as the experiments of FedGMT do.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from fl_dist.common.paths import expand
from fl_dist.data import shared
from fl_dist.data.dataset import Dataset, datasets, of_arrays
from fl_dist.data.npz import read
from fl_dist.data.pictures import as_it_is, decode, images_in
from fl_dist.data.sources import absent, again

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
IMAGE = (3, 32, 32)
PACKED = "cinic10.npz"


@datasets.register
def cinic10(
    *,
    root: Annotated[
        str,
        Field(
            min_length=1,
            description="folder that holds cinic-10, or that itself: train/<class>/*.png and test, or cinic10.npz",
        ),
    ],
) -> Dataset:
    """CINIC-10 from its published folders, or from one file cinic10.npz of the same arrays (quicker)."""
    given = expand(root)
    folder = given / "cinic-10" if (given / "cinic-10").is_dir() else given
    if (folder / PACKED).is_file():
        return _packed(folder / PACKED)
    for part in ("train", "test"):
        if not (folder / part).is_dir():
            raise ValueError(absent("cinic10", given, f"{folder / part} (or {PACKED})"))
    folders = {part: [folder / part / name for name in CLASSES] for part in ("train", "test")}

    def make(new: shared.Allocate) -> None:
        for part in folders:
            _check(folder / part)
            files = [(file, label) for label, of_class in enumerate(folders[part]) for file in _pngs(of_class)]
            new(f"y_{part}", (len(files),), np.int64)[:] = [label for _, label in files]
            decode([file for file, _ in files], new(f"x_{part}", (len(files), *IMAGE), np.uint8), as_it_is, "cinic10")

    sources = [entry for part in folders.values() for entry in part if entry.is_dir()]
    return of_arrays(shared.arrays("cinic10", sources, None, make), len(CLASSES), mean=MEAN, std=STD)


def _packed(path: Path) -> Dataset:
    data = read(path)
    if data.shape != IMAGE or data.x_train.dtype != torch.uint8 or data.classes > len(CLASSES):
        raise ValueError(f"data file {path}: CINIC-10 needs uint8 images [n, 3, 32, 32] and labels 0..9")
    return replace(data, classes=len(CLASSES), mean=MEAN, std=STD)


def _check(folder: Path) -> None:
    found = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if found != set(CLASSES):
        raise ValueError(
            f"{folder} is not of CINIC-10: missing classes {sorted(set(CLASSES) - found)}, unknown"
            f" {sorted(found - set(CLASSES))}; {again('cinic10')}"
        )


def _pngs(folder: Path) -> list[Path]:
    files = images_in(folder)
    if not files:
        raise ValueError(f"{folder} holds no image; {again('cinic10')}")
    return files
