"""Files that are complete or absent."""

import contextlib
import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from fl_dist.common.errors import DataError


def sync_folder(path: str | Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: str | Path, data: bytes, durable: bool = True) -> None:
    """Replace a file by a rename; `durable`: sync its bytes to disk before, and its name afterwards."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, 0o644)
            if durable:
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(e, OSError):  # that of a full disk names no file
            e.filename = os.fspath(path)
        raise
    if durable:
        sync_folder(folder or os.curdir)


def check_regular(path: str | Path) -> None:
    """OSError if it is a pipe or a device: reading it might never end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # reading a folder fails by itself
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_file(path: Path) -> bytes:
    """The bytes of a regular file."""
    check_regular(path)
    return path.read_bytes()


def append_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    """Append JSON objects to a file, one per line, in one write."""
    data = "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of such a file, none if it does not exist; an unfinished last line does not count."""
    lines = read_file(path).splitlines(keepends=True) if path.exists() else []
    return [_parse_line(path, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(line)
        if isinstance(entry, dict):
            return entry
    raise DataError(f"line {number} of {path} is not a JSON object: it was changed or damaged")
