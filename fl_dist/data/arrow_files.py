"""Parquet and Arrow files as batches of columns. Nothing in them is executed: extension types are refused."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import suggest

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".arrow", ".feather")
BATCH_ROWS = 10_000
EXTENSION = b"ARROW:extension:name"


def read_schema(file: Path) -> "pa.Schema":
    """Names and types of the columns."""
    return _open(file)[0]


def read_batches(file: Path, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """These columns, some rows at a time; a DataError names the file and what is wrong."""
    schema, batches = _open(file)
    for column in columns:
        if column not in schema.names:
            raise DataError(f"{file} has no column {column!r}; {suggest(column, schema.names)}")
        _check_plain(schema.field(column), file)
    try:
        for batch in batches(list(columns)):
            batch.validate(full=True)  # a damaged file must not make us read other memory
            yield batch
    except _import_pyarrow().ArrowException as e:
        raise DataError(f"{file} is damaged ({error_message(e)}); write it again") from None


def _check_plain(field: "pa.Field", file: Path) -> None:
    is_extension = isinstance(field.type, _import_pyarrow().BaseExtensionType)
    if is_extension or EXTENSION in (field.metadata or {}):
        raise DataError(
            f"{file}: the column {field.name!r} is of an extension type; store plain numbers, text or bytes"
        )


def _open(file: Path) -> tuple["pa.Schema", Any]:
    """The schema, and a function that gives the batches of some columns."""
    pa = _import_pyarrow()
    try:
        return _open_parquet(file) if file.suffix == ".parquet" else _open_ipc(file)
    except (pa.ArrowException, OSError) as e:
        kind = "Parquet" if file.suffix == ".parquet" else "Arrow"
        raise DataError(f"{file} cannot be read as {kind} ({error_message(e)}); write it again") from None


def _open_parquet(file: Path) -> tuple["pa.Schema", Any]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    return table.schema_arrow, lambda columns: table.iter_batches(BATCH_ROWS, columns=columns)


def _open_ipc(file: Path) -> tuple["pa.Schema", Any]:
    """An Arrow file (also called Feather), or a stream, which Hugging Face's datasets write."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        return stream.schema, lambda columns: (batch.select(columns) for batch in stream)
    count = reader.num_record_batches
    return reader.schema, lambda columns: (reader.get_batch(k).select(columns) for k in range(count))


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError("reading Parquet and Arrow files needs pyarrow: pip install 'fl_dist[parquet]'") from None
    return pyarrow
