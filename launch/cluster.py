"""Resources and cluster profiles, and the submitit executor that they make."""

import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Annotated, Any

import submitit
from pydantic import Field

from fl_dist.common.paths import expand
from fl_dist.common.reading import ConfigError, read_yaml
from fl_dist.common.registry import Strict
from fl_dist.common.words import nearest
from fl_dist.config.loading import checked
from launch.devices import placed

Options = dict[str, Any]
PROFILES = Path(__file__).parent / "profiles.yaml"
RESTARTS = 1000
"""Requeues after a time limit: a run saves before each, so any number makes progress."""


class Profile(Strict):
    """What is particular to a cluster."""

    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    qos: str | None = None
    hours: Annotated[float, Field(gt=0)] = 24.0
    cpus_per_task: Annotated[int, Field(ge=1)] = 2
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    signal_seconds: Annotated[int, Field(ge=1)] = 180
    setup: list[str] = []
    sbatch: dict[str, Any] = {}


class Resources(Strict):
    """What a run asks for: one task a GPU, or tasks_per_node without GPUs."""

    nodes: Annotated[int, Field(ge=1)] = 1
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    tasks_per_node: Annotated[int, Field(ge=1)] | None = None
    hours: Annotated[float, Field(gt=0)] | None = None

    @property
    def tasks(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 3

    @property
    def placed(self) -> str:
        return placed(self.tasks, self.gpus_per_node, self.nodes)


def read_profile(name: str | None, file: str | Path) -> Profile:
    if name is None:
        return Profile()
    profiles = read_yaml(expand(file))
    if not isinstance(profiles, dict) or name not in profiles:
        names = list(profiles) if isinstance(profiles, dict) else []
        raise ConfigError(f"no profile {name!r} in {file}; {nearest(name, names)}")
    return checked(Profile, profiles[name] or {}, f"profile {name} of {file}")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--profile", help="cluster profile: partition, account, limits, set-up lines")
    parser.add_argument(
        "--profiles", default=PROFILES, metavar="FILE", help="YAML file of profiles (default %(default)s)"
    )


def options(name: str, resources: Resources, profile: Profile, parallel: int = 256) -> Options:
    """What submitit is to ask of Slurm, in Slurm's words."""
    given = {
        "gpus_per_node": resources.gpus_per_node,
        "mem": None if profile.memory_gb is None else f"{round(1024 * profile.memory_gb)}M",
        "setup": profile.setup,
        **{key: getattr(profile, key) for key in ("partition", "account", "constraint", "qos")},
    }
    return {
        "job_name": name,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks,
        "cpus_per_task": profile.cpus_per_task,
        "time": max(1, round(60 * (resources.hours or profile.hours))),
        "stderr_to_stdout": True,
        "signal_delay_s": profile.signal_seconds,
        # srun no longer takes the number of CPUs over from the job.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={profile.cpus_per_task}"],
        "array_parallelism": parallel,
        "additional_parameters": {"requeue": True} | profile.sbatch,
        **{key: value for key, value in given.items() if value},
    }


def executor(folder: Path, options: Options) -> submitit.SlurmExecutor:
    """A Slurm executor; nothing is submitted yet."""
    made = submitit.SlurmExecutor(folder=folder, max_num_timeout=RESTARTS)
    made.update_parameters(**options)
    return made


class Draft(submitit.SlurmExecutor):
    """Only writes batch scripts, and so needs no Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def batch_script(folder: Path, options: Options) -> str:
    """The script that would be submitted."""
    draft = Draft(folder=folder)
    draft.update_parameters(**options)
    return str(draft._make_submission_file_text(draft._submitit_command_str, "dry-run"))


def have_slurm() -> bool:
    return shutil.which("sbatch") is not None


def described(arguments: Namespace, gpus: int = 0) -> Resources:
    """What the command line asks for; so many GPUs, if it does not say."""
    asked = arguments.gpus_per_node
    given = {"nodes": arguments.nodes, "gpus_per_node": gpus if asked is None else asked}
    return checked(Resources, given | {"tasks_per_node": arguments.tasks_per_node}, "the command line")
