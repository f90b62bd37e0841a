"""Columns of Arrow batches as arrays of numbers, or as encoded images."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_dist.common.errors import DataError
from fl_dist.common.formatting import pluralize
from fl_dist.data.images import EncodedImage

if TYPE_CHECKING:
    import pyarrow as pa


def is_numeric(kind: Any) -> bool:
    """Whether a column of this type holds numbers, or lists of them."""
    import pyarrow.types as types

    inner = kind.value_type if _is_list(kind) else kind
    return bool(types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def read_images(batch: "pa.RecordBatch", column: str, file: Path, first: int) -> list[EncodedImage]:
    """The encoded images; Hugging Face's datasets store each as an object with `bytes`."""
    import pyarrow.types as types

    array = batch.column(column)
    nulls = array.null_count
    if types.is_struct(array.type) and "bytes" in {field.name for field in array.type}:
        array = array.field("bytes")
    if not (types.is_binary(array.type) or types.is_large_binary(array.type)):
        raise DataError(f"{file}: the column {column!r} is {array.type}; images need the bytes of a file in each row")
    if nulls := nulls + array.null_count:
        what = f"has {pluralize(nulls, 'row')} without the bytes of an image"
        raise DataError(f"{file}: the column {column!r} {what}; store the files themselves, not their paths")
    return [EncodedImage(content, f"{file}, row {row}") for row, content in enumerate(array.to_pylist(), first)]


def read_features(batch: "pa.RecordBatch", columns: Sequence[str], file: Path) -> np.ndarray:
    """[n, k], of all columns side by side."""
    blocks = [_read_numbers(batch.column(column), column, file) for column in columns]
    is_double = any(block.dtype == np.float64 for block in blocks)
    return np.concatenate(blocks, axis=1, dtype=np.float64 if is_double else np.float32, casting="unsafe")


def _read_numbers(array: Any, column: str, file: Path) -> np.ndarray:
    """[n, 1], or [n, k] of a column of lists."""
    rows, nulls = len(array), array.null_count
    if not is_numeric(array.type):
        raise DataError(f"{file}: the column {column!r} is {array.type}; data.features have to be columns of numbers")
    if _is_list(array.type):
        lengths = set(array.value_lengths().to_pylist()) - {None}
        if len(lengths) > 1:
            raise DataError(f"{file}: lists in the column {column!r} have different lengths; make them equal")
        array = array.flatten()
        nulls += array.null_count
    if nulls:
        raise DataError(f"{file}: the column {column!r} has {pluralize(nulls, 'missing value')}; fill or remove them")
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(rows, -1)
