"""Files that are complete or absent."""

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


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
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(folder or os.curdir)


def append_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    """Append JSON objects to a file, one per line, in one write."""
    data = "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()
    with open(path, "ab", buffering=0) as file:
        file.write(data)
