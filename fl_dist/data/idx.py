"""MNIST, Fashion-MNIST and EMNIST: 28x28 grey images in the idx files of LeCun et al., packed with gzip or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fl_dist.common.paths import expand
from fl_dist.common.words import message, size
from fl_dist.data.dataset import Dataset, datasets

KINDS = {0x0803: 3, 0x0801: 1}
"""First word of a file of bytes, and the number of its dimensions."""
CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
Root = Annotated[str, Field(min_length=1, description="folder with the idx files, or whose folder raw has them")]


@datasets.register
def mnist(*, root: Root) -> Dataset:
    """Handwritten digits: LeCun et al. (1998)."""
    return _read("MNIST", expand(root), ("train-", "t10k-"), 10, (0.1307,), (0.3081,))


@datasets.register
def fashion_mnist(*, root: Root) -> Dataset:
    """Clothes: Xiao et al. (2017)."""
    return _read("FashionMNIST", expand(root), ("train-", "t10k-"), 10, (0.2860,), (0.3530,))


@datasets.register
def emnist(
    *,
    root: Root,
    split: Annotated[
        Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"],
        Field(description="which of the published divisions; byclass has 62 classes"),
    ] = "byclass",
) -> Dataset:
    """Handwritten letters and digits: Cohen et al. (2017); pixels from 0 to 1, not normalised further."""
    names = (f"emnist-{split}-train-", f"emnist-{split}-test-")
    data = _read("EMNIST", expand(root), names, CLASSES[split] + (split == "letters"), (), ())
    # The published images lie on their side, and letters are counted from 1.
    x_train, x_test = (x.transpose(2, 3).contiguous() for x in (data.x_train, data.x_test))
    first = int(split == "letters")
    return Dataset(x_train, data.y_train - first, x_test, data.y_test - first, CLASSES[split])


def _read(
    name: str, root: Path, parts: tuple[str, str], classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Dataset:
    places = [root, root / "raw", root / name / "raw", root / name]
    train, test = ((_images(name, places, part), _labels(name, places, part, classes)) for part in parts)
    for (x, y), part in zip((train, test), parts, strict=True):
        if len(x) != len(y):
            raise ValueError(f"{name} in {root}: {part}images has {len(x)} rows, {part}labels {len(y)}")
    return Dataset(*train, *test, classes, mean, std)


def _images(name: str, places: list[Path], part: str) -> Tensor:
    return torch.from_numpy(_array(_find(name, places, f"{part}images-idx3-ubyte"), 3))[:, None]


def _labels(name: str, places: list[Path], part: str, classes: int) -> Tensor:
    file = _find(name, places, f"{part}labels-idx1-ubyte")
    labels = torch.from_numpy(_array(file, 1).astype(np.int64))
    if int(labels.max()) >= classes:
        raise ValueError(f"{file} has a label {int(labels.max())}; {name} has 0 to {classes - 1}")
    return labels


def _find(name: str, places: list[Path], file: str) -> Path:
    for place in places:
        for path in (place / file, place / f"{file}.gz"):
            if path.is_file():
                return path
    raise ValueError(f"no {name} in {places[0]}: {file} or {file}.gz is missing there; set data.root to its folder")


def _array(path: Path, dimensions: int) -> np.ndarray:
    """The bytes of an idx file, checked against its header."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as e:
        raise ValueError(f"{path} cannot be read ({message(e)}); fetch it again") from None
    before = 4 * (1 + dimensions)
    kind, *shape = struct.unpack(f">{1 + dimensions}I", data[:before].ljust(before, b"\0"))
    if KINDS.get(kind) != dimensions:
        raise ValueError(f"{path} is no idx file of bytes with {dimensions} dimensions; fetch it again")
    if not 0 < math.prod(shape) == len(data) - before:
        raise ValueError(
            f"{path} is damaged: its header says {'x'.join(map(str, shape))}, but it holds {size(len(data) - before)}"
        )
    return np.frombuffer(data, np.uint8, offset=before).reshape(shape).copy()
