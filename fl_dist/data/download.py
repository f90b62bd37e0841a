"""Download published data: resumed after a break, checked against its checksum, extracted completely or not at all."""

import hashlib
import logging
import shutil
import sys
import urllib.error
import urllib.request
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast

from tqdm import tqdm

from fl_dist.common.archives import CHUNK_BYTES, extract
from fl_dist.common.errors import DataError, error_message
from fl_dist.common.formatting import format_bytes, suggest
from fl_dist.data.download_sources import SOURCES, File, Source

log = logging.getLogger(__name__)
WORK_FOLDER = ".fetch"  # below root, per data set: incomplete files
READ_TIMEOUT_SECONDS = 60.0
RESUME_HINT = "run the same command again to resume"


def download(name: str, root: Path, overwrite: bool = False) -> None:
    """Download the data set of that name into the folder below root where its reader looks for it."""
    source = get_source(name)
    work, folder = root / WORK_FOLDER / name, root / source.folder
    if not source.files:
        raise DataError(f"{source.title} has to be downloaded by hand: {source.page}; put it into {folder}")
    work.mkdir(parents=True, exist_ok=True)
    for file in source.files:
        if not overwrite and _is_installed(file, folder):
            log.info("%s: already there (--again downloads it again)", file.name)
            continue
        archive = _download_and_verify(file, work)
        _install(archive, folder, work, overwrite)
        archive.unlink(missing_ok=True)
    log.info("%s is in %s", source.title, folder)


def get_source(name: str) -> Source:
    if name not in SOURCES:
        raise DataError(f"unknown data set {name!r}; {suggest(name, SOURCES)}")
    return SOURCES[name]


def _is_installed(file: File, folder: Path) -> bool:
    """Downloaded before, or copied here by hand."""
    entries = file.contents or (file.name,)
    return all((folder / entry).exists() or (folder / entry.removesuffix(".gz")).exists() for entry in entries)


def _download_and_verify(file: File, work: Path) -> Path:
    path, part = work / file.name, work / f"{file.name}.part"
    if not path.exists():
        _download(file, part)
        part.rename(path)
    if (md5 := _md5(path)) != file.md5:
        path.unlink()
        raise DataError(f"{file.url} is not what was published: its md5 is {md5}, not {file.md5}; it was removed")
    return path


def _download(file: File, part: Path) -> None:
    size = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={size}-"} if size else {})  # noqa: S310
    try:
        response = cast(HTTPResponse, urllib.request.urlopen(request, timeout=READ_TIMEOUT_SECONDS))  # noqa: S310
        with closing(response):
            size = size if response.status == 206 else 0
            total = int(response.headers["Content-Length"] or 0) + size
            resumed = f", {format_bytes(size)} of them already there" if size else ""
            log.info("%s: %s%s", file.name, format_bytes(total), resumed)
            _save(response, part, size, total)
    except urllib.error.HTTPError as e:
        if e.code == 416 and size:  # nothing is left to send
            return
        raise DataError(f"cannot download {file.url}: {e.code} {e.reason}") from None
    except (OSError, HTTPException) as e:
        reason = e.reason if isinstance(e, urllib.error.URLError) else e
        raise DataError(f"cannot download {file.url}: {error_message(str(reason))}; {RESUME_HINT}") from None
    if part.stat().st_size < total:
        raise DataError(f"{file.url} broke off after {format_bytes(part.stat().st_size)}; {RESUME_HINT}")


def _save(response: HTTPResponse, part: Path, size: int, total: int) -> None:
    with (
        open(part, "ab" if size else "wb") as out,
        tqdm(total=total or None, initial=size, unit="B", unit_scale=True, leave=False,
             disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar,
    ):  # fmt: skip
        while chunk := response.read(CHUNK_BYTES):
            out.write(chunk)
            bar.update(len(chunk))


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _install(archive: Path, folder: Path, work: Path, overwrite: bool) -> None:
    """Move the contents of an archive, or the file itself, into the folder."""
    staging = work / f"{archive.name}.new"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        if archive.name.endswith((".tar.gz", ".tgz", ".zip")):
            log.info("%s: extracting", archive.name)
            extract(archive, staging)
        else:
            shutil.copyfile(archive, staging / archive.name)
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(entry.name for entry in staging.iterdir())
        if existing := [folder / name for name in names if (folder / name).exists() and not overwrite]:
            raise DataError(f"{existing[0]} exists already; --again replaces it")
        for name in names:
            _replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(entry: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
    entry.rename(target)
