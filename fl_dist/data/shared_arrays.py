"""Arrays that a machine stores once: built by the first process that needs them, in files that the others map.

They are in FL_DIST_CACHE, or else in the user's folder below the temporary folder, which is local to a node on
most clusters. Mapped pages count once, however many ranks use them, and may be larger than memory. Where nothing can
be written, every process keeps its own copy.
"""

import fcntl
import hashlib
import logging
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fl_dist.common.errors import DataError, FlDistError, error_message
from fl_dist.common.formatting import format_bytes
from fl_dist.common.paths import expand_path

log = logging.getLogger(__name__)

CACHE_VARIABLE = "FL_DIST_CACHE"
VERSION = 1  # increases when the arrays built from the same files change
MAX_PRIVATE_BYTES = 4e9  # of an array that each process keeps for itself

Arrays = dict[str, np.ndarray]
Allocate = Callable[[str, tuple[int, ...], type], np.ndarray]
"""Name, shape and type of an array to be filled."""
Build = Callable[[Allocate], None]

_must_rebuild = False


@contextmanager
def rebuild() -> Iterator[None]:
    """Read the sources again, whatever is in the cache: to find damage in them."""
    global _must_rebuild
    _must_rebuild = True
    try:
        yield
    finally:
        _must_rebuild = False


class CacheError(FlDistError):
    """The cache cannot be written."""


def load_or_build(kind: str, sources: Iterable[Path], settings: object, build: Build) -> Arrays:
    """The arrays that `build` fills, for one kind, settings, and names, sizes and times of the sources."""
    name = f"{kind}-{_cache_key(kind, sources, settings)}"
    try:
        return _map_arrays(_build_once(cache_folder(), name, build))
    except CacheError as e:
        log.warning("every process keeps its own copy of %s: %s; set %s to a writable folder", kind, e, CACHE_VARIABLE)
        return _build_in_memory(build)


def cache_folder() -> Path:
    """The folder of all arrays, which only this user may write."""
    setting = os.environ.get(CACHE_VARIABLE)
    folder = expand_path(setting) if setting else Path(tempfile.gettempdir()) / f"fl_dist-{os.getuid()}"
    with _raise_cache_error(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat() if setting else folder.lstat()
    # Anybody can create a folder of that name in the temporary folder.
    if not setting and (not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise CacheError(f"{folder} belongs to another user, or others may write to it")
    return folder


def list_cache() -> list[tuple[Path, int]]:
    """The entries of the cache, and their bytes."""
    with _raise_cache_error("the cache"):
        entries = [entry for entry in sorted(cache_folder().iterdir()) if entry.is_dir()]
        return [(entry, sum(file.stat().st_size for file in entry.iterdir())) for entry in entries]


def clear_cache() -> None:
    """Remove all entries; processes that have them mapped keep them until they end."""
    for entry, _ in list_cache():
        with _lock(entry):
            shutil.rmtree(entry)


def _cache_key(kind: str, sources: Iterable[Path], settings: object) -> str:
    digest = hashlib.sha256(repr((VERSION, kind, settings)).encode())
    for source in sources:
        status = source.stat()
        digest.update(repr((str(source.resolve()), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()[:16]


def _build_once(folder: Path, name: str, build: Build) -> Path:
    """The folder with the arrays of that name; complete or absent."""
    entry, staging = folder / name, folder / f"{name}.new"
    if entry.is_dir() and not _must_rebuild:
        return entry
    with _lock(entry):
        if entry.is_dir() and not _must_rebuild:
            return entry
        with _raise_cache_error(folder):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
        try:
            _build_files(staging, build)
            with _raise_cache_error(folder):
                shutil.rmtree(entry, ignore_errors=True)  # processes that have it mapped keep it
                staging.rename(entry)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return entry


def _build_files(folder: Path, build: Build) -> None:
    arrays: list[np.memmap] = []

    def allocate(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        path = folder / f"{name}.npy"
        with _raise_cache_error(folder.parent):
            arrays.append(np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape))
            # Writing to a page without disk space would kill the process, so space is reserved first.
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return arrays[-1]

    build(allocate)
    with _raise_cache_error(folder.parent):
        for array in arrays:
            array.flush()


def _map_arrays(folder: Path) -> Arrays:
    """Copy on write: pages are shared, for nobody writes to them."""
    try:
        return {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in folder.glob("*.npy")}
    except (OSError, ValueError) as e:
        raise DataError(f"{folder} is damaged ({error_message(e)}); remove it") from None


def _build_in_memory(build: Build) -> Arrays:
    arrays: Arrays = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        if (size := math.prod(shape) * np.dtype(dtype).itemsize) > MAX_PRIVATE_BYTES:
            raise DataError(
                f"{name} needs a file of {format_bytes(size)}: set {CACHE_VARIABLE} to a folder with space for it"
            )
        arrays[name] = np.empty(shape, dtype)
        return arrays[name]

    build(allocate)
    return arrays


@contextmanager
def _lock(entry: Path) -> Iterator[None]:
    with _raise_cache_error(entry.parent):
        lock = os.open(entry.with_name(f"{entry.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with _raise_cache_error(entry.parent):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _raise_cache_error(path: object) -> Iterator[None]:
    """Turn an OSError into a CacheError."""
    try:
        yield
    except OSError as e:
        raise CacheError(f"{path} cannot be written ({error_message(e)})") from None
