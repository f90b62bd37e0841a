"""What `fl-dist sweep` does: show, submit or run the runs of a sweep that are not finished."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Annotated

import submitit
from pydantic import Field

from fl_dist.common.errors import ConfigError
from fl_dist.common.files import write_atomically
from fl_dist.common.formatting import pluralize
from fl_dist.common.yaml_reader import read_yaml
from fl_dist.config.sweeps import SweepRun, read_sweep
from fl_dist.config.validation import validate_mapping
from fl_dist.distributed.signals import EXIT_REQUEUE
from fl_dist.storage.folder_lock import is_locked
from fl_dist.storage.run_folder import RunFolder
from launch import cluster
from launch.pool import run_locally
from launch.run_status import Status, format_table, job_log, latest_log, read_queue, read_status
from launch.task import Task


class SweepResources(cluster.Resources):
    parallel: Annotated[int, Field(ge=1, description="runs at a time")] = 256


def sweep_command(arguments: argparse.Namespace) -> int:
    sweep, runs = read_sweep(arguments.sweep, arguments.overrides, arguments.only)
    for run in runs:
        run.command += ["--traceback"] if arguments.traceback else []
    resources = validate_mapping(SweepResources, sweep.resources, f"resources of {arguments.sweep}")
    profile = cluster.read_profile(arguments.profile, arguments.profiles)
    folder = runs[0].run.parent
    options = cluster.slurm_options(folder.name, resources, profile, resources.parallel)
    if arguments.status:
        print(format_table(read_statuses(runs)))
        return 0
    if arguments.dry_run:
        print("\n".join(f"{run.name}: fl-dist run {shlex.join(run.command)}" for run in runs))
        print(cluster.batch_script(folder / "jobs", options, len(runs)))
        return 0
    unstarted = _find_unstarted(runs)
    if not unstarted:
        return 0
    if arguments.local:
        code = run_locally(unstarted, resources.ranks_per_node, arguments.jobs)
        print(format_table(read_statuses(runs)))
        if code == EXIT_REQUEUE:
            print("interrupted; start the same command to resume")
        return code
    executor = cluster.create_executor(folder / "jobs", options, "--local")
    _submit(arguments.sweep, unstarted, executor, folder, resources.placement)
    return 0


def _find_unstarted(runs: list[SweepRun]) -> list[SweepRun]:
    """The runs that are neither finished nor active."""
    jobs, queue = _read_jobs(runs[0].run.parent), read_queue()
    unfinished = [run for run in runs if not RunFolder(run.run).is_finished(run.rounds)]
    unstarted = [run for run in unfinished if jobs.get(run.name) not in queue and not is_locked(run.run)]
    finished, active = len(runs) - len(unfinished), len(unfinished) - len(unstarted)
    print(f"{pluralize(len(runs), 'run')}: {finished} finished, {active} under way, {len(unstarted)} to start")
    return unstarted


def _submit(sweep: str, runs: list[SweepRun], executor: submitit.SlurmExecutor, folder: Path, placement: str) -> None:
    with cluster.submission(), executor.batch():
        jobs = [executor.submit(Task(run.command, str(run.run), run.rounds)) for run in runs]
    job_ids = {run.name: job.job_id for run, job in zip(runs, jobs, strict=True)}
    write_atomically(folder / "jobs.json", json.dumps(_read_jobs(folder) | job_ids, indent=1).encode())
    print(f"job      {jobs[0].job_id.split('_')[0]} (an array of {len(jobs)})")
    print(f"requests {placement}, each")
    print(f"runs     {folder}/")
    print(f"status   fl-dist sweep {sweep} --status")
    print(f"follow   tail -F {job_log(folder, jobs[0].job_id)}")


def _read_jobs(folder: Path) -> dict[str, str]:
    """The last Slurm job of each run."""
    file = folder / "jobs.json"
    jobs = read_yaml(file) if file.exists() else {}
    if not isinstance(jobs, dict) or not all(isinstance(job, str) for job in jobs.values()):
        raise ConfigError(f"{file} is not a list of jobs; restore it, or remove it once no run is in the queue")
    return jobs


def read_statuses(runs: list[SweepRun]) -> list[Status]:
    folder = runs[0].run.parent
    jobs, queue = _read_jobs(folder), read_queue()

    def status_of(run: SweepRun) -> Status:
        job = jobs.get(run.name)
        return read_status(run.name, run.run, run.rounds, queue.get(job or ""), latest_log(run.run, folder, job))

    return [status_of(run) for run in runs]
