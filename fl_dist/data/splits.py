"""What data in the user's own files share, whatever its format: finding files, clients, labels and test rows."""

import glob
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import format_bytes, pluralize, shorten, suggest
from fl_dist.common.paths import expand_path
from fl_dist.common.randomness import generator
from fl_dist.common.terminal import print_progress
from fl_dist.data.dataset import SPLITS

MAX_CLASSES = 2**20
MIN_BYTES_FOR_PROGRESS = 100e6
Column = Annotated[str, Field(min_length=1)]
TestRows = Annotated[
    Annotated[str, Field(min_length=1)] | Annotated[float, Field(gt=0, lt=1)],
    Field(description="test rows: files, as in path; or the share of all rows that is held out, always the same ones"),
]
ClassNames = Annotated[
    Annotated[int, Field(ge=1, le=MAX_CLASSES)] | Annotated[list[str], Field(min_length=1)] | None,
    Field(description="number of classes, or the names of text labels in order; null: those that occur, sorted"),
]


def find_files(path: str, key: str, suffixes: Sequence[str]) -> list[Path]:
    """A file, those that match a pattern, or those of a folder; by name, all of one format."""
    base = expand_path(path)
    try:
        files = sorted(file for file in _list_files(base, suffixes) if file.is_file())
    except OSError as e:
        raise DataError(f"{key} {shorten(path)} cannot be read ({error_message(e)})") from None
    formats = sorted({file.suffix for file in files})
    if not files:
        what = f"has no file of a known format ({', '.join(suffixes)})" if base.is_dir() else "does not exist"
        raise DataError(f"{key} {shorten(path)} {what}; name a file, a pattern such as DIR/*{suffixes[0]}, or a folder")
    if unknown := [suffix for suffix in formats if suffix not in suffixes]:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise DataError(f"{key} {shorten(path)} is of another format ({unknown[0] or 'no suffix'}): {known}")
    if len(formats) > 1:
        raise DataError(
            f"{key} {shorten(path)} holds files of several formats ({', '.join(formats)}); name one pattern"
        )
    return files


def _list_files(base: Path, suffixes: Sequence[str]) -> list[Path]:
    if base.is_dir():
        return [file for file in base.iterdir() if file.suffix in suffixes and not file.name.startswith(".")]
    return [base] if base.is_file() else [Path(name) for name in glob.glob(str(base), recursive=True)]


def find_splits(path: str, test: str | float, splits: Sequence[str], suffixes: Sequence[str]) -> dict[str, list[Path]]:
    """The files of each split that is needed; without test files, the test rows are among those of `path`."""
    if isinstance(test, float):
        if tuple(splits) != SPLITS:
            raise DataError("data.test is a share of all rows; with data.local it has to name the server's test files")
        return {"train": find_files(path, "data.path", suffixes)}
    sources = {"train": ("data.path", path), "test": ("data.test", test)}
    files = {split: find_files(source, key, suffixes) for split, (key, source) in sources.items() if split in splits}
    train, test_files = ({file.resolve() for file in files.get(split, ())} for split in SPLITS)
    if both := train & test_files:
        raise DataError(f"{min(both)} belongs to data.path and to data.test; test on files that are not trained on")
    return files


def describe_files(files: Mapping[str, Sequence[Path]]) -> list[tuple[str, str]]:
    """The split and the name of each: what the arrays depend on besides their contents."""
    return [(split, file.name) for split, own in files.items() for file in own]


def print_size(files: Mapping[str, Sequence[Path]], activity: str) -> None:
    """What takes long."""
    size = sum(file.stat().st_size for own in files.values() for file in own)
    if size > MIN_BYTES_FOR_PROGRESS:
        print_progress(f"{activity} {format_bytes(size)}, once on this machine", sys.stdout)


def draw_test_rows(rows: int, share: float) -> np.ndarray:
    """Which rows are held out: the same ones in every run, at least one, and not all."""
    count = min(max(1, round(share * rows)), rows - 1)
    if count < 1:
        raise DataError(f"data.test={share:g} cannot hold out rows: there is only {pluralize(rows, 'row')}")
    is_test = np.zeros(rows, dtype=bool)
    is_test[generator(0, "test rows").permutation(rows)[:count]] = True
    return is_test


def split_masks(source: str, rows: int, test: str | float) -> dict[str, np.ndarray]:
    """Which rows of the files of `source` are in each split: all in its own, unless test rows are drawn from them."""
    if isinstance(test, str):
        return {source: np.ones(rows, dtype=bool)}
    is_test = draw_test_rows(rows, test)
    return {"train": ~is_test, "test": is_test}


def number_clients(values: Sequence[Any], column: str) -> np.ndarray:
    """An id from 0 for each name or number, in sorted order."""
    _check_one_type(values, column, "clients")
    ids = {value: k for k, value in enumerate(sorted(set(values)))}
    return np.array([ids[value] for value in values], np.int64)


def number_labels(
    values: Mapping[str, Sequence[Any]], column: str, classes: int | list[str] | None
) -> tuple[dict[str, np.ndarray], int]:
    """The labels of each split, and how many classes there are; names are numbered in sorted order."""
    together = [value for own in values.values() for value in own]
    if _check_one_type(together, column, "labels") is int:
        count = _count_classes(together, column, classes)
        return {split: np.array(own, np.int64) for split, own in values.items()}, count
    names = _class_names(set(together), tuple(values), column, classes)
    numbers = {name: number for number, name in enumerate(names)}
    labels = {split: np.array([numbers[value] for value in own], np.int64) for split, own in values.items()}
    return labels, classes if isinstance(classes, int) else len(names)


def _check_one_type(values: Sequence[Any], column: str, what: str) -> type:
    kinds = set(map(type, values))
    if type(None) in kinds:
        missing = pluralize(sum(value is None for value in values), "row")
        raise DataError(f"the column {column!r} is empty in {missing}; remove them, or write their {what}")
    if kinds != {str} and kinds != {int}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError(f"the column {column!r} holds {what} of type {found}; it needs all text or all whole numbers")
    return min(kinds, key=str)


def _class_names(found: set[str], splits: tuple[str, ...], column: str, classes: int | list[str] | None) -> list[str]:
    if isinstance(classes, list):
        if unknown := sorted(found - set(classes)):
            hint = suggest(unknown[0], classes)
            raise DataError(f"the column {column!r} has a label {unknown[0]!r} outside data.classes; {hint}")
        return classes
    if splits != SPLITS:
        raise DataError(f"the column {column!r} has names; with data.local, data.classes has to list all of them")
    if classes is not None and len(found) > classes:
        raise DataError(f"data.classes is {classes}, but the column {column!r} has {len(found)} different labels")
    return sorted(found)


def _count_classes(labels: Sequence[int], column: str, classes: int | list[str] | None) -> int:
    low, high = min(labels), max(labels)
    known = len(classes) if isinstance(classes, list) else classes
    if low < 0 or high >= (known or MAX_CLASSES):
        wrong, end = (low if low < 0 else high), f" to {known - 1}" if known else ""
        raise DataError(f"the column {column!r} has a label {wrong}; number labels from 0 on{end}")
    return known or high + 1
