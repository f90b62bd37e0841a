"""MNIST, Fashion-MNIST and EMNIST: 28x28 grey images in the idx files of LeCun et al., gzipped or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import format_bytes
from fl_dist.common.paths import expand_path
from fl_dist.data import shared_arrays
from fl_dist.data.dataset import SPLITS, Dataset, dataset_from_arrays, datasets
from fl_dist.data.download_sources import missing_data_message, redownload_hint

MAGIC = {3: 0x0803, 1: 0x0801}  # first word of a file of bytes, by the number of its dimensions
CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
Root = Annotated[str, Field(min_length=1, description="folder with the idx files, or whose folder raw has them")]


@datasets.register
def mnist(*, root: Root) -> Dataset:
    """Handwritten digits: LeCun et al. (1998)."""
    arrays = _load("mnist", "MNIST", root, ("train-", "t10k-"), range(10))
    return dataset_from_arrays(arrays, 10, mean=(0.1307,), std=(0.3081,))


@datasets.register
def fashion_mnist(*, root: Root) -> Dataset:
    """Clothes: Xiao et al. (2017)."""
    arrays = _load("fashion_mnist", "FashionMNIST", root, ("train-", "t10k-"), range(10))
    return dataset_from_arrays(arrays, 10, mean=(0.2860,), std=(0.3530,))


@datasets.register
def emnist(
    *,
    root: Root,
    split: Annotated[
        Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"],
        Field(description="which of the published divisions; byclass has 62 classes"),
    ] = "byclass",
    share: Annotated[float, Field(gt=0, le=1, description="of the rows, the same in every run (FedSAM: 0.1)")] = 1.0,
) -> Dataset:
    """Handwritten letters and digits: Cohen et al. (2017); pixels from 0 to 1, not normalised further."""
    prefixes = (f"emnist-{split}-train-", f"emnist-{split}-test-")
    first = int(split == "letters")  # these are numbered from 1
    labels = range(first, CLASSES[split] + first)
    arrays = _load("emnist", "EMNIST", root, prefixes, labels, share, is_transposed=True)
    return dataset_from_arrays(arrays, CLASSES[split])


def _load(
    name: str,
    folder: str,
    root: str,
    prefixes: tuple[str, str],
    labels: range,
    share: float = 1.0,
    is_transposed: bool = False,
) -> shared_arrays.Arrays:
    base = expand_path(root)
    folders = [base, base / "raw", base / folder / "raw", base / folder, base / folder / "gzip"]
    suffixes = ("images-idx3-ubyte", "labels-idx1-ubyte")
    files = [[_find_file(name, folders, f"{prefix}{suffix}") for suffix in suffixes] for prefix in prefixes]

    def build(allocate: shared_arrays.Allocate) -> None:
        rng = np.random.default_rng(0)
        for split, (image_file, label_file) in zip(SPLITS, files, strict=True):
            x, y = _read_idx(image_file, 3, name), _read_idx(label_file, 1, name)
            if len(x) != len(y):
                raise DataError(f"{image_file} has {len(x)} rows, {label_file.name} {len(y)}; {redownload_hint(name)}")
            if y.min() not in labels or y.max() not in labels:
                known = f"{labels[0]} to {labels[-1]}"
                raise DataError(f"{label_file} has labels {y.min()} to {y.max()}; {name} has {known}")
            if share < 1:
                rows = np.sort(rng.permutation(len(x))[: max(1, int(share * len(x)))])
                x, y = x[rows], y[rows]
            x = x.transpose(0, 2, 1) if is_transposed else x
            allocate(f"x_{split}", (len(x), 1, *x.shape[1:]), np.uint8)[:, 0] = x
            allocate(f"y_{split}", y.shape, np.int64)[:] = y - labels[0]

    return shared_arrays.load_or_build(name, [file for pair in files for file in pair], share, build)


def _find_file(name: str, folders: list[Path], file: str) -> Path:
    for folder in folders:
        for path in (folder / file, folder / f"{file}.gz"):
            if path.is_file():
                return path
    raise DataError(missing_data_message(name, folders[0], f"{file} or {file}.gz"))


def _read_idx(path: Path, dimensions: int, name: str) -> np.ndarray:
    """The bytes of an idx file, compared with its header."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path} cannot be read ({error_message(e)}); {redownload_hint(name)}") from None
    header = 4 * (1 + dimensions)
    magic, *shape = struct.unpack(f">{1 + dimensions}I", data[:header].ljust(header, b"\0"))
    if magic != MAGIC[dimensions]:
        raise DataError(f"{path} is no idx file of bytes with {dimensions} dimensions; {redownload_hint(name)}")
    if not 0 < math.prod(shape) == len(data) - header:
        expected, actual = "x".join(map(str, shape)), format_bytes(len(data) - header)
        raise DataError(f"{path} is damaged: its header says {expected}, but it contains {actual}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
