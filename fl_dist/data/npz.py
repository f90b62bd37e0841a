"""The user's own data: one .npz file of x_train, y_train, x_test, y_test and, optionally, client."""

import lzma
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from fl_dist.common.paths import expand
from fl_dist.common.words import shortened, size
from fl_dist.data.dataset import Dataset, datasets

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
LABEL_LIMIT = 2**20  # a label beyond it is an id or a hash, and would size the model's last layer

Arrays = dict[str, np.ndarray]


@datasets.register
def npz(
    *,
    path: Annotated[str, Field(min_length=1, description="the .npz file with x_train, y_train, x_test, y_test")],
) -> Dataset:
    """Arrays of the user's, and optionally the client of each training row."""
    return read(expand(path))


def read(path: Path) -> Dataset:
    """The data set in a .npz file, checked; a ValueError names the file and what is wrong."""
    arrays = _load(path)
    try:
        for part in ("train", "test"):
            _check_rows(arrays, f"x_{part}")
            _check_ids(arrays, f"y_{part}", f"x_{part}", LABEL_LIMIT)
        _check_alike(arrays["x_train"], arrays["x_test"])
        if "client" in arrays:
            _check_ids(arrays, "client", "x_train", np.iinfo(np.int64).max)
    except ValueError as error:
        raise ValueError(f"data file {path}: {error}") from None
    return _dataset(arrays)


def _load(path: Path) -> Arrays:
    if not os.path.isfile(path):
        raise ValueError(f"data file {shortened(path)} does not exist; set data.path to a .npz file")
    try:
        return _members(path)
    except (
        OSError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        struct.error,
        MemoryError,
        OverflowError,
    ) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"data file {path} cannot be read ({reason}); write it again with numpy.savez") from None


def _members(path: Path) -> Arrays:
    with _open(path) as archive:
        missing = [name for name in REQUIRED if name not in archive.files]
        if missing:
            raise ValueError(f"data file {path} lacks {', '.join(missing)}; it needs {', '.join(REQUIRED)}")
        names = [name for name in (*REQUIRED, "client") if name in archive.files]
        _check_size(path, archive, names)
        return {name: _member(path, archive, name) for name in names}


def _check_size(path: Path, archive: np.lib.npyio.NpzFile, names: list[str]) -> None:
    """A few kilobytes may say that they unpack to terabytes; no more than they say is unpacked."""
    assert archive.zip is not None
    unpacked = {info.filename.removesuffix(".npy"): info.file_size for info in archive.zip.infolist()}
    total, memory = sum(unpacked[name] for name in names), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total > memory:
        raise ValueError(f"data file {path} unpacks to {size(total)}, this machine has {size(memory)} of memory")


def _open(path: Path) -> np.lib.npyio.NpzFile:
    try:
        archive = np.load(path, allow_pickle=False)
    except ValueError:  # numpy's message advises to load pickles
        archive = None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise zipfile.BadZipFile("not a .npz archive")
    return archive


def _member(path: Path, archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    try:
        array = archive[name]
    except ValueError:  # a Python object, a damaged header, or fewer numbers than it says
        raise ValueError(f"data file {path}: {name} is not a plain numeric array, or damaged; save numbers") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"data file {path}: {name} is not an array; write the file with numpy.savez")
    return array


def _check_rows(arrays: Arrays, name: str) -> None:
    x = arrays[name]
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise ValueError(f"{name} is {x.dtype}; store images as uint8 and features as float32 or float64")
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"{name} has shape {x.shape}; it needs at least one row of at least one value, [n, ...]")
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] > 4 >= x.shape[3]:
        raise ValueError(f"{name} has shape {x.shape}; store images as [n, channels, height, width]")
    if x.dtype != np.uint8 and not np.isfinite(x).all():
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(1))
        raise ValueError(f"{name} has a NaN or an infinity, first in row {bad[0]}; remove or replace such rows")


def _check_ids(arrays: Arrays, name: str, rows: str, limit: int) -> None:
    ids, n = arrays[name], len(arrays[rows])
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{name} is {ids.dtype}; it needs integers from 0 on")
    if ids.shape != (n,):
        raise ValueError(f"{name} has shape {ids.shape}; it needs one entry for each of the {n} rows of {rows}")
    bad = np.flatnonzero((ids < 0) | (ids > limit))
    if len(bad):
        raise ValueError(f"{name} is {ids[bad[0]]} in row {bad[0]}; number from 0 on")


def _check_alike(train: np.ndarray, test: np.ndarray) -> None:
    if train.shape[1:] != test.shape[1:]:
        raise ValueError(f"rows of x_train are {train.shape[1:]}, of x_test {test.shape[1:]}; make them equal")
    if (train.dtype == np.uint8) != (test.dtype == np.uint8):
        raise ValueError(f"x_train is {train.dtype}, x_test {test.dtype}; store both in one type")


def _dataset(arrays: Arrays) -> Dataset:
    labels = {part: arrays[f"y_{part}"].astype(np.int64) for part in ("train", "test")}
    return Dataset(
        x_train=torch.from_numpy(_native(arrays["x_train"])),
        y_train=torch.from_numpy(labels["train"]),
        x_test=torch.from_numpy(_native(arrays["x_test"])),
        y_test=torch.from_numpy(labels["test"]),
        classes=int(max(y.max() for y in labels.values())) + 1,
        client=arrays["client"].astype(np.int64) if "client" in arrays else None,
    )


def _native(x: np.ndarray) -> np.ndarray:
    """The array in a type and byte order that torch takes: uint8, float32 or float64."""
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    return np.ascontiguousarray(x, dtype=np.float64 if x.dtype.itemsize >= 8 else np.float32)
