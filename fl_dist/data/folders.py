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
    """DomainNet (Peng et al., 2019): six domains, 345 classes, 586,575 images; 88 GB decoded at 224 pixels."""
    return _published("domainnet", root, target, size)


@datasets.register
def domain_folders(*, root: Root, target: Target, size: Size = 224) -> Dataset:
    """Domains of your own: root/<domain>/<class>/*.jpg or .png."""
    return _domains("domain_folders", expand(root), target, size)


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
    folders = {domain.name: [domain / word for word in classes] for domain in domains}
    train = [where for where in names if where != target]

    def make(new: shared.Allocate) -> None:
        parts = [_by_class(folders[where]) for where in train]
        client = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        _rows(new, [row for part in parts for row in part], _by_class(folders[target]), centre(size), size, name)
        new("client", client.shape, np.int64)[:] = client

    sources = [folder for where in names for folder in folders[where] if folder.is_dir()]
    arrays = shared.arrays(name, sources, (target, size), make)
    return of_arrays(arrays, len(classes), mean=MEAN, std=STD)


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
        return file.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{file} cannot be read ({message(e)}); {again(name)}") from None
