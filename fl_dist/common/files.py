"""Files that are complete or absent."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fl_dist.common.errors import DataError

T = TypeVar("T")


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


def write_output(path: Path, text: str) -> int:
    """Write text for people, and create its folder; names of files in it may have bytes that are no text. The size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(text.encode("utf-8", "replace"))


def append_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    """Append JSON objects to a file, one per line, in one write."""
    data = "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def parse_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object, or None."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


def parse_lines(path: Path, parse: Callable[[bytes], T | None]) -> tuple[list[T], list[int]]:
    """What the lines of a file hold, and the numbers of lines that cannot be parsed; no lines if it does not exist.

    An unfinished last line does not count.
    """
    lines = read_file(path).splitlines(keepends=True) if path.exists() else []
    parsed = [(number, parse(line)) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]
    return [value for _, value in parsed if value is not None], [number for number, value in parsed if value is None]


def read_lines(path: Path, parse: Callable[[bytes], T | None], content: str) -> list[T]:
    """The same; DataError if a line is not what its file contains."""
    values, bad = parse_lines(path, parse)
    if bad:
        raise DataError(f"line {bad[0]} of {path} is not {content}: it was changed or damaged")
    return values
