"""The records of a sweep's runs as one file, from which tables, plots and reports can be made without the runs."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fl_dist.common import archives
from fl_dist.common.errors import ConfigError
from fl_dist.common.files import read_file
from fl_dist.common.paths import expand_path
from fl_dist.results.collect import Collection
from fl_dist.storage.run_folder import CLIENTS, CONFIG, DIAGNOSTICS, METRICS, RUN_INFO, SUMMARY

SUFFIX = ".tar.xz"
KEPT_FILES = (CONFIG, RUN_INFO, METRICS, DIAGNOSTICS, SUMMARY, CLIENTS)
"""No models, no checkpoints, no logs, no names of hosts."""


def write_archive(collection: Collection, file: Path) -> bool:
    """The runs that have a record, each as a folder of its name; False: none has, and no file is written."""
    kept = [run for run in collection.runs if run.records]
    paths = {f"{run.name}/{name}": run.path / name for run in kept for name in KEPT_FILES}
    if kept:
        archives.pack({name: read_file(path) for name, path in paths.items() if path.exists()}, file)
    return bool(kept)


def check_archive_name(file: Path) -> None:
    if not file.name.endswith(SUFFIX):
        raise ConfigError(f"{file}: the name of an archive ends in {SUFFIX}")


@contextmanager
def open_archives(names: Sequence[str]) -> Iterator[list[Path]]:
    """A temporary folder with the runs of each archive; its name is the archive's."""
    files = [expand_path(name) for name in names]
    for file in files:
        check_archive_name(file)
        if not file.exists():
            raise ConfigError(f"{file} does not exist")
    with tempfile.TemporaryDirectory(prefix="fl_dist-") as temporary:
        folders = [Path(temporary, str(position), file.name) for position, file in enumerate(files)]
        for file, folder in zip(files, folders, strict=True):
            archives.extract(file, folder)
        yield folders
