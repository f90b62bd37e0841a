"""MNIST, Fashion-MNIST and EMNIST: 28x28 grey images in the idx files of LeCun et al., packed with gzip or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from fl_dist.common.paths import expand
from fl_dist.common.words import message, size
from fl_dist.data import shared
from fl_dist.data.dataset import Dataset, datasets, of_arrays
from fl_dist.data.sources import absent, again

KINDS = {0x0803: 3, 0x0801: 1}
"""First word of a file of bytes, and the number of its dimensions."""
CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
Root = Annotated[str, Field(min_length=1, description="folder with the idx files, or whose folder raw has them")]


@datasets.register
def mnist(*, root: Root) -> Dataset:
    """Handwritten digits: LeCun et al. (1998)."""
    arrays = shared_rows("mnist", "MNIST", expand(root), ("train-", "t10k-"), 10)
    return of_arrays(arrays, 10, mean=(0.1307,), std=(0.3081,))


@datasets.register
def fashion_mnist(*, root: Root) -> Dataset:
    """Clothes: Xiao et al. (2017)."""
    arrays = shared_rows("fashion_mnist", "FashionMNIST", expand(root), ("train-", "t10k-"), 10)
    return of_arrays(arrays, 10, mean=(0.2860,), std=(0.3530,))


@datasets.register
def emnist(
    *,
    root: Root,
    split: Annotated[
        Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"],
        Field(description="which of the published divisions; byclass has 62 classes"),
    ] = "byclass",
    share: Annotated[
        float, Field(gt=0, le=1, description="of the rows, the same random ones in every run (FedSAM: 0.1)")
    ] = 1.0,
) -> Dataset:
    """Handwritten letters and digits: Cohen et al. (2017); pixels from 0 to 1, not normalised further."""
    names = (f"emnist-{split}-train-", f"emnist-{split}-test-")
    # Letters are counted from 1, and the images lie on their side.
    first = int(split == "letters")
    how = Upright(first, share)
    return of_arrays(shared_rows("emnist", "EMNIST", expand(root), names, CLASSES[split] + first, how), CLASSES[split])


class Upright(NamedTuple):
    """How EMNIST's rows differ from MNIST's."""

    first: int = 0
    share: float = 1.0

    def __call__(self, x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        rows = np.sort(rng.permutation(len(x))[: max(1, int(self.share * len(x)))]) if self.share < 1 else slice(None)
        return x[rows].transpose(0, 2, 1), y[rows] - self.first


def shared_rows(
    name: str, folder: str, root: Path, parts: tuple[str, str], classes: int, how: Upright | None = None
) -> shared.Arrays:
    """The images and labels of the training and the test files."""
    places = [root, root / "raw", root / folder / "raw", root / folder, root / folder / "gzip"]
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    files = [[_find(name, places, f"{part}{kind}") for kind in kinds] for part in parts]

    def make(new: shared.Allocate) -> None:
        rng = np.random.default_rng(0)
        for part, (images, labels) in zip(("train", "test"), files, strict=True):
            x, y = _array(images, 3, name), _array(labels, 1, name)
            if len(x) != len(y):
                raise ValueError(f"{images} has {len(x)} rows, {labels.name} {len(y)}; {again(name)}")
            first = how.first if how else 0
            if y.min() < first or y.max() >= classes:
                raise ValueError(f"{labels} has labels {y.min()} to {y.max()}; {name} has {first} to {classes - 1}")
            x, y = (x, y) if how is None else how(x, y, rng)
            new(f"x_{part}", (len(x), 1, *x.shape[1:]), np.uint8)[:, 0] = x
            new(f"y_{part}", y.shape, np.int64)[:] = y

    return shared.arrays(name, [file for pair in files for file in pair], how, make)


def _find(name: str, places: list[Path], file: str) -> Path:
    for place in places:
        for path in (place / file, place / f"{file}.gz"):
            if path.is_file():
                return path
    raise ValueError(absent(name, places[0], f"{file} or {file}.gz"))


def _array(path: Path, dimensions: int, name: str) -> np.ndarray:
    """The bytes of an idx file, checked against its header."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as e:
        raise ValueError(f"{path} cannot be read ({message(e)}); {again(name)}") from None
    before = 4 * (1 + dimensions)
    kind, *shape = struct.unpack(f">{1 + dimensions}I", data[:before].ljust(before, b"\0"))
    if KINDS.get(kind) != dimensions:
        raise ValueError(f"{path} is no idx file of bytes with {dimensions} dimensions; {again(name)}")
    if not 0 < math.prod(shape) == len(data) - before:
        raise ValueError(
            f"{path} is damaged: its header says {'x'.join(map(str, shape))}, but it holds {size(len(data) - before)}"
        )
    return np.frombuffer(data, np.uint8, offset=before).reshape(shape)
