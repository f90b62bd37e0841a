"""Parquet and Arrow files as batches of columns. Nothing in them is executed: extension types are refused."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import suggest

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".arrow", ".feather")
EXTENSION = b"ARROW:extension:name"


def read_schema(file: Path) -> "pa.Schema":
    """Names and types of the columns."""
    return _open(file)[0]


def read_batches(file: Path, columns: Sequence[str], rows: int) -> Iterator["pa.RecordBatch"]:
    """These columns, at most `rows` rows at a time; a DataError names the file and what is wrong."""
    schema, read = _open(file)
    for column in columns:
        _check_column(schema, column, file)
    try:
        for batch in read(list(columns), rows):
            batch.validate(full=True)  # a damaged file must not make us read other memory
            yield from (batch.slice(first, rows) for first in range(0, len(batch), rows))
    except (_import_pyarrow().ArrowException, OSError) as e:
        raise DataError(f"{file} is damaged ({error_message(e)}); write it again") from None


def _check_column(schema: "pa.Schema", column: str, file: Path) -> None:
    places = schema.get_all_field_indices(column)
    if not places:
        raise DataError(f"{file} has no column {column!r}; {suggest(column, schema.names)}")
    if len(places) > 1:
        raise DataError(f"{file} has {len(places)} columns {column!r}; rename all but one")
    field = schema.field(places[0])
    is_extension = isinstance(field.type, _import_pyarrow().BaseExtensionType)
    if is_extension or EXTENSION in (field.metadata or {}):
        raise DataError(f"{file}: the column {column!r} is of an extension type; store plain numbers, text or bytes")


def _open(file: Path) -> tuple["pa.Schema", Any]:
    """The schema, and a function that returns batches of some columns, with about the given number of rows."""
    pa = _import_pyarrow()
    try:
        return _open_parquet(file) if file.suffix == ".parquet" else _open_ipc(file)
    except (pa.ArrowException, OSError) as e:
        kind = "Parquet" if file.suffix == ".parquet" else "Arrow"
        raise DataError(f"{file} cannot be read as {kind} ({error_message(e)}); write it again") from None


def _open_parquet(file: Path) -> tuple["pa.Schema", Any]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    return table.schema_arrow, lambda columns, rows: table.iter_batches(rows, columns=columns)


def _open_ipc(file: Path) -> tuple["pa.Schema", Any]:
    """An Arrow file (also called Feather), or a stream, which Hugging Face's datasets write."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        stream = pa.ipc.RecordBatchStreamReader(source)
        return stream.schema, lambda columns, _: (batch.select(columns) for batch in stream)
    count = reader.num_record_batches
    return reader.schema, lambda columns, _: (reader.get_batch(k).select(columns) for k in range(count))


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError("reading Parquet and Arrow files needs pyarrow: pip install 'fl_dist[parquet]'") from None
    return pyarrow
