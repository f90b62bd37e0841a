"""Rows of text from JSON lines, plain text, Parquet and Arrow files, as columns of Python values."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import shorten, suggest
from fl_dist.data import arrow_files

SUFFIXES = (".jsonl", ".txt", *arrow_files.SUFFIXES)
CHUNK_ROWS = 10_000
FILE_COLUMN = "file"
"""The name of the row's file, without its suffix."""
FIELD = re.compile(r"\{(\w+)\}")

Table = dict[str, list[Any]]
Document = Literal["line", "file"]


def read_tables(files: Iterable[Path], columns: Sequence[str], document: Document = "line") -> Iterator[Table]:
    """The columns, some rows at a time. `document`: what a row of a .txt file is."""
    inner = [column for column in columns if column != FILE_COLUMN]
    for file in files:
        rows = 0
        for table in _read_file(file, inner, document):
            count = len(next(iter(table.values())))
            rows += count
            yield table | {FILE_COLUMN: [file.stem] * count}
        if not rows:
            raise DataError(f"{file} is empty; remove it, or write rows to it")


def template_columns(template: str) -> list[str]:
    """The columns that a template names; a text without braces is the name of a column."""
    return FIELD.findall(template) or [template]


def fill_template(template: str, table: Table) -> list[str]:
    """The text of each row."""
    columns = {column: _as_texts(table[column], column) for column in template_columns(template)}
    if not FIELD.search(template):
        return columns[template]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [FIELD.sub(lambda field, row=row: row[field[1]], template) for row in rows]  # type: ignore[misc]


def _as_texts(values: Sequence[Any], column: str) -> list[str]:
    for value in values:
        if type(value) not in (str, int, float):
            raise DataError(f"the column {column!r} holds {shorten(repr(value))}, which is no text; remove such rows")
    return [value if isinstance(value, str) else str(value) for value in values]


def _read_file(file: Path, columns: list[str], document: Document) -> Iterator[Table]:
    if file.suffix in arrow_files.SUFFIXES:
        return (batch.to_pydict() for batch in arrow_files.read_batches(file, columns))
    return _read_text(file, columns, document) if file.suffix == ".txt" else _read_json_lines(file, columns)


def _read_text(file: Path, columns: list[str], document: Document) -> Iterator[Table]:
    for column in columns:
        if column != "text":
            raise DataError(f"{file} has no column {column!r}; a .txt file has 'text' and {FILE_COLUMN!r}")
    if document == "file":
        text = "".join(line for _, line in _read_lines(file))
        return iter([{"text": [text]}] if text.strip() else [])
    lines = (line.rstrip("\n") for _, line in _read_lines(file) if line.strip())
    return ({"text": chunk} for chunk in _in_chunks(lines))


def _read_json_lines(file: Path, columns: list[str]) -> Iterator[Table]:
    rows = (_parse_row(line, columns, f"{file}, line {number}") for number, line in _read_lines(file) if line.strip())
    for chunk in _in_chunks(rows):
        yield {column: [row[k] for row in chunk] for k, column in enumerate(columns)}


def _parse_row(line: str, columns: list[str], where: str) -> list[Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: this is no JSON ({error_message(e)})") from None
    if not isinstance(row, dict):
        raise DataError(f'{where}: this is no JSON object; write one per line, such as {{"text": ...}}')
    for column in columns:
        if column not in row:
            raise DataError(f"{where}: there is no column {column!r}; {suggest(column, row)}")
    return [row[column] for column in columns]


def _read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, from 1."""
    try:
        with open(file, encoding="utf-8", newline="\n") as lines:
            yield from enumerate(lines, 1)
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{file} cannot be read ({error_message(e)}); write it as UTF-8") from None


def _in_chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for value in values:
        chunk.append(value)
        if len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
