"""The user's own data: one .npz file of x_train, y_train, x_test, y_test and, optionally, client.

Rows are uint8 images, features of floating point, or ids (tokens) of another integer type; targets are labels, numbers,
or absent, for tasks that find theirs in the rows.
"""

import lzma
import os
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from fl_dist.common.paths import expand
from fl_dist.common.words import shortened, size
from fl_dist.data.dataset import Dataset, datasets

REQUIRED, OPTIONAL = ("x_train", "x_test"), ("y_train", "y_test", "client")
LABEL_LIMIT = 2**20  # a label beyond it is an id or a hash, and would size the model's last layer
ID_LIMIT = 2**31 - 1
PIECE = 4096  # rows that are turned into float64 at a time

Arrays = dict[str, np.ndarray]


Channels = Annotated[list[float], Field(min_length=1)]


@datasets.register
def npz(
    *,
    path: Annotated[str, Field(min_length=1, description="the .npz file with x_train, y_train, x_test, y_test")],
    mean: Annotated[Channels | None, Field(description="taken from each channel (of x/255 for bytes)")] = None,
    std: Annotated[Channels | None, Field(description="what each channel is then divided by")] = None,
    normalise: Annotated[
        Literal["auto"] | None, Field(description="auto: mean and std of the training rows, by channel")
    ] = None,
) -> Dataset:
    """Arrays of the user's, and optionally the client of each training row."""
    data = read(expand(path))
    if mean is None and std is None and normalise is None:
        return data
    if not data.is_real:
        raise ValueError(
            f"data file {path}: x_train holds ids, which cannot be normalised; remove mean, std, normalise"
        )
    if normalise == "auto" and (mean or std):
        raise ValueError("data: give either mean and std or normalise: auto")
    given = tuple(mean or ()), tuple(std or ())
    shift, scale = moments(data.x_train.numpy()) if normalise == "auto" else given
    return replace(data, mean=shift, std=scale)


def moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel (or feature), in units of 255 for bytes; of a constant one, 1."""
    unit = 255.0 if x.dtype == np.uint8 else 1.0
    pieces = [x[start : start + PIECE] for start in range(0, len(x), PIECE)]
    others = (0, *range(2, x.ndim))
    count = x.size // x.shape[1]
    mean = sum(piece.sum(others, dtype=np.float64) for piece in pieces) / count
    around = mean.reshape(-1, *(1,) * (x.ndim - 2))
    std = np.sqrt(sum(((piece - around) ** 2).sum(others) for piece in pieces) / count)
    return tuple((mean / unit).tolist()), tuple((np.where(std > 0, std, unit) / unit).tolist())


def read(path: Path) -> Dataset:
    """The data set in a .npz file, checked; a ValueError names the file and what is wrong."""
    arrays = _load(path)
    try:
        for part in ("train", "test"):
            _check_rows(arrays, f"x_{part}")
            _check_targets(arrays, f"y_{part}", f"x_{part}")
        _check_alike(arrays["x_train"], arrays["x_test"], "x")
        _check_alike(arrays["y_train"], arrays["y_test"], "y")
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
            raise ValueError(f"data file {path} lacks {', '.join(missing)}; it needs x_train, y_train, x_test, y_test")
        names = [name for name in (*REQUIRED, *OPTIONAL) if name in archive.files]
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
    if x.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {x.dtype}; store images as uint8, features as float32 or float64, ids as int64")
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"{name} has shape {x.shape}; it needs at least one row of at least one value, [n, ...]")
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] > 4 >= x.shape[3]:
        raise ValueError(f"{name} has shape {x.shape}; store images as [n, channels, height, width]")
    if x.dtype.kind in "iu" and x.dtype != np.uint8 and not 0 <= x.min() <= x.max() <= ID_LIMIT:
        raise ValueError(f"{name} has ids from {x.min()} to {x.max()}; number from 0 on, or store features as float32")
    _check_finite(x, name)


def _check_finite(x: np.ndarray, name: str) -> None:
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(1))
        raise ValueError(f"{name} has a NaN or an infinity, first in row {bad[0]}; remove or replace such rows")


def _check_targets(arrays: Arrays, name: str, rows: str) -> None:
    """Labels, numbers, or a row of ids; without targets, rows of none."""
    y = arrays.setdefault(name, np.empty((len(arrays[rows]), 0), np.int64))
    if y.dtype.kind in "iu" and y.ndim < 2:
        _check_ids(arrays, name, rows, LABEL_LIMIT)
        return
    if y.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {y.dtype}; it needs integers from 0 on, or numbers to predict")
    if len(y) != len(arrays[rows]):
        raise ValueError(f"{name} has {len(y)} rows, {rows} {len(arrays[rows])}; it needs one for each")
    _check_finite(y, name)


def _check_ids(arrays: Arrays, name: str, rows: str, limit: int) -> None:
    ids, n = arrays[name], len(arrays[rows])
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{name} is {ids.dtype}; it needs integers from 0 on")
    if ids.shape != (n,):
        raise ValueError(f"{name} has shape {ids.shape}; it needs one entry for each of the {n} rows of {rows}")
    bad = np.flatnonzero((ids < 0) | (ids > limit))
    if len(bad):
        raise ValueError(f"{name} is {ids[bad[0]]} in row {bad[0]}; number from 0 on")


def _check_alike(train: np.ndarray, test: np.ndarray, name: str) -> None:
    if train.shape[1:] != test.shape[1:]:
        raise ValueError(
            f"rows of {name}_train are {train.shape[1:]}, of {name}_test {test.shape[1:]}; make them equal"
        )
    if _kind(train) != _kind(test):
        raise ValueError(f"{name}_train is {train.dtype}, {name}_test {test.dtype}; store both in one type")


def _kind(array: np.ndarray) -> str:
    return "bytes" if array.dtype == np.uint8 and array.ndim > 1 else "ids" if array.dtype.kind in "iu" else "numbers"


def _dataset(arrays: Arrays) -> Dataset:
    labelled = arrays["y_train"].ndim == 1 and arrays["y_train"].dtype.kind in "iu"
    y_train, y_test = (_targets(arrays[name]) for name in ("y_train", "y_test"))
    return Dataset(
        x_train=torch.from_numpy(_native(arrays["x_train"])),
        y_train=y_train,
        x_test=torch.from_numpy(_native(arrays["x_test"])),
        y_test=y_test,
        classes=int(max(y_train.max(), y_test.max())) + 1 if labelled else 0,
        client=arrays["client"].astype(np.int64) if "client" in arrays else None,
    )


def _targets(y: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(y.astype(np.int64) if y.dtype.kind in "iu" else _native(y))


def _native(x: np.ndarray) -> np.ndarray:
    """The array in a type and byte order that torch takes: uint8, int32, float32 or float64."""
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    if x.dtype.kind in "iu":
        return np.ascontiguousarray(x, dtype=np.int32)
    return np.ascontiguousarray(x, dtype=np.float64 if x.dtype.itemsize >= 8 else np.float32)
