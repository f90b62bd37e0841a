"""Archives of plain files: what is extracted stays below its folder and is nothing but files."""

import io
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from fl_dist.common.errors import DataError, error_message
from fl_dist.common.files import write_atomically

CHUNK_BYTES = 1 << 20


def extract(archive: Path, folder: Path) -> None:
    """Plain files below the folder: nothing outside of it, no links, no devices."""
    try:
        for name, content in _iter_files(archive):
            target = folder / _check_member_path(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as file:
                shutil.copyfileobj(content, file, CHUNK_BYTES)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, LZMAError, OSError, EOFError) as e:
        raise DataError(f"{archive.name} cannot be extracted: {error_message(e)}") from None


def pack(files: Mapping[str, bytes], archive: Path) -> None:
    """A .tar.xz of these files by name; the same files give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar_file:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            tar_file.addfile(member, io.BytesIO(files[name]))
    write_atomically(archive, buffer.getvalue())


def _iter_files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zip_file:
            for entry in zip_file.infolist():
                if not entry.is_dir() and entry.external_attr >> 28 != 0xA:  # a symbolic link
                    with zip_file.open(entry) as content:
                        yield entry.filename, content
        return
    with tarfile.open(archive) as tar_file:
        for member in tar_file:
            if member.isfile() and (data := tar_file.extractfile(member)):
                with data:
                    yield member.name, data


def _check_member_path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise tarfile.TarError(f"it contains {name}, which is outside of its folder")
    return path
