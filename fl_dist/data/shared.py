"""Arrays that a machine holds once: made by the first process that needs them, in files that the others map.

They lie in FL_DIST_CACHE, or else in a folder of the user's own among the temporary files, which is local to a node of
most clusters. What is mapped counts once, however many ranks use it, and may be larger than memory. Where nothing can
be written, every process holds its own copy.
"""

import fcntl
import hashlib
import math
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fl_dist.common.paths import expand
from fl_dist.common.words import message, size

CACHE = "FL_DIST_CACHE"
VERSION = 1
"""Counts up when what is made of the same files changes."""
Arrays = dict[str, np.ndarray]
Allocate = Callable[[str, tuple[int, ...], type], np.ndarray]
"""Name, shape, kind of number: an array to be filled."""
Make = Callable[[Allocate], None]
MOST_ALONE = 4e9
"""Bytes that each process may hold on its own."""


_anew = False
"""Whether what is there is made again, for those who look for damage."""


@contextmanager
def anew() -> Iterator[None]:
    """Read the sources, whatever is there already."""
    global _anew
    _anew = True
    try:
        yield
    finally:
        _anew = False


class NoPlace(Exception):
    """The cache cannot be written."""


def arrays(kind: str, sources: Iterable[Path], settings: object, make: Make) -> Arrays:
    """What `make` fills, read-only in effect: by kind, settings, and the names, sizes and times of the sources."""
    name = f"{kind}-{_identity(kind, sources, settings)}"
    try:
        return _mapped(_made(cache(), name, make))
    except NoPlace as e:
        print(f"warning: {kind} is held by each process on its own: {e}; set {CACHE} to a folder", file=sys.stderr)
        return _in_memory(make)


def cache() -> Path:
    """The folder of all arrays, which is only this user's."""
    given = os.environ.get(CACHE)
    folder = expand(given) if given else Path(tempfile.gettempdir()) / f"fl_dist-{os.getuid()}"
    with _or_no_place(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat() if not given else folder.stat()
    # Anybody may have made a folder of that name among the temporary files.
    if not given and (not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise NoPlace(f"{folder} belongs to somebody else")
    return folder


def held() -> list[tuple[Path, int]]:
    """What lies in the cache, and its bytes."""
    with _or_no_place("the cache"):
        found = [entry for entry in sorted(cache().iterdir()) if entry.is_dir()]
        return [(entry, sum(file.stat().st_size for file in entry.iterdir())) for entry in found]


def forget() -> None:
    """Remove all of it; processes that have it mapped keep it until they end."""
    for entry, _ in held():
        with _locked(entry):
            shutil.rmtree(entry)


def _identity(kind: str, sources: Iterable[Path], settings: object) -> str:
    digest = hashlib.sha256(repr((VERSION, kind, settings)).encode())
    for source in sources:
        about = source.stat()
        digest.update(repr((str(source.resolve()), about.st_size, about.st_mtime_ns)).encode())
    return digest.hexdigest()[:16]


def _made(folder: Path, name: str, make: Make) -> Path:
    """The folder with the arrays of that name; whole or absent."""
    whole, new = folder / name, folder / f"{name}.new"
    if whole.is_dir() and not _anew:
        return whole
    with _locked(whole):
        if whole.is_dir() and not _anew:
            return whole
        with _or_no_place(folder):
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
        try:
            _fill(new, make)
            with _or_no_place(folder):
                shutil.rmtree(whole, ignore_errors=True)  # processes that have it mapped keep it
                new.rename(whole)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return whole


def _fill(folder: Path, make: Make) -> None:
    opened: list[np.memmap] = []

    def allocate(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        path = folder / f"{name}.npy"
        with _or_no_place(folder.parent):
            array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
            # A page for which there is no room would end the process: it is taken beforehand.
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        opened.append(array)
        return array

    make(allocate)
    with _or_no_place(folder.parent):
        for array in opened:
            array.flush()


def _mapped(folder: Path) -> Arrays:
    """Pages are shared until somebody writes to them, which nobody does."""
    try:
        return {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in folder.glob("*.npy")}
    except (OSError, ValueError) as e:
        raise ValueError(f"{folder} is damaged ({message(e)}); remove it") from None


def _in_memory(make: Make) -> Arrays:
    made: Arrays = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        if (needed := math.prod(shape) * np.dtype(dtype).itemsize) > MOST_ALONE:
            raise ValueError(f"{name} needs {size(needed)} in a file: set {CACHE} to a folder with room for it")
        made[name] = np.empty(shape, dtype)
        return made[name]

    make(allocate)
    return made


@contextmanager
def _locked(entry: Path) -> Iterator[None]:
    with _or_no_place(entry.parent):
        lock = os.open(entry.with_name(f"{entry.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with _or_no_place(entry.parent):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _or_no_place(where: object) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise NoPlace(f"{where} cannot be written ({message(e)})") from None
