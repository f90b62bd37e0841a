"""The runs of the command line, in groups; those whose files have changed are read again."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from fl_dist.common.errors import ConfigError
from fl_dist.plots.base import distinct_names
from fl_dist.report.run_reader import Fingerprint, RunSnapshot, file_fingerprint, read_run, run_fingerprint
from fl_dist.results.collect import Collection, collect
from fl_dist.results.run_result import RunResult
from fl_dist.storage.run_folder import CONFIG, find_runs


@dataclass
class RunGroup:
    """The runs of one sweep, or of all folders."""

    collection: Collection
    runs: list[RunSnapshot]
    published: Path | None

    def cell(self, row: str, column: str) -> list[RunSnapshot]:
        return [run for run in self.runs if (run.result.row, run.result.column) == (row, column)]


class RunSource:
    """The runs of the command line; reading them again reads only what has changed."""

    def __init__(
        self,
        words: Sequence[str],
        only: Sequence[str] = (),
        published: str | None = None,
        archives: Sequence[Path] = (),
    ) -> None:
        """`archives`: folders to read the runs of the sweep from, instead of their own."""
        self._only, self._published = list(only), published
        sweeps, self._folders = _split_arguments(words)
        if archives and (self._folders or len(sweeps) != 1):
            raise ConfigError("an archive has the runs of one sweep; name its file alone")
        self._sweeps = [collect(sweep, self._only, archives=archives) for sweep in sweeps]
        self._folder_runs: tuple[Fingerprint, Collection] | None = None
        self._snapshots: dict[Path, RunSnapshot] = {}

    def fingerprint(self) -> Fingerprint:
        paths = [*(run.path for sweep in self._sweeps for run in sweep.runs), *self._find_folder_runs()]
        return tuple((path, run_fingerprint(path)) for path in paths)

    def groups(self) -> list[RunGroup]:
        collections = [*self._sweeps, *([self._collect_folders()] if self._folders else [])]
        paths = dict.fromkeys(run.path for collection in collections for run in collection.runs)
        names = dict(zip(paths, distinct_names(paths), strict=True))
        return [self._group(collection, names) for collection in collections]

    def _find_folder_runs(self) -> list[Path]:
        return [run for folder in self._folders for run in find_runs(Path(folder))]

    def _collect_folders(self) -> Collection:
        """Again only if runs or their configurations have changed."""
        fingerprint = tuple((run, file_fingerprint(run / CONFIG)) for run in self._find_folder_runs())
        if self._folder_runs is None or self._folder_runs[0] != fingerprint:
            self._folder_runs = fingerprint, collect(self._folders, self._only, lenient=True)
        return self._folder_runs[1]

    def _group(self, collection: Collection, names: Mapping[Path, str]) -> RunGroup:
        runs = [self._snapshot(run, names[run.path]) for run in collection.runs]
        collection = replace(collection, runs=[run.result for run in runs])
        return RunGroup(collection, runs, collection.published_file(self._published))

    def _snapshot(self, run: RunResult, name: str) -> RunSnapshot:
        fingerprint = run_fingerprint(run.path)
        snapshot = self._snapshots.get(run.path)
        if snapshot is None or snapshot.fingerprint != fingerprint:
            snapshot = self._snapshots[run.path] = read_run(replace(run), name, fingerprint)
        result = copy(snapshot.result)  # with its cached properties, unlike dataclasses.replace
        result.row, result.column = run.row, run.column
        return replace(snapshot, name=name, result=result)


def _split_arguments(words: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Sweeps, each with its overrides, and folders."""
    sweeps: list[list[str]] = []
    folders: list[str] = []
    for word in words:
        path = Path(word)
        if "=" in word and not path.exists():
            (sweeps[-1] if sweeps else folders).append(word)
        elif path.is_dir() or not path.suffix:
            folders.append(word)
        else:
            sweeps.append([word])
    return sweeps, folders
