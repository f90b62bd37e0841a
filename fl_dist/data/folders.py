"""Data sets of image files: Tiny-ImageNet, and domains for training on some and testing on another.

The images are decoded once on a machine, by several threads, into one array that all its ranks map: it may be larger
than memory, and every rank reads the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from fl_dist.common.paths import expand
from fl_dist.common.words import message, nearest
from fl_dist.data import shared
from fl_dist.data.dataset import Dataset, datasets, of_arrays
from fl_dist.data.pictures import Fit, centre, decode, images_in, resized
from fl_dist.data.sources import SOURCES, absent, again

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
Labelled = list[tuple[Path, int]]
Root = Annotated[str, Field(min_length=1, description="folder that holds the published one, or that itself")]
Size = Annotated[int, Field(ge=8, le=1024, description="pixels of a side: images are scaled to it")]
Target = Annotated[str, Field(min_length=1, description="the domain that is left out of training, and tested on")]


@datasets.register
def tiny_imagenet(*, root: Root, size: Size = 64) -> Dataset:
    """Two hundred classes of ImageNet in 64x64 pixels: 100,000 to train, 10,000 (published as val) to test."""
    name, given = "tiny_imagenet", expand(root)
    folder = given / "tiny-imagenet-200" if (given / "tiny-imagenet-200").is_dir() else given
    classes, labels = folder / "wnids.txt", folder / "val" / "val_annotations.txt"
    for file in (classes, labels):
        if not file.is_file():
            raise ValueError(absent(name, given, f"tiny-imagenet-200/{file.relative_to(folder)}"))
    known = {word: k for k, word in enumerate(sorted(_lines(classes, name)))}
    folders = [folder / "train" / word / "images" for word in known]

    def files() -> tuple[Labelled, Labelled]:
        val = dict(line.split("\t")[:2] for line in _lines(labels, name))
        if missing := set(val.values()) - known.keys():
            raise ValueError(f"{labels} names a class {min(missing)}, which is not in {classes}; {again(name)}")
        return _by_class(folders), [(folder / "val" / "images" / file, known[val[file]]) for file in sorted(val)]

    sources = [classes, labels, *folders, folder / "val" / "images"]
    _require(sources, name, given)
    arrays = shared.arrays(name, sources, size, lambda new: _rows(new, *files(), resized(size), size, name))
    return of_arrays(arrays, len(known), mean=MEAN, std=STD)


@datasets.register
def pacs(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """PACS (Li et al., 2017): four domains, seven classes."""
    return _published("pacs", root, target, size)


@datasets.register
def officehome(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """Office-Home (Venkateswara et al., 2017): four domains, 65 classes, 15,588 images."""
    return _published("officehome", root, target, size)


@datasets.register
def domainnet(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """DomainNet (Peng et al., 2019): six domains, 345 classes, 586,575 images; about 165 GB decoded at 224 pixels."""
    return _published("domainnet", root, target, size)


@datasets.register
@datasets.register_as("domain_folders")  # its first name, which runs may still have
def domains(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """Domains of your own: root/<domain>/<class>/*.jpg or .png."""
    return _domains("domains", expand(root), target, size)


def _published(name: str, root: str, target: str, size: int) -> Dataset:
    return _domains(name, _folder(name, expand(root)), target, size)


def domains_below(name: str, root: Path) -> list[str]:
    """The domains of a published set."""
    return [entry.name for entry in _folders(_folder(name, root)) if _folders(entry)]


def _folder(name: str, root: Path) -> Path:
    below = root / SOURCES[name].folder
    folder = below if below.is_dir() else root
    if not folder.is_dir() or not _folders(folder):
        raise ValueError(absent(name, root, f"folder {SOURCES[name].folder}/<domain>/<class>"))
    return folder


def _domains(name: str, folder: Path, target: str, size: int) -> Dataset:
    """All domains but the target train, and each training row knows its domain; the target is the test set."""
    try:
        domains = [entry for entry in _folders(folder) if _folders(entry)]
    except OSError as e:
        raise ValueError(
            f"{folder} cannot be read ({message(e)}); set data.root to the folder of the domains"
        ) from None
    names = [domain.name for domain in domains]
    if target not in names:
        raise ValueError(f"data.target {target!r} is no domain in {folder}; {nearest(target, names)}")
    if len(domains) < 2:
        raise ValueError(f"{folder} has no domain but {target}, which leaves none to train on")
    classes = sorted({entry.name for domain in domains for entry in _folders(domain)})
    folders = {where: [folder / where / word for word in classes] for where in names}
    sources = [entry for where in names for entry in folders[where] if entry.is_dir()]
    arrays = shared.arrays(name, sources, size, lambda new: _ring(new, folders, size, name))
    return of_arrays(_opened(arrays, names.index(target)), len(classes), mean=MEAN, std=STD)


def _ring(new: shared.Allocate, folders: dict[str, list[Path]], size: int, name: str) -> None:
    """All domains in a row, and all but the last once more: whichever is left out, the others lie side by side."""
    domains = [_by_class(of_classes) for of_classes in folders.values()]
    if empty := [where for where, rows in zip(folders, domains, strict=True) if not rows]:
        raise ValueError(f"{name}: the domain {empty[0]} has no image")
    rows = [row for rows in domains for row in rows]
    whole, both = len(rows), 2 * len(rows) - len(domains[-1])
    new("ends", (2 * len(domains) - 1,), np.int64)[:] = np.cumsum([len(rows) for rows in (*domains, *domains[:-1])])
    y, x = new("y", (both,), np.int64), new("x", (both, 3, size, size), np.uint8)
    y[:whole] = [label for _, label in rows]
    decode([file for file, _ in rows], x[:whole], centre(size), name)
    for held in (x, y):
        held[whole:] = held[: both - whole]


def _opened(ring: shared.Arrays, target: int) -> shared.Arrays:
    """The ring without one domain, which is for tests; the others keep the order of their names as numbers."""
    ends = ring["ends"]
    domains = (len(ends) + 1) // 2
    first, last, end = (ends[target - 1] if target else 0), ends[target], ends[target + domains - 1]
    order = [(target + k) % domains for k in range(1, domains)]
    sizes = np.diff(ends[target : target + domains])
    numbers = np.argsort(np.argsort(order))
    parts = {"test": slice(first, last), "train": slice(last, end)}
    opened = {f"{kind}_{part}": ring[kind][rows] for part, rows in parts.items() for kind in "xy"}
    return opened | {"client": np.repeat(numbers, sizes)}


def _rows(new: shared.Allocate, train: Labelled, test: Labelled, fit: Fit, size: int, name: str) -> None:
    for part, rows in (("train", train), ("test", test)):
        if not rows:
            raise ValueError(f"{name}: there are no images to {part} on")
        new(f"y_{part}", (len(rows),), np.int64)[:] = [label for _, label in rows]
        decode([file for file, _ in rows], new(f"x_{part}", (len(rows), 3, size, size), np.uint8), fit, name)


def _by_class(folders: Sequence[Path]) -> Labelled:
    """Every image of folders that are classes; a domain need not have them all."""
    return [(file, label) for label, folder in enumerate(folders) if folder.is_dir() for file in images_in(folder)]


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _require(sources: Sequence[Path], name: str, root: Path) -> None:
    for source in sources:
        if not source.exists():
            raise ValueError(absent(name, root, str(source)))


def _lines(file: Path, name: str) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{file} cannot be read ({message(e)}); {again(name)}") from None
