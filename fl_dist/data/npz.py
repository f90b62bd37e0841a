"""The user's own data: one .npz file of x_train, y_train, x_test, y_test and, optionally, client.

Rows are uint8 images, features of floating point, int8 or int16 samples, or ids (tokens) of any other integer type;
targets are labels, numbers, or absent, for tasks that take theirs from the rows.
"""

import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError
from fl_dist.common.formatting import format_bytes, shorten
from fl_dist.common.paths import expand_path
from fl_dist.data.dataset import (
    NUMERIC_INTEGERS,
    SPLITS,
    Dataset,
    add_channel_statistics,
    class_labels,
    dataset_from_arrays,
    datasets,
    row_kind,
)

MAX_LABEL = 2**20  # a label beyond it is an id or a hash, and would size the model's last layer
MAX_ID = 2**31 - 1
READ_ERRORS = (
    *(OSError, EOFError, RuntimeError, MemoryError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
)

Arrays = dict[str, np.ndarray]
Channels = Annotated[list[float], Field(min_length=1)]


@datasets.register
def npz(
    splits: Sequence[str] = SPLITS,
    *,
    path: Annotated[str, Field(min_length=1, description="the .npz file with x_train, y_train, x_test, y_test")],
    mean: Annotated[Channels | None, Field(description="subtracted from each channel (of x/255 for uint8)")] = None,
    std: Annotated[Channels | None, Field(description="what each channel is then divided by")] = None,
    normalise: Annotated[
        Literal["auto"] | None, Field(description="auto: mean and std of the training rows, per channel")
    ] = None,
    classes: Annotated[
        int | None, Field(ge=1, le=MAX_LABEL + 1, description="number of classes; null: the largest label decides")
    ] = None,
    vocabulary: Annotated[
        int | None, Field(ge=1, le=MAX_ID + 1, description="number of ids; null: the largest id decides")
    ] = None,
) -> Dataset:
    """Your own arrays, and optionally the client of each training row."""
    data = _set_sizes(read_npz(expand_path(path), splits), classes, vocabulary)
    if mean is None and std is None and normalise is None:
        return data
    if not data.is_numeric:
        raise DataError(f"data file {path}: x_train holds ids, which cannot be normalised; remove mean, std, normalise")
    if normalise is None:
        return replace(data, mean=tuple(mean or ()), std=tuple(std or ()))
    if mean or std:
        raise DataError("data.normalise is auto, but data.mean or data.std is set too; remove one of them")
    if tuple(splits) != SPLITS:
        raise DataError("data.normalise=auto needs the training rows of all clients; with data.local set mean and std")
    return add_channel_statistics(data)


def _set_sizes(data: Dataset, classes: int | None, vocabulary: int | None) -> Dataset:
    """With these numbers of classes and ids; a file need not hold a row of each."""
    if classes is not None and data.classes > classes:
        raise DataError(f"data.classes is {classes}, but the data has a label {data.classes - 1}")
    if vocabulary is not None and data.vocabulary_size > vocabulary:
        raise DataError(f"data.vocabulary is {vocabulary}, but the data has ids up to {data.vocabulary_size - 1}")
    return replace(data, classes=classes or data.classes, vocabulary=vocabulary or 0)


def read_npz(path: Path, splits: Sequence[str] = SPLITS) -> Dataset:
    """The data set in a .npz file, or only one split of it; a DataError names the file and what is wrong."""
    if not os.path.isfile(path):
        raise DataError(f"data file {shorten(path)} does not exist; set data.path to a .npz file")
    try:
        arrays = _read_arrays(path, splits)
        for split in splits:
            _check_rows(arrays, f"x_{split}")
            _check_targets(arrays, f"y_{split}", f"x_{split}")
        for split in SPLITS:
            for kind in "xy":
                arrays.setdefault(f"{kind}_{split}", arrays[f"{kind}_{splits[0]}"][:0])
        _check_splits_match(arrays, "x")
        _check_splits_match(arrays, "y")
        if "client" in arrays:
            _check_ids(arrays, "client", "x_train", np.iinfo(np.int64).max)
        return _build(arrays)
    except DataError as e:
        raise DataError(f"data file {shorten(path)}: {e}") from None


def _read_arrays(path: Path, splits: Sequence[str]) -> Arrays:
    required, optional = [f"x_{split}" for split in splits], [f"y_{split}" for split in splits]
    try:
        with _open(path) as archive:
            if missing := [name for name in required if name not in archive.files]:
                needed = ", ".join(f"{kind}_{split}" for split in splits for kind in "xy")
                raise DataError(f"lacks {', '.join(missing)}; it needs {needed}")
            client = ["client"] if tuple(splits) == SPLITS else []
            names = [name for name in (*required, *optional, *client) if name in archive.files]
            _check_size(archive, names)
            return {name: _read_array(archive, name) for name in names}
    except READ_ERRORS as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise DataError(f"cannot be read ({reason}); write it again with numpy.savez") from None


def _open(path: Path) -> np.lib.npyio.NpzFile:
    try:
        archive = np.load(path, allow_pickle=False)
    except ValueError:  # numpy's message advises to load pickles
        archive = None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise zipfile.BadZipFile("not a .npz archive")
    return archive


def _check_size(archive: np.lib.npyio.NpzFile, names: list[str]) -> None:
    """A file of a few kilobytes may claim to unpack to terabytes; no more than it claims is unpacked."""
    assert archive.zip is not None
    unpacked = {info.filename.removesuffix(".npy"): info.file_size for info in archive.zip.infolist()}
    total, memory = sum(unpacked[name] for name in names), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total > memory:
        raise DataError(f"unpacks to {format_bytes(total)}, but this machine has {format_bytes(memory)} of memory")


def _read_array(archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    try:
        array = archive[name]
    except ValueError:  # a Python object, a damaged header, or fewer numbers than it claims
        raise DataError(f"{name} is not a plain numeric array, or is damaged; save numbers") from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"{name} is not an array; write the file with numpy.savez")
    return array


def _check_rows(arrays: Arrays, name: str) -> None:
    x = arrays[name]
    if x.dtype.kind not in "iuf":
        advice = "store images as uint8, features as float32 or float64, audio as int16, ids as int32 or int64"
        raise DataError(f"{name} is {x.dtype}; {advice}")
    if x.ndim < 2 or 0 in x.shape:
        raise DataError(f"{name} has shape {x.shape}; it needs at least one row of at least one value, [n, ...]")
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] > 4 >= x.shape[3]:
        raise DataError(f"{name} has shape {x.shape}; store images as [n, channels, height, width]")
    if row_kind(x) == "ids" and not 0 <= x.min() <= x.max() <= MAX_ID:
        raise DataError(f"{name} has ids from {x.min()} to {x.max()}; number from 0 on, or store features as float32")
    _check_finite(x, name)


