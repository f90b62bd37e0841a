"""`metrics.jsonl`: one record per round, each line whole or absent."""

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from fl_dist.common.errors import FlDistError
from fl_dist.common.files import read_file, read_lines, write_atomically
from fl_dist.common.formatting import pluralize
from fl_dist.metrics.record import RoundRecord, parse_record

log = logging.getLogger(__name__)
DAMAGED = "metrics.damaged.jsonl"


class MetricsLostError(FlDistError):
    """Records that could not be written by the end of the run."""


class MetricsFile:
    """On disk after every record; records that cannot be written are kept and written with later ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten: list[RoundRecord] = []
        self._size_before: int | None = None
        """Size of the file before a write that left a part of a line."""

    def resume(self, rounds: int, unwritten: Sequence[RoundRecord] = ()) -> list[RoundRecord]:
        """The records of the first `rounds` rounds, from the file and a checkpoint; the file then holds just these."""
        content = read_file(self.path) if self.path.exists() else b""
        lines = content.splitlines(keepends=True)
        parsed = [record for record in map(parse_record, lines) if record is not None]
        by_round = {record.round: record for record in [*unwritten, *parsed] if record.round <= rounds}
        if len(by_round) < rounds:
            log.warning("%s lacks %d of the rounds so far", self.path, rounds - len(by_round))
        if len(parsed) < len([line for line in lines if line.endswith(b"\n")]):
            log.warning("%s has lines that are not records; it is kept as %s", self.path, DAMAGED)
            write_atomically(self.path.with_name(DAMAGED), content)
        records = [by_round[index] for index in sorted(by_round)]
        data = _to_lines(records)
        if content.startswith(data) and content:
            os.truncate(self.path, len(data))  # works on a full disk too
        elif data.startswith(content) and content[-1:] in (b"", b"\n"):
            self.unwritten = records[len(parsed) :]
            with contextlib.suppress(OSError):  # tried again with the next record
                self.flush()
        else:
            write_atomically(self.path, data)
        return records

    def append(self, record: RoundRecord) -> None:
        """OSError if the record cannot be written now."""
        self.unwritten.append(record)
        self.flush()

    def flush(self) -> None:
        if not self.unwritten:
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if self._size_before is not None:  # an earlier partial line could not be removed
                os.ftruncate(handle, self._size_before)
            self._size_before = os.fstat(handle).st_size
            _write_all(handle, _to_lines(self.unwritten))
            self._size_before, self.unwritten = None, []
        finally:
            with contextlib.suppress(OSError):
                if self._size_before is not None:
                    os.ftruncate(handle, self._size_before)
            os.close(handle)


def read_records(file: Path) -> list[RoundRecord]:
    """The records of a run, finished or not; an unfinished last line does not count."""
    kept, repeated = drop_repeated(read_lines(file, parse_record, "the record of a round"))
    if repeated:
        warnings.warn(describe_repeated(file, repeated), stacklevel=2)
    return kept


def drop_repeated(records: Sequence[RoundRecord]) -> tuple[list[RoundRecord], int]:
    """The last record of each round, in order, and how many more there were: two jobs have written at once."""
    by_round = {record.round: record for record in records}
    return [by_round[index] for index in sorted(by_round)], len(records) - len(by_round)


def describe_repeated(file: Path, repeated: int) -> str:
    return f"{file} has {pluralize(repeated, 'round')} twice, as if two jobs had written at once; the last one counts"


def _to_lines(records: Sequence[RoundRecord]) -> bytes:
    return "".join(json.dumps(record.to_json()) + "\n" for record in records).encode()


def _write_all(handle: int, data: bytes) -> None:
    """The system may take only a part at a time."""
    while data:
        data = data[os.write(handle, data) :]
