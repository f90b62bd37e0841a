"""Run a grid or a list of configurations: as a Slurm job array, or here, a few at a time.

python -m launch.sweep SWEEP.yaml [--status | --local -j 2 | --dry-run] [--profile gpu]

Finished runs are skipped, unfinished ones resumed: the same command starts a sweep and goes on with it.
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds

import argparse
import itertools
import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fl_dist.common.imports import search_in
from fl_dist.common.paths import expand
from fl_dist.common.reading import ConfigError, read_yaml
from fl_dist.common.registry import Strict
from fl_dist.common.terminal import at_least
from fl_dist.common.words import shortened
from fl_dist.config.arguments import resolve
from fl_dist.storage.folder import RunFolder, write_atomically
from launch import cluster
from launch.node import BAD_CONFIG
from launch.pool import run_here
from launch.status import Status, locked, queue, status, table
from launch.task import Task

Change = dict[str, Any]
Changes = list[Change]
Labelled = tuple[str, Change]
MOST = 10_000
"""Runs of a sweep: each is validated before the first one starts."""
RESERVED = ("", ".", "..", "jobs", "jobs.json")
"""Names in a sweep's folder that no run can have."""
LONGEST_NAME = 200
"""Bytes of a run's name; file systems take 255."""


class Resources(cluster.Resources):
    parallel: Annotated[int, Field(ge=1, description="runs at a time")] = 256


class Sweep(Strict):
    base: Annotated[str | None, Field(description="config that all runs start from, beside the sweep's file")] = None
    name: str | None = None
    dir: Annotated[str | None, Field(description="folder of the runs (default runs/<name>)")] = None
    resources: Resources = Resources()
    grid: Annotated[dict[str, list[Any] | Change], Field(description="key: [values] or {label: value}")] = {}
    set: Annotated[Change, Field(description="values of keys, for all runs")] = {}
    list: Annotated[Changes, Field(description="one mapping of keys a run; label: its name")] = []


@dataclass
class Cell:
    name: str
    run: Path
    command: list[str]
    rounds: int


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        sweep, cells = read(arguments.sweep)
        for cell in cells:
            cell.command += ["--traceback"] if arguments.traceback else []
        profile = cluster.read_profile(arguments.profile, arguments.profiles)
        return _act(arguments, sweep, cells, profile)
    except (ValueError, OSError) as e:
        terminal.complain(e, e if arguments.traceback else None)
        return BAD_CONFIG


def parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog="python -m launch.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("sweep", metavar="SWEEP.yaml", help="keys: " + ", ".join(Sweep.model_fields))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="show how far the runs are")
    what.add_argument("--local", action="store_true", help="run here instead of submitting")
    what.add_argument("--dry-run", action="store_true", help="print the runs and the batch script")
    parser.add_argument(
        "-j", "--jobs", type=partial(at_least, 1), default=1, metavar="N", help="with --local: runs at a time"
    )
    cluster.add_options(parser)
    terminal.add_traceback(parser)
    return parser


def read(path: str) -> tuple[Sweep, list[Cell]]:
    """The sweep and its runs, every one of them validated."""
    sweep: Sweep = cluster.checked(Sweep, read_yaml(path), path)
    search_in(Path(path).parent)
    name = sweep.name or Path(path).stem
    folder = expand(sweep.dir or f"runs/{name}")
    base = [] if sweep.base is None else [os.path.relpath(Path(path).parent / expand(sweep.base))]
    common = {"monitor.wandb.group": name} | sweep.set
    cells = [_cell(label, folder, base, common | change) for label, change in _changes(sweep, path)]
    double = [name for name, count in Counter(cell.name for cell in cells).items() if count > 1]
    if double:
        raise ConfigError(f"{path}: several runs are named {min(double)}; give the values labels")
    return sweep, cells


def _cell(label: str, folder: Path, base: list[str], change: Change) -> Cell:
    overrides = [f"{key}={json.dumps(value)}" for key, value in change.items()]
    try:
        config, command = resolve([*base, *overrides, f"run.dir={folder / label}"])
    except ConfigError as e:
        raise ConfigError(f"run {label}: {e}") from e.__cause__
    return Cell(label, folder / label, command, config.rounds)


def _changes(sweep: Sweep, path: str) -> Iterator[Labelled]:
    """Every run's label and its changes: the list times the grid."""
    axes = [[_labelled(key, label, value) for label, value in _values(v)] for key, v in sweep.grid.items()]
    if sweep.list:
        axes.insert(0, [_listed(entry) for entry in sweep.list])
    if not axes or not all(axes):
        raise ConfigError(f"{path} names no run: give a grid or a list with values")
    if (runs := math.prod(map(len, axes))) > MOST:
        raise ConfigError(f"{path} names {runs:,} runs, more than {MOST:,}; divide it into several sweeps")
    for choice in itertools.product(*axes):
        change = dict(item for _, change in choice for item in change.items())
        yield _folder_name("-".join(label for label, _ in choice), path), change


