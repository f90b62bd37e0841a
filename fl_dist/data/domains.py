"""Images of several domains, for training on some and testing on another: PACS, Office-Home, DomainNet, and your own.

The images are decoded once per machine, by several threads, into one array that all its ranks map: it may be larger
than memory, and every rank reads the same bytes.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import suggest
from fl_dist.common.paths import expand_path
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import Dataset, dataset_from_arrays, datasets
from fl_dist.data.download_sources import SOURCES, find_folder, missing_data_message
from fl_dist.data.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    center_crop,
    decode_images,
    list_labelled_images,
    subfolders,
)

Root = Annotated[str, Field(min_length=1, description="the published folder, or its parent")]
Size = Annotated[int, Field(ge=8, le=1024, description="pixels per side: images are scaled to it")]
Target = Annotated[str, Field(min_length=1, description="the domain that is left out of training, and tested on")]


@datasets.register
def pacs(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """PACS (Li et al., 2017): four domains, seven classes."""
    return _load_domains("pacs", _find_folder("pacs", expand_path(root)), target, size)


@datasets.register
def officehome(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """Office-Home (Venkateswara et al., 2017): four domains, 65 classes, 15,588 images."""
    return _load_domains("officehome", _find_folder("officehome", expand_path(root)), target, size)


@datasets.register
def domainnet(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """DomainNet (Peng et al., 2019): six domains, 345 classes, 586,575 images; about 165 GB decoded at 224 pixels."""
    return _load_domains("domainnet", _find_folder("domainnet", expand_path(root)), target, size)


@datasets.register
@datasets.register_as("domain_folders")  # an alias in existing configurations
def domains(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """Domains of your own: root/<domain>/<class>/*.jpg or .png."""
    return _load_domains("domains", expand_path(root), target, size)


def list_published_domains(name: str, root: Path) -> list[str]:
    return [folder.name for folder in _domain_folders(_find_folder(name, root))]


def _find_folder(name: str, root: Path) -> Path:
    folder = find_folder(root, SOURCES[name].folder)
    if not folder.is_dir() or not subfolders(folder):
        raise DataError(missing_data_message(name, root, f"folder {SOURCES[name].folder}/<domain>/<class>"))
    return folder


def _load_domains(name: str, folder: Path, target: str, size: int) -> Dataset:
    """Train on all domains but the target, and test on the target; each training row knows its domain."""
    try:
        domains = _domain_folders(folder)
    except OSError as e:
        hint = "set data.root to the folder of the domains"
        raise DataError(f"{folder} cannot be read ({error_message(e)}); {hint}") from None
    names = [domain.name for domain in domains]
    if target not in names:
        raise DataError(f"data.target {target!r} is no domain in {folder}; {suggest(target, names)}")
    if len(domains) < 2:
        raise DataError(f"{folder} has no domain but {target}, which leaves none to train on")
    classes = sorted({entry.name for domain in domains for entry in subfolders(domain)})
    folders = {domain.name: [domain / word for word in classes] for domain in domains}
    sources = [entry for of_domain in folders.values() for entry in of_domain if entry.is_dir()]
    arrays = shared_arrays.load_or_build(
        name, sources, size, lambda allocate: _write_domains(allocate, folders, size, name)
    )
    return dataset_from_arrays(
        _split_domains(arrays, names.index(target)), len(classes), mean=IMAGENET_MEAN, std=IMAGENET_STD
    )


def _write_domains(allocate: shared_arrays.Allocate, folders: dict[str, list[Path]], size: int, name: str) -> None:
    """All domains in sequence, then all but the last again: whichever is left out, the others are contiguous."""
    domains = [list_labelled_images(of_domain) for of_domain in folders.values()]
    if empty := [domain for domain, files in zip(folders, domains, strict=True) if not files]:
        raise DataError(f"{name}: the domain {empty[0]} has no image")
    files = [file for domain in domains for file in domain]
    unique, total = len(files), 2 * len(files) - len(domains[-1])
    ends = allocate("ends", (2 * len(domains) - 1,), np.int64)
    ends[:] = np.cumsum([len(domain) for domain in (*domains, *domains[:-1])])
    y, x = allocate("y", (total,), np.int64), allocate("x", (total, 3, size, size), np.uint8)
    y[:unique] = [label for _, label in files]
    decode_images([file for file, _ in files], x[:unique], center_crop, name)
    for array in (x, y):
        array[unique:] = array[: total - unique]


def _split_domains(arrays: shared_arrays.Arrays, target: int) -> shared_arrays.Arrays:
    """The target as test rows, the other domains as training rows; these are numbered in the order of their names."""
    ends = arrays["ends"]
    domains = (len(ends) + 1) // 2
    start, end, last = (ends[target - 1] if target else 0), ends[target], ends[target + domains - 1]
    order = [(target + k) % domains for k in range(1, domains)]
    sizes = np.diff(ends[target : target + domains])
    slices = {"test": slice(start, end), "train": slice(end, last)}
    split_arrays = {f"{kind}_{split}": arrays[kind][rows] for split, rows in slices.items() for kind in "xy"}
    return split_arrays | {"client": np.repeat(np.argsort(np.argsort(order)), sizes)}


def _domain_folders(folder: Path) -> list[Path]:
    return [entry for entry in subfolders(folder) if subfolders(entry)]
