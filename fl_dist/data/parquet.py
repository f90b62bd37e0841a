"""The user's own tables: Parquet and Arrow files with columns of numbers or images, labels and clients."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError
from fl_dist.data import shared_arrays
from fl_dist.data.arrow_columns import is_numeric, read_features, read_images
from fl_dist.data.arrow_files import SUFFIXES, read_batches, read_schema
from fl_dist.data.dataset import SPLITS, Dataset, add_channel_statistics, dataset_from_arrays, datasets
from fl_dist.data.images import EncodedImage, decode_images, resize
from fl_dist.data.splits import (
    ClassNames,
    Column,
    TestRows,
    describe_files,
    find_splits,
    number_clients,
    number_labels,
    print_size,
    split_masks,
)

BATCH_ROWS = 1000
INDEX = re.compile(r"__index_level_\d+__")
"""The name under which pandas stores a table's index."""
Block = np.ndarray | list[EncodedImage]
"""Rows of one split, or of several: features [n, k], or images."""


@dataclass(frozen=True)
class ColumnSettings:
    """What the columns are."""

    label: str
    client: str | None
    features: list[str]
    """Of numbers, or the one of images."""
    is_image: bool
    size: int
    classes: int | list[str] | None


@datasets.register
def parquet(
    splits: Sequence[str] = SPLITS,
    *,
    path: Annotated[
        str, Field(min_length=1, description="training rows: a file, a pattern (DIR/*.parquet) or a folder")
    ],
    test: TestRows = 0.1,
    label: Annotated[
        Column, Field(description="column of labels, or of real targets for the task regression")
    ] = "label",
    client: Annotated[Column | None, Field(description="column of the client of each row")] = None,
    features: Annotated[
        list[str] | None,
        Field(
            min_length=1, description="columns of numbers, or of lists of them; null: all that are not used otherwise"
        ),
    ] = None,
    image: Annotated[
        Column | None, Field(description="column of encoded images (PNG, JPEG), instead of features")
    ] = None,
    size: Annotated[int, Field(ge=1, le=1024, description="pixels per side: images are scaled to it")] = 32,
    normalise: Annotated[
        Literal["auto"] | None, Field(description="auto: mean and std of the training rows, per column or channel")
    ] = None,
    classes: ClassNames = None,
) -> Dataset:
    """Tables in Parquet or Arrow files (.parquet, .arrow, .feather)."""
    files = find_splits(path, test, splits, SUFFIXES)
    sources = [file for own in files.values() for file in own]
    if image is None and features is None and tuple(splits) != SPLITS:
        raise DataError(
            "data.features has to list the columns with data.local: their order must be the same everywhere"
        )
    columns = [image] if image else _choose_features(sources[0], features, {label, client})
    settings = ColumnSettings(label, client, columns, image is not None, size, classes)

    def build(allocate: shared_arrays.Allocate) -> None:
        _write_tables(allocate, files, test, settings)

    arrays = shared_arrays.load_or_build("parquet", sources, (settings, describe_files(files), test), build)
    data = dataset_from_arrays(arrays, int(arrays["classes"]))
    if normalise is None:
        return data
    if tuple(splits) != SPLITS:
        raise DataError("data.normalise=auto needs the training rows of all clients, which data.local keeps apart")
    return add_channel_statistics(data)


def _choose_features(file: Path, features: list[str] | None, others: set[str | None]) -> list[str]:
    if features:
        return features
    schema = read_schema(file)
    names = [name for name in schema.names if name not in others and not INDEX.fullmatch(name)]
    numbers = [name for name in names if is_numeric(schema.field(name).type)]
    if not numbers:
        besides = " and ".join(sorted(filter(None, others)))
        raise DataError(f"{file} has no column of numbers besides {besides}; set data.image, or write features to it")
    return numbers


def _write_tables(
    allocate: shared_arrays.Allocate, files: dict[str, list[Path]], test: str | float, settings: ColumnSettings
) -> None:
    """Labels and clients first: then it is known how many rows there are, and which of them are held out."""
    print_size(files, "reading")
    values = {source: _read_values(own, settings.label) for source, own in files.items()}
    splits = {source: split_masks(source, len(own), test) for source, own in values.items()}
    labels = {split: _choose(values[source], mask) for source, own in splits.items() for split, mask in own.items()}
    targets, classes = _to_targets(labels, settings)
    for split, target in targets.items():
        allocate(f"y_{split}", target.shape, target.dtype.type)[:] = target
    allocate("classes", (), np.int64)[...] = classes
    if settings.client is not None and "train" in files:
        names = _choose(_read_values(files["train"], settings.client), splits["train"]["train"])
        ids = number_clients(names, settings.client)
        allocate("client", ids.shape, np.int64)[:] = ids
    for source, own_files in files.items():
        _write_rows(allocate, own_files, splits[source], settings)


def _choose(values: list[Any], mask: np.ndarray) -> list[Any]:
    return list(compress(values, mask.tolist()))


def _read_values(files: Sequence[Path], column: str) -> list[Any]:
    values = [
        value
        for file in files
        for batch in read_batches(file, [column], BATCH_ROWS)
        for value in batch.column(column).to_pylist()
    ]
    if not values:
        raise DataError(f"{files[0]} has no rows; write some to it")
    return values


def _to_targets(labels: dict[str, list[Any]], settings: ColumnSettings) -> tuple[dict[str, np.ndarray], int]:
    if all(type(value) is float for own in labels.values() for value in own):
        return {split: np.array(own, np.float64) for split, own in labels.items()}, 0
    return number_labels(labels, settings.label, settings.classes)


def _write_rows(
    allocate: shared_arrays.Allocate, files: Sequence[Path], splits: dict[str, np.ndarray], settings: ColumnSettings
) -> None:
    """Some rows at a time, so that files may be larger than memory."""
    arrays: dict[str, np.ndarray] = {}
    row, written = 0, dict.fromkeys(splits, 0)
    for file in files:
        for block in _read_blocks(file, settings):
            for split, mask in splits.items():
                chosen = np.flatnonzero(mask[row : row + len(block)])
                if split not in arrays:
                    shape, dtype = _row_type(block, settings)
                    arrays[split] = allocate(f"x_{split}", (int(mask.sum()), *shape), dtype)
                out = arrays[split][written[split] : written[split] + len(chosen)]
                _fill(out, block, chosen, file)
                written[split] += len(chosen)
            row += len(block)


def _row_type(block: Block, settings: ColumnSettings) -> tuple[tuple[int, ...], type]:
    if isinstance(block, np.ndarray):
        return block.shape[1:], block.dtype.type
    return (3, settings.size, settings.size), np.uint8


def _fill(out: np.ndarray, block: Block, chosen: np.ndarray, file: Path) -> None:
    if isinstance(block, list):
        decode_images([block[k] for k in chosen], out, resize, str(file))
    elif block.shape[1:] != out.shape[1:]:
        raise DataError(
            f"{file}: rows have {block.shape[1]} numbers, those before them {out.shape[1]}; make them equal"
        )
    else:
        out[:] = block[chosen]


def _read_blocks(file: Path, settings: ColumnSettings) -> Iterator[Block]:
    first = 1
    for batch in read_batches(file, settings.features, BATCH_ROWS):
        if settings.is_image:
            yield read_images(batch, settings.features[0], file, first)
        else:
            yield read_features(batch, settings.features, file)
        first += len(batch)
