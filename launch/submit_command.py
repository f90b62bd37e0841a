"""What `fl-dist submit` does: submit a run through submitit, or run it here as Slurm would."""

import argparse
import os
import signal
from pathlib import Path

import submitit

from fl_dist.common import terminal
from fl_dist.common.errors import ConfigError
from fl_dist.common.formatting import pluralize
from fl_dist.config.arguments import resolve_arguments
from fl_dist.config.validation import validate_mapping
from fl_dist.distributed.signals import EXIT_REQUEUE, handle_signals
from fl_dist.storage.run_folder import RunFolder
from launch import cluster
from launch.devices import visible_gpus
from launch.node import create_node
from launch.run_status import failure_reason
from launch.task import DoctorTask, Task

DOCTOR_HOURS = 0.25
"""Time limit of a job that only checks; short jobs start sooner."""


def submit_command(arguments: argparse.Namespace) -> int:
    config, command = resolve_arguments(arguments.run_arguments)
    gpus = _select_gpus(arguments.gpus_per_node, config.topology.device) if arguments.local else []
    resources = _parse_resources(arguments, len(gpus))
    profile = cluster.read_profile(arguments.profile, arguments.profiles)
    folder = RunFolder(str(config.run.dir))
    run = folder.path
    if "%a" in str(run):
        raise ConfigError(f"run.dir is {run}; Slurm and submitit replace %a in names of files: choose another name")
    command += ["--traceback"] if arguments.traceback else []
    options = cluster.slurm_options(arguments.name or run.name, resources, profile)
    if arguments.dry_run:
        print(cluster.batch_script(run / "jobs", options))
        return 0
    if not arguments.doctor:
        folder.check_not_finished(config.rounds)
    if arguments.local:
        task = Task(command, str(run), config.rounds, os.getpid())
        return _run_locally(task, resources, gpus, config.checkpoint.grace)
    rank = DoctorTask(command) if arguments.doctor else Task(command, str(run), config.rounds)
    executor = cluster.create_executor(run / "jobs", options, "--local or launch.local")
    with cluster.submission():
        job = executor.submit(rank)
    _print_job(job, resources, run, f"scancel {job.job_id}")
    return 0


def _select_gpus(count: int | None, device: str) -> list[str]:
    """So many of the visible GPUs; all of them by default."""
    gpus = visible_gpus("auto" if count else device)
    if count is not None and count > len(gpus):
        raise ConfigError(f"--gpus-per-node is {count}, but only {pluralize(len(gpus), 'GPU')} can be seen here")
    return gpus[:count]


def _parse_resources(arguments: argparse.Namespace, visible: int) -> cluster.Resources:
    values = {key: getattr(arguments, key) for key in ("nodes", "gpus_per_node", "tasks_per_node")}
    if values["gpus_per_node"] is None:
        values["gpus_per_node"] = visible
    if arguments.doctor:
        values["hours"] = DOCTOR_HOURS
    return validate_mapping(cluster.Resources, values, "the command line")


def _print_job(job: submitit.Job[None], resources: cluster.Resources, run: Path, cancel: str) -> None:
    print(f"job      {job.job_id}")
    print(f"requests {resources.placement}")
    print(f"run      {run}/")
    print(f"follow   tail -F {job.paths.stdout}")
    print(f"cancel   {cancel}", flush=True)


def _run_locally(task: Task, resources: cluster.Resources, gpus: list[str], grace_seconds: float) -> int:
    run = RunFolder(task.run_dir)
    with create_node() as node:
        job = _start_locally(task, resources.ranks_per_node, gpus, run.path)
        _print_job(job, resources, run.path, f"kill {os.getpid()}")
        job.wait()
        node.terminate(grace_seconds)
        has_failed = not node.is_stopping and job.exception() is not None
        code = node.exit_code(has_failed, run.is_finished(task.rounds))
    if code == EXIT_REQUEUE:
        print("interrupted; start the same command to resume")
    elif code:
        terminal.print_error(failure_reason(job.paths.stdout) or "the run failed; see its log")
    return code


def _start_locally(task: Task, ranks: int, gpus: list[str], run: Path) -> submitit.Job[None]:
    executor = submitit.LocalExecutor(folder=run / "jobs")
    executor.update_parameters(tasks_per_node=ranks, timeout_min=60 * 24 * 365, stderr_to_stdout=True)
    # submitit hides the other GPUs from its tasks; its own option takes numbers, but MIG devices have names.
    executor.parameters |= {"gpus_per_node": len(gpus), "visible_gpus": tuple(gpus)}
    # The terminal's Ctrl-C also reaches submitit's process, which would kill the ranks while they save.
    with handle_signals(signal.SIG_IGN, [signal.SIGINT]):
        return executor.submit(task)
