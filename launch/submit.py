"""Submit a run to Slurm through submitit: it is requeued when it is interrupted, and resumes.

python -m launch.submit CONFIG.yaml [key.sub=value ...] --nodes 2 --gpus-per-node 8 --profile gpu
"""

from fl_dist.common import terminal

if __name__ == "__main__":
    terminal.prepare()  # here, for the imports below take seconds
    terminal.say_starting()

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import submitit

from fl_dist.common.reading import ConfigError
from fl_dist.common.words import counted
from fl_dist.config.arguments import resolve
from fl_dist.machine.signals import REQUEUE
from fl_dist.storage.folder import RunFolder
from launch import cluster
from launch.devices import visible_gpus
from launch.node import BAD_CONFIG, node_folder
from launch.status import reason
from launch.task import Task


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        return _submit(arguments)
    except (ValueError, OSError) as e:
        terminal.complain(e, e if arguments.traceback else None)
        return BAD_CONFIG


def parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog="python -m launch.submit", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", metavar="CONFIG key.sub=value", help="as for python -m fl_dist.main")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        help="one rank a GPU (default 0: ranks on the CPU; with --local: the GPUs that are visible)",
    )
    parser.add_argument("--tasks-per-node", type=int, help="ranks a node (default: the GPUs, or 3)")
    parser.add_argument("--name", help="name of the job (default: that of the run folder)")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and stop")
    parser.add_argument("--local", action="store_true", help="run it here, through submitit's local executor")
    cluster.add_options(parser)
    terminal.add_traceback(parser)
    return parser


def _submit(arguments: argparse.Namespace) -> int:
    config, command = resolve(arguments.what)
    gpus = _gpus_here(arguments.gpus_per_node, config.topology.device) if arguments.local else []
    resources = cluster.described(arguments, len(gpus))
    profile = cluster.read_profile(arguments.profile, arguments.profiles)
    folder = RunFolder(str(config.run.dir))
    folder.refuse_finished(config.rounds)
    run = folder.path
    command += ["--traceback"] if arguments.traceback else []
    options = cluster.options(arguments.name or run.name, resources, profile)
    if arguments.dry_run:
        print(cluster.batch_script(run / "jobs", options))
        return 0
    if arguments.local:
        task = Task(command, str(run), config.rounds, os.getpid())
        return _run_here(task, resources, gpus, config.checkpoint.grace)
    if not cluster.have_slurm():
        raise ValueError("no sbatch on the PATH: submit from a login node, or run here with --local or launch.local")
    job = cluster.executor(run / "jobs", options).submit(Task(command, str(run), config.rounds))
    _describe(job, resources, run, f"scancel {job.job_id}")
    return 0


def _gpus_here(wanted: int | None, device: str) -> list[str]:
    """So many of those that are visible; all of them, if nobody said how many."""
    found = visible_gpus("auto" if wanted else device)
    if wanted is not None and wanted > len(found):
        raise ConfigError(f"--gpus-per-node is {wanted}, but {counted(len(found), 'GPU')} can be seen here")
    return found[:wanted]


def _describe(job: submitit.Job, resources: cluster.Resources, run: Path, cancel: str) -> None:
    print(f"job      {job.job_id}")
    print(f"asks     {resources.placed}")
    print(f"run      {run}/")
    print(f"follow   tail -F {job.paths.stdout}")
    print(f"cancel   {cancel}", flush=True)


def _run_here(task: Task, resources: cluster.Resources, gpus: list[str], grace: float) -> int:
    run = RunFolder(task.run_dir)
    with node_folder() as node, node.passing_signals_on():
        job = _started(task, resources.tasks, gpus, run.path)
        _describe(job, resources, run.path, f"kill {os.getpid()}")
        job.wait()
        node.end(grace)
        failed = not node.stopped and job.exception() is not None
        code = node.code(failed, run.finished(task.rounds))
    if code == REQUEUE:
        print("interrupted; start the same command to resume")
    elif code:
        terminal.complain(reason(job.paths.stdout) or "the run failed; see its log")
    return code


def _started(task: Task, tasks: int, gpus: list[str], run: Path) -> submitit.Job:
    executor = submitit.LocalExecutor(folder=run / "jobs")
    executor.update_parameters(tasks_per_node=tasks, timeout_min=60 * 24 * 365, stderr_to_stdout=True)
    # submitit hides the others from its tasks; it asks for numbers, but parts of GPUs have names.
    executor.parameters |= {"gpus_per_node": len(gpus), "visible_gpus": tuple(gpus)}
    # The terminal's Ctrl-C reaches submitit's process too, which would kill the ranks while they save.
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor.submit(task)
    finally:
        signal.signal(signal.SIGINT, old)


if __name__ == "__main__":
    sys.exit(main())
