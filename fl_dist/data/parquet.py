"""The user's own tables: Parquet and Arrow files with columns of numbers or images, labels and clients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fl_dist.common.errors import DataError
from fl_dist.common.formatting import pluralize
from fl_dist.common.rows import main_tensor
from fl_dist.data import shared_arrays
from fl_dist.data.arrow_files import SUFFIXES, read_batches, read_schema
from fl_dist.data.dataset import SPLITS, Dataset, dataset_from_arrays, datasets
from fl_dist.data.images import decode_images, resize
from fl_dist.data.npz import channel_statistics
from fl_dist.data.tables import ClassNames, TestRows, draw_test_rows, find_splits, number_clients, number_labels

Column = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class TableSettings:
    """What the columns are."""

    label: str
    client: str | None
    features: list[str]
    image: str | None
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
        Field(description="columns of numbers, or of lists of them; null: all that are not used otherwise"),
    ] = None,
    image: Annotated[
        Column | None, Field(description="column of encoded images (PNG, JPEG), instead of features")
    ] = None,
    size: Annotated[int, Field(ge=1, le=1024, description="pixels per side: images are scaled to it")] = 32,
    normalise: Annotated[
        Literal["auto"] | None, Field(description="auto: mean and std of the training rows, per column or channel")
    ] = None,
    classes: ClassNames | None = None,
) -> Dataset:
    """Tables in Parquet or Arrow files (.parquet, .arrow, .feather)."""
    files = find_splits(path, test, splits, SUFFIXES)
    sources = [file for own in files.values() for file in own]
    chosen = [] if image else _choose_features(sources[0], features, {label, client})
    settings = TableSettings(label, client, chosen, image, size, classes)

    def build(allocate: shared_arrays.Allocate) -> None:
        _write_tables(allocate, files, test, settings)

    arrays = shared_arrays.load_or_build("parquet", sources, (settings, tuple(files), test), build)
    arrays = {f"{x}_{split}": arrays[f"{x}_{splits[0]}"][:0] for split in SPLITS for x in "xy"} | arrays
    data = dataset_from_arrays(arrays, int(arrays["classes"]))
    if normalise is None:
        return data
    if tuple(splits) != SPLITS:
        raise DataError("data.normalise=auto needs the training rows of all clients, which data.local keeps apart")
    mean, std = channel_statistics(main_tensor(data.x_train).numpy())
    return replace(data, mean=mean, std=std)


def _choose_features(file: Path, features: list[str] | None, others: set[str | None]) -> list[str]:
    schema = read_schema(file)
    if features is None:
        features = [name for name in schema.names if name not in others and _is_numeric(schema.field(name).type)]
    if not features:
        raise DataError(f"{file} has no column of numbers besides {', '.join(filter(None, others))}; set data.image")
    return features


def _is_numeric(kind: Any) -> bool:
    import pyarrow.types as types

    inner = kind.value_type if _is_list(kind) else kind
    return bool(types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


@dataclass(frozen=True)
class _Table:
    """Rows of one split."""

    rows: np.ndarray
    """Features [n, k], or the bytes of an image file [n]."""
    labels: list[Any]
    clients: list[Any]

    def select(self, is_chosen: np.ndarray) -> "_Table":
        numbers = np.flatnonzero(is_chosen)
        labels, clients = ([own[k] for k in numbers] if own else [] for own in (self.labels, self.clients))
        return _Table(self.rows[numbers], labels, clients)


def _write_tables(
    allocate: shared_arrays.Allocate, files: dict[str, list[Path]], test: str | float, settings: TableSettings
) -> None:
    tables = {split: _read_table(own, settings) for split, own in files.items()}
    if isinstance(test, float):
        is_test = draw_test_rows(len(tables["train"].rows), test)
        tables = {"train": tables["train"].select(~is_test), "test": tables["train"].select(is_test)}
    _write_rows(allocate, {split: table.rows for split, table in tables.items()}, settings)
    labels = {split: table.labels for split, table in tables.items()}
    targets, classes = _to_targets(labels, settings)
    for split, own in targets.items():
        allocate(f"y_{split}", own.shape, own.dtype.type)[:] = own
    allocate("classes", (), np.int64)[...] = classes
    if settings.client is not None and "train" in tables:
        clients = number_clients(tables["train"].clients, settings.client)
        allocate("client", clients.shape, np.int64)[:] = clients


def _to_targets(labels: dict[str, list[Any]], settings: TableSettings) -> tuple[dict[str, np.ndarray], int]:
    if all(type(value) is float for own in labels.values() for value in own):
        return {split: np.array(own, np.float64) for split, own in labels.items()}, 0
    return number_labels(labels, settings.label, settings.classes)


def _write_rows(allocate: shared_arrays.Allocate, rows: dict[str, np.ndarray], settings: TableSettings) -> None:
    for split, own in rows.items():
        if settings.image is None:
            allocate(f"x_{split}", own.shape, own.dtype.type)[:] = own
        else:
            x = allocate(f"x_{split}", (len(own), 3, settings.size, settings.size), np.uint8)
            decode_images(own.tolist(), x, partial(resize, size=settings.size), "the table")


def _read_table(files: Sequence[Path], settings: TableSettings) -> _Table:
    columns = [settings.image] if settings.image else settings.features
    others = [settings.label, *filter(None, [settings.client])]
    blocks: list[np.ndarray] = []
    labels: list[Any] = []
    clients: list[Any] = []
    for file in files:
        for batch in read_batches(file, list(dict.fromkeys([*columns, *others]))):
            blocks.append(
                _read_images(batch, columns[0], file) if settings.image else _read_features(batch, columns, file)
            )
            labels += batch.column(settings.label).to_pylist()
            clients += batch.column(settings.client).to_pylist() if settings.client else []
    if not labels:
        raise DataError(f"{files[0]} has no rows; write some to it")
    if len({block.shape[1:] for block in blocks}) > 1:
        raise DataError(f"{files[0].parent}: lists of numbers have different lengths; make them equal")
    return _Table(np.concatenate(blocks), labels, clients)


def _read_images(batch: Any, column: str, file: Path) -> np.ndarray:
    """The encoded images; Hugging Face's datasets store each as an object with `bytes`."""
    import pyarrow.types as types

    array = batch.column(column)
    if types.is_struct(array.type) and "bytes" in {field.name for field in array.type}:
        array = array.field("bytes")
    if not (types.is_binary(array.type) or types.is_large_binary(array.type)) or array.null_count:
        raise DataError(f"{file}: the column {column!r} is {array.type}; images need the bytes of a file in each row")
    images = np.empty(len(array), object)
    images[:] = array.to_pylist()
    return images


def _read_features(batch: Any, columns: Sequence[str], file: Path) -> np.ndarray:
    blocks = [_read_numbers(batch.column(column), column, file) for column in columns]
    is_double = any(block.dtype == np.float64 for block in blocks)
    return np.concatenate(blocks, axis=1, dtype=np.float64 if is_double else np.float32, casting="unsafe")


def _read_numbers(array: Any, column: str, file: Path) -> np.ndarray:
    """[n, 1], or [n, k] of a column of lists."""
    rows, nulls = len(array), array.null_count
    if not _is_numeric(array.type):
        raise DataError(f"{file}: the column {column!r} is {array.type}; data.features have to be columns of numbers")
    if _is_list(array.type):
        if len(set(array.value_lengths().to_pylist())) > 1:
            raise DataError(f"{file}: lists in the column {column!r} have different lengths; make them equal")
        array = array.flatten()
        nulls += array.null_count
    if nulls:
        raise DataError(f"{file}: the column {column!r} has {pluralize(nulls, 'missing value')}; fill or remove them")
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(rows, -1 if rows else 1)
