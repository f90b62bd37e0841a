"""CINIC-10 (Darlow et al., 2018): 32x32 colour images of ten classes, 90,000 each to train, validate, test.

Only `train` and `test` are read, as in FedGMT's experiments.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from fl_dist.common.errors import DataError
from fl_dist.common.paths import expand_path
from fl_dist.common.rows import main_tensor
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import SPLITS, Dataset, dataset_from_arrays, datasets
from fl_dist.data.download_sources import find_folder, missing_data_message, redownload_hint
from fl_dist.data.images import list_labelled_images, write_labelled_images
from fl_dist.data.npz import read_npz

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
IMAGE = (3, 32, 32)
PACKED = "cinic10.npz"
ROOT_DESCRIPTION = "folder cinic-10 (train/<class>/*.png and test, or cinic10.npz), or its parent"


@datasets.register
def cinic10(*, root: Annotated[str, Field(min_length=1, description=ROOT_DESCRIPTION)]) -> Dataset:
    """CINIC-10 from its published folders, or from one file cinic10.npz of the same arrays (faster)."""
    base = expand_path(root)
    folder = find_folder(base, "cinic-10")
    if (folder / PACKED).is_file():
        return _read_packed(folder / PACKED)
    for split in SPLITS:
        if not (folder / split).is_dir():
            raise DataError(missing_data_message("cinic10", base, f"{folder / split} (or {PACKED})"))
    folders = {split: [folder / split / name for name in CLASSES] for split in SPLITS}

    def build(allocate: shared_arrays.Allocate) -> None:
        for split in SPLITS:
            _check_classes(folder / split)
            files = list_labelled_images(folders[split])
            if empty := set(range(len(CLASSES))) - {label for _, label in files}:
                raise DataError(f"{folders[split][min(empty)]} contains no image; {redownload_hint('cinic10')}")
            write_labelled_images(allocate, split, files, lambda image, size: image, IMAGE[1], "cinic10")

    sources = [entry for of_split in folders.values() for entry in of_split if entry.is_dir()]
    arrays = shared_arrays.load_or_build("cinic10", sources, None, build)
    return dataset_from_arrays(arrays, len(CLASSES), mean=MEAN, std=STD)


def _read_packed(path: Path) -> Dataset:
    data = read_npz(path)
    if data.shape != IMAGE or main_tensor(data.x_train).dtype != torch.uint8 or data.classes > len(CLASSES):
        raise DataError(f"data file {path}: CINIC-10 needs uint8 images [n, 3, 32, 32] and labels 0..9")
    return replace(data, classes=len(CLASSES), mean=MEAN, std=STD)


def _check_classes(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if names != set(CLASSES):
        raise DataError(
            f"{folder} is not of CINIC-10: missing classes {sorted(set(CLASSES) - names)}, unknown"
            f" {sorted(names - set(CLASSES))}; {redownload_hint('cinic10')}"
        )