def _folder_name(name: str, path: str) -> str:
    if name in RESERVED or len(os.fsencode(name)) > LONGEST_NAME:
        why = "is too long for" if name not in RESERVED else "cannot be"
        raise ConfigError(f"{path}: the name {shortened(repr(name))} {why} a folder; give the values labels")
    return name


def _values(values: Any) -> list[tuple[str | None, Any]]:
    return list(values.items()) if isinstance(values, dict) else [(None, value) for value in values]


def _labelled(key: str, label: str | None, value: Any) -> Labelled:
    *_, last = key.split(".")
    text = value if isinstance(value, str) else json.dumps(value)
    return _safe(label or (text if last == "name" else last + text)), {key: value}


def _listed(entry: Change) -> Labelled:
    change = {key: value for key, value in entry.items() if key != "label"}
    return _safe(str(entry.get("label") or "-".join(_labelled(k, None, v)[0] for k, v in change.items()))), change


def _safe(label: str) -> str:
    """A label that can be the name of a folder."""
    return "".join(c if c.isalnum() or c in "._+" else "_" for c in label)


def _act(arguments: argparse.Namespace, sweep: Sweep, cells: list[Cell], profile: cluster.Profile) -> int:
    folder = cells[0].run.parent
    if arguments.status:
        print(table(statuses(cells)))
        return 0
    if arguments.dry_run:
        print("\n".join(f"{cell.name}: python -m fl_dist.main {shlex.join(cell.command)}" for cell in cells))
        print(cluster.batch_script(folder / "jobs", _options(sweep, folder, profile)))
        return 0
    todo = _unfinished(cells)
    if not todo:
        return 0
    if arguments.local:
        code = run_here([(cell.name, cell.run, cell.command) for cell in todo], sweep.resources.tasks, arguments.jobs)
        print(table(statuses(cells)))
        return code
    if not cluster.have_slurm():
        raise ValueError("no sbatch on the PATH: submit from a login node, or run here with --local")
    return _submit(arguments.sweep, todo, cluster.executor(folder / "jobs", _options(sweep, folder, profile)), folder)


def _options(sweep: Sweep, folder: Path, profile: cluster.Profile) -> cluster.Options:
    return cluster.options(folder.name, sweep.resources, profile, sweep.resources.parallel)


def _unfinished(cells: list[Cell]) -> list[Cell]:
    """The runs that are neither finished nor under way."""
    jobs, queued = _jobs(cells[0].run.parent), queue()
    finished = [cell for cell in cells if RunFolder(cell.run).finished(cell.rounds)]
    active = [c for c in cells if c not in finished and (jobs.get(c.name) in queued or locked(c.run))]
    todo = [cell for cell in cells if cell not in finished and cell not in active]
    print(f"{len(cells)} runs: {len(finished)} finished, {len(active)} under way, {len(todo)} to start")
    return todo


def _submit(path: str, todo: list[Cell], executor: Any, folder: Path) -> int:
    with executor.batch():
        jobs = [executor.submit(Task(cell.command, str(cell.run), cell.rounds)) for cell in todo]
    started = {cell.name: job.job_id for cell, job in zip(todo, jobs, strict=True)}
    write_atomically(folder / "jobs.json", json.dumps(_jobs(folder) | started, indent=1).encode())
    print(f"job      {jobs[0].job_id.split('_')[0]} (an array of {len(jobs)})")
    print(f"runs     {folder}/")
    print(f"status   python -m launch.sweep {path} --status")
    print(f"follow   tail -F {log_of(folder, started[todo[0].name])}")
    return 0


def _jobs(folder: Path) -> dict[str, str]:
    """The last Slurm job of each run."""
    file = folder / "jobs.json"
    jobs = read_yaml(file) if file.exists() else {}
    if not isinstance(jobs, dict) or not all(isinstance(job, str) for job in jobs.values()):
        raise ConfigError(f"{file} is not a list of jobs; restore it, or remove it once no run is in the queue")
    return jobs


def log_of(folder: Path, job: str) -> Path:
    return folder / "jobs" / f"{job}_0_log.out"


def statuses(cells: list[Cell]) -> list[Status]:
    folder = cells[0].run.parent
    jobs, queued = _jobs(folder), queue()
    return [status(c.name, c.run, c.rounds, queued.get(jobs.get(c.name, "")), _log(c, jobs)) for c in cells]


def _log(cell: Cell, jobs: dict[str, str]) -> Path | None:
    """Where the latest attempt wrote: the job's log or that of a local start."""
    logs = [cell.run / "logs" / "launch.log"]
    if cell.name in jobs:
        logs.append(log_of(cell.run.parent, jobs[cell.name]))
    return max((log for log in logs if log.exists()), key=lambda log: log.stat().st_mtime, default=None)


if __name__ == "__main__":
    sys.exit(main())
