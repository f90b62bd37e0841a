"""Rows of text from JSON lines, plain text, Parquet and Arrow files, as columns of Python values."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import shorten, suggest
from fl_dist.data import arrow_files

SUFFIXES = (".jsonl", ".txt", *arrow_files.SUFFIXES)
CHUNK_ROWS = 1000
FILE_COLUMN = "file"
"""The name of the row's file, without its suffix."""
FIELD = re.compile(r"\{(\w+)\}")

Document = Literal["line", "file"]


@dataclass(frozen=True)
class Table:
    """Some rows of a file."""

    file: Path
    first: int
    """The number of the first of these rows in the file, from 1."""
    columns: dict[str, list[Any]]

    def locate(self, position: int) -> str:
        """Where one of these rows is, for an error."""
        return f"{self.file}, row {self.first + position}"

    def slice(self, start: int, end: int) -> "Table":
        columns = {name: values[start:end] for name, values in self.columns.items()}
        return Table(self.file, self.first + start, columns)


def read_tables(files: Iterable[Path], columns: Sequence[str], document: Document) -> Iterator[Table]:
    """The columns, some rows at a time. `document`: what a row of a .txt file is."""
    inner = [column for column in columns if column != FILE_COLUMN]
    for file in files:
        first = 1
        for values in _read_file(file, inner, document):
            count = len(next(iter(values.values())))
            yield Table(file, first, values | {FILE_COLUMN: [file.stem] * count})
            first += count
        if first == 1:
            raise DataError(f"{file} is empty; remove it, or write rows to it")


def template_columns(template: str) -> list[str]:
    """The columns that a template names; a text without braces is the name of a column."""
    return FIELD.findall(template) or [template]


def fill_template(template: str, table: Table) -> list[str]:
    """The text of each row."""
    columns = {column: _as_texts(table, column) for column in template_columns(template)}
    if not FIELD.search(template):
        return columns[template]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [FIELD.sub(lambda field, row=row: row[field[1]], template) for row in rows]  # type: ignore[misc]


def _as_texts(table: Table, column: str) -> list[str]:
    return [_as_text(value, column, table, position) for position, value in enumerate(table.columns[column])]


def _as_text(value: Any, column: str, table: Table, position: int) -> str:
    if type(value) not in (str, int, float):
        found = shorten(repr(value))
        raise DataError(f"{table.locate(position)}: the column {column!r} is {found}, which is no text; remove the row")
    text = str(value)
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{table.locate(position)}: the column {column!r} is no Unicode text; write the row again")
    return text


def _read_file(file: Path, columns: list[str], document: Document) -> Iterator[dict[str, list[Any]]]:
    if file.suffix in arrow_files.SUFFIXES:
        return (batch.to_pydict() for batch in arrow_files.read_batches(file, columns, CHUNK_ROWS))
    return _read_text(file, columns, document) if file.suffix == ".txt" else _read_json_lines(file, columns)


def _read_text(file: Path, columns: list[str], document: Document) -> Iterator[dict[str, list[Any]]]:
    for column in columns:
        if column != "text":
            raise DataError(f"{file} has no column {column!r}; a .txt file has 'text' and {FILE_COLUMN!r}")
    if document == "file":
        text = "".join(line for _, line in _read_lines(file))
        return iter([{"text": [text]}] if text.strip() else [])
    lines = (line.rstrip("\r\n") for _, line in _read_lines(file) if line.strip())
    return ({"text": chunk} for chunk in _in_chunks(lines))


def _read_json_lines(file: Path, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
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
        with open(file, encoding="utf-8-sig", newline="\n") as lines:
            yield from enumerate(lines, 1)
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{file} cannot be read ({error_message(e)}); write it as UTF-8") from None


def _in_chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(values)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        yield chunk
