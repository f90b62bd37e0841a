"""Download what is published: resumed where it stopped, checked against its checksum, extracted whole or not at all."""

import hashlib
import json
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import IO, cast

from tqdm import tqdm

from fl_dist.common.words import message, nearest, size
from fl_dist.data.sources import SOURCES, File, Source

WORKPLACE = ".fetch"
"""Below root, for each data set: what is not whole yet, and a record of what is."""
RECORD = "fetched.json"
BLOCK = 1 << 20
PATIENCE = 60.0
"""Seconds without a byte."""


def fetch(name: str, root: Path, again: bool = False) -> None:
    """The data set of that name below root, where its reader looks for it."""
    source = known(name)
    if not source.files:
        raise ValueError(f"{source.title} has to be fetched by hand: {source.page}; put it into {root / source.folder}")
    work, folder = root / WORKPLACE / name, root / source.folder
    work.mkdir(parents=True, exist_ok=True)
    record = _record(work)
    for file in source.files:
        if not again and _is_there(file, folder, record):
            print(f"{file.name}: there already (--again fetches it anew)")
            continue
        archive = _downloaded(file, work)
        record[file.md5] = _place(archive, folder, work, again)
        (work / RECORD).write_text(json.dumps(record, indent=1))
        archive.unlink(missing_ok=True)
    print(f"{source.title} is in {root / source.folder}")


def _is_there(file: File, folder: Path, record: dict[str, list[str]]) -> bool:
    """Fetched before, or brought here by hand."""
    placed = record.get(file.md5) or [file.holds or file.name]
    return all((folder / entry).exists() or (folder / entry.removesuffix(".gz")).exists() for entry in placed)


def known(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}; {nearest(name, SOURCES)}")
    return SOURCES[name]


def _record(work: Path) -> dict[str, list[str]]:
    """By md5: the entries that a file brought."""
    try:
        record = json.loads((work / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _downloaded(file: File, work: Path) -> Path:
    """The whole file, checked."""
    whole, part = work / file.name, work / f"{file.name}.part"
    if not whole.exists():
        _download(file, part)
        part.rename(whole)
    found = _md5(whole)
    if found != file.md5:
        whole.unlink()
        raise ValueError(f"{file.url} is not what was published: its md5 is {found}, not {file.md5}; it was removed")
    return whole


def _download(file: File, part: Path) -> None:
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={done}-"} if done else {})  # noqa: S310
    try:
        with closing(cast(HTTPResponse, urllib.request.urlopen(request, timeout=PATIENCE))) as answer:  # noqa: S310
            resumed = answer.status == 206
            total = int(answer.headers["Content-Length"] or 0) + (done if resumed else 0)
            print(f"{file.name}: {size(total)}" + (f", of which {size(done)} are there" if resumed else ""), flush=True)
            _save(answer, part, done if resumed else 0, total)
    except urllib.error.HTTPError as e:
        if e.code == 416 and done:  # nothing is left to send
            return
        raise ValueError(f"cannot fetch {file.url}: {e.code} {e.reason}") from None
    except (OSError, HTTPException) as e:
        reason = e.reason if isinstance(e, urllib.error.URLError) else e
        raise ValueError(
            f"cannot fetch {file.url}: {message(str(reason))}; the same command goes on from here"
        ) from None
    if total and part.stat().st_size < total:
        raise ValueError(f"{file.url} broke off after {size(part.stat().st_size)}; the same command goes on from here")


def _save(answer: HTTPResponse, part: Path, done: int, total: int) -> None:
    with (
        open(part, "ab" if done else "wb") as out,
        tqdm(total=total or None, initial=done, unit="B", unit_scale=True, leave=False,
             disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar,
    ):  # fmt: skip
        while block := answer.read(BLOCK):
            out.write(block)
            bar.update(len(block))


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # what the publishers give
    with open(file, "rb") as data:
        while block := data.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _place(archive: Path, folder: Path, work: Path, again: bool) -> list[str]:
    """What an archive holds, or the file itself, into its folder; the names of its entries there."""
    new = work / f"{archive.name}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        if archive.name.endswith((".tar.gz", ".tgz", ".zip")):
            _extract(archive, new)
        else:
            shutil.copyfile(archive, new / archive.name)
        folder.mkdir(parents=True, exist_ok=True)
        entries = sorted(new.iterdir())
        for entry in entries:
            if (folder / entry.name).exists() and not again:
                raise ValueError(f"{folder / entry.name} is there already; --again replaces it")
        for entry in entries:
            _move(entry, folder / entry.name)
        return [entry.name for entry in entries]
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _move(entry: Path, place: Path) -> None:
    if place.exists():
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
    entry.rename(place)


def _extract(archive: Path, folder: Path) -> None:
    """Plain files below the folder: nothing outside of it, no links, no devices."""
    print(f"{archive.name}: extracting", flush=True)
    try:
        for name, content in _files(archive):
            place = folder / _inside(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place, "wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, EOFError) as e:
        raise ValueError(f"{archive.name} cannot be extracted: {message(e)}") from None


def _files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if not entry.is_dir() and entry.external_attr >> 28 != 0xA:  # a symbolic link
                    with packed.open(entry) as content:
                        yield entry.filename, content
        return
    with tarfile.open(archive) as tape:
        for member in tape:
            if member.isfile() and (data := tape.extractfile(member)):
                with data:
                    yield member.name, data


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise tarfile.TarError(f"it holds {name}, which lies outside")
    return path