def _check_finite(x: np.ndarray, name: str) -> None:
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(1))
        raise DataError(f"{name} has a NaN or an infinity, first in row {bad[0]}; remove or replace such rows")


def _check_targets(arrays: Arrays, name: str, rows: str) -> None:
    """Labels, numbers, or a row of ids; missing targets become rows of length 0."""
    y = arrays.setdefault(name, np.empty((len(arrays[rows]), 0), np.int64))
    if y.dtype.kind in "iu" and y.ndim < 2:
        _check_ids(arrays, name, rows, MAX_LABEL)
        return
    if y.dtype.kind not in "iuf":
        raise DataError(f"{name} is {y.dtype}; it needs integers from 0 on, or numbers to predict")
    if y.ndim == 0:
        raise DataError(f"{name} is a single number; it needs one entry for each row of {rows}")
    _check_finite(y, name)


def _check_ids(arrays: Arrays, name: str, rows: str, limit: int) -> None:
    ids, n = arrays[name], len(arrays[rows])
    if ids.dtype.kind not in "iu":
        raise DataError(f"{name} is {ids.dtype}; it needs integers from 0 on")
    if ids.shape != (n,):
        raise DataError(f"{name} has shape {ids.shape}; it needs one entry for each of the {n} rows of {rows}")
    bad = np.flatnonzero((ids < 0) | (ids > limit))
    if len(bad):
        raise DataError(f"{name} is {ids[bad[0]]} in row {bad[0]}; number from 0 on")


def _check_splits_match(arrays: Arrays, name: str) -> None:
    train, test = (arrays[f"{name}_{split}"] for split in SPLITS)
    if train.shape[1:] != test.shape[1:]:
        raise DataError(f"rows of {name}_train are {train.shape[1:]}, of {name}_test {test.shape[1:]}; make them equal")
    # All integer targets become int64; rows keep their type, which decides what they are.
    if (train.dtype.kind == "f") != (test.dtype.kind == "f") or (name == "x" and row_kind(train) != row_kind(test)):
        raise DataError(f"{name}_train is {train.dtype}, {name}_test {test.dtype}; store both in one type")


def _build(arrays: Arrays) -> Dataset:
    arrays = {name: np.ascontiguousarray(array, _stored_dtype(name, array)) for name, array in arrays.items()}
    targets = np.concatenate([arrays["y_train"], arrays["y_test"]])
    return dataset_from_arrays(arrays, 0 if class_labels(targets) is None else 1 + int(targets.max()))


def _stored_dtype(name: str, array: np.ndarray) -> type[np.generic] | np.dtype:
    """A type and byte order that torch takes."""
    if array.dtype.kind == "f":
        return np.float64 if array.dtype.itemsize >= 8 else np.float32
    if not name.startswith("x"):
        return np.int64
    return array.dtype.newbyteorder("=") if array.dtype.name in NUMERIC_INTEGERS else np.int32
