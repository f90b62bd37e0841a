"""Run a sweep, such as the table of a paper: as a Slurm job array, or here, a few runs at a time.

python -m launch.sweep SWEEP.yaml [key.sub=value ...] [--only FedGMT] [--status | --local -j 2 | --dry-run]

Finished runs are skipped, unfinished ones resumed: the same command starts a sweep and goes on with it.
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds
    terminal.say_starting()

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fl_dist.common.reading import ConfigError, read_yaml
from fl_dist.common.terminal import at_least
from fl_dist.common.words import counted
from fl_dist.config.loading import checked
from fl_dist.config.sweeps import Cell, Sweep, read
from fl_dist.machine.signals import REQUEUE
from fl_dist.storage.folder import RunFolder, locked, write_atomically
from launch import cluster
from launch.node import BAD_CONFIG
from launch.pool import run_here
from launch.status import Status, queue, status, table
from launch.task import Task


class Resources(cluster.Resources):
    parallel: Annotated[int, Field(ge=1, description="runs at a time")] = 256


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        sweep, cells = read(arguments.sweep, arguments.overrides, arguments.only)
        for cell in cells:
            cell.command += ["--traceback"] if arguments.traceback else []
        resources = checked(Resources, sweep.resources, f"resources of {arguments.sweep}")
        profile = cluster.read_profile(arguments.profile, arguments.profiles)
        return _act(arguments, resources, cells, profile)
    except (ValueError, OSError) as e:
        terminal.complain(e, e if arguments.traceback else None)
        return BAD_CONFIG


def parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog="python -m launch.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("sweep", metavar="SWEEP.yaml", help="keys: " + ", ".join(Sweep.model_fields))
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="for all runs, after all else")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only runs of this name or label (may be given again)",
    )
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


def _act(arguments: argparse.Namespace, resources: Resources, cells: list[Cell], profile: cluster.Profile) -> int:
    folder = cells[0].run.parent
    if arguments.status:
        print(table(statuses(cells)))
        return 0
    if arguments.dry_run:
        print("\n".join(f"{cell.name}: python -m fl_dist.main {shlex.join(cell.command)}" for cell in cells))
        print(cluster.batch_script(folder / "jobs", _options(resources, folder, profile)))
        return 0
    todo = _unfinished(cells)
    if not todo:
        return 0
    if resources.nodes * resources.tasks == 1 and any(cell.config.topology.server == "dedicated" for cell in todo):
        raise ConfigError(
            f"{arguments.sweep}: one task leaves no worker beside the server; set topology.server: shared"
        )
    if arguments.local:
        code = run_here(todo, resources.tasks, arguments.jobs)
        print(table(statuses(cells)))
        if code == REQUEUE:
            print("the same command goes on from here")
        return code
    if not cluster.have_slurm():
        raise ValueError("no sbatch on the PATH: submit from a login node, or run here with --local")
    executor = cluster.executor(folder / "jobs", _options(resources, folder, profile))
    return _submit(arguments.sweep, todo, executor, folder, resources.placed)


def _options(resources: Resources, folder: Path, profile: cluster.Profile) -> cluster.Options:
    return cluster.options(folder.name, resources, profile, resources.parallel)


def _unfinished(cells: list[Cell]) -> list[Cell]:
    """The runs that are neither finished nor under way."""
    jobs, queued = _jobs(cells[0].run.parent), queue()
    finished = [cell for cell in cells if RunFolder(cell.run).finished(cell.rounds)]
    active = [c for c in cells if c not in finished and (jobs.get(c.name) in queued or locked(c.run))]
    todo = [cell for cell in cells if cell not in finished and cell not in active]
    print(f"{counted(len(cells), 'run')}: {len(finished)} finished, {len(active)} under way, {len(todo)} to start")
    return todo


def _submit(path: str, todo: list[Cell], executor: Any, folder: Path, placed: str) -> int:
    with executor.batch():
        jobs = [executor.submit(Task(cell.command, str(cell.run), cell.rounds)) for cell in todo]
    started = {cell.name: job.job_id for cell, job in zip(todo, jobs, strict=True)}
    write_atomically(folder / "jobs.json", json.dumps(_jobs(folder) | started, indent=1).encode())
    print(f"job      {jobs[0].job_id.split('_')[0]} (an array of {len(jobs)})")
    print(f"asks     {placed}, each")
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
