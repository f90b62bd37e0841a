"""`metrics.jsonl`: one object a round, each line whole or absent."""

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fl_dist.storage.folder import write_atomically

log = logging.getLogger("fl_dist")
Row = dict[str, Any]


class RowsLost(RuntimeError):
    """Rows that could not be written to the end."""


class MetricsFile:
    """On disk after every row; rows that cannot be written are kept and go out with later ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten: list[Row] = []
        self._torn: int | None = None
        """Where the file ended before a write that left a part of a line."""

    def resume(self, rounds: int, unwritten: Sequence[Row] = ()) -> list[Row]:
        """The rows of the first `rounds` rounds, from the file and from a save; the file then holds just these."""
        there = self.path.read_bytes() if self.path.exists() else b""
        lines = there.splitlines(keepends=True)
        read = [row for row in map(parsed, lines) if row is not None]
        rows = {row["round"]: row for row in [*read, *unwritten] if row["round"] <= rounds}
        if len(rows) < rounds:
            log.warning("%s lacks %d of the rounds so far", self.path, rounds - len(rows))
        if len(read) < len([line for line in lines if line.endswith(b"\n")]):
            log.warning("%s has lines that are no rows; it is kept as %s", self.path, DAMAGED)
            write_atomically(self.path.with_name(DAMAGED), there)
        kept = [rows[r] for r in sorted(rows)]
        data = _lines(kept)
        if there.startswith(data) and there:
            os.truncate(self.path, len(data))  # works on a full disk too
        elif data != there:
            write_atomically(self.path, data)
        return kept

    def append(self, row: Row) -> None:
        """OSError if the row cannot be written now."""
        self.unwritten.append(row)
        self.flush()

    def flush(self) -> None:
        if not self.unwritten:
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if self._torn is not None:  # not even the cut could be made
                os.ftruncate(handle, self._torn)
            self._torn = os.fstat(handle).st_size
            _write(handle, _lines(self.unwritten))
            self._torn, self.unwritten = None, []
        finally:
            with contextlib.suppress(OSError):
                if self._torn is not None:
                    os.ftruncate(handle, self._torn)
            os.close(handle)


DAMAGED = "metrics.damaged.jsonl"


class Seconds(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    total: Annotated[float, Field(ge=0)]


class Needed(BaseModel):
    """What a row must have to be counted; it has more."""

    model_config = ConfigDict(strict=True)

    round: Annotated[int, Field(ge=1)]
    test_accuracy: Annotated[float, Field(ge=0, le=1)] | None
    bytes_down: int
    bytes_up: int
    dropped: list[int]
    seconds: Seconds


def rows_in(file: Path) -> list[Row]:
    """The rows of a run, finished or not; a last line that is not whole yet does not count."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [_row(file, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]


def _row(file: Path, number: int, line: bytes) -> Row:
    row = parsed(line)
    if row is None:
        raise ValueError(f"line {number} of {file} is not a row of a run: it was changed or damaged")
    return row


def parsed(line: bytes) -> Row | None:
    """A whole row, or None."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line) if line.endswith(b"\n") else None
        Needed.model_validate(row)
        return row
    return None


def _lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _write(handle: int, data: bytes) -> None:
    """All of it: the system may take only a part at a time."""
    while data:
        data = data[os.write(handle, data) :]
