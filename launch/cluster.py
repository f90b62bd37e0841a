"""Resources and cluster profiles, and the submitit executor for them."""

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import submitit
from pydantic import Field
from submitit.core.utils import FailedJobError

from fl_dist.common.errors import ConfigError, UserError
from fl_dist.common.formatting import suggest
from fl_dist.common.paths import expand_path
from fl_dist.common.registry import StrictModel
from fl_dist.common.yaml_reader import read_yaml
from fl_dist.config.validation import validate_mapping
from launch.devices import describe_placement

Options = dict[str, Any]
MAX_REQUEUES = 1000
"""Requeues after a time limit; each follows a save, so a run makes progress however many there are."""
MEMORY_GB_PER_GPU = 16
"""Requested unless a profile says how much: a cluster's default may be too little for pinned memory."""


class Profile(StrictModel):
    """What jobs of a cluster have in common."""

    partition: Annotated[str | None, Field(description="Slurm partition")] = None
    account: Annotated[str | None, Field(description="Slurm account")] = None
    constraint: Annotated[str | None, Field(description="required features of the nodes")] = None
    qos: Annotated[str | None, Field(description="quality of service")] = None
    hours: Annotated[float, Field(gt=0, description="time limit of a job")] = 24.0
    cpus_per_task: Annotated[int, Field(ge=1, description="CPU cores per rank")] = 2
    memory_gb: Annotated[float | None, Field(gt=0, description="memory per node in GB (default: 16 per GPU)")] = None
    signal_seconds: Annotated[
        int, Field(ge=1, description="seconds before the time limit at which the run saves and is requeued")
    ] = 180
    setup: Annotated[list[str], Field(description="lines of the batch script before the ranks start")] = []
    sbatch: Annotated[dict[str, Any], Field(description="any other option of sbatch")] = {}


class Resources(StrictModel):
    """What a run requests: one task per GPU, or tasks_per_node without GPUs."""

    nodes: Annotated[int, Field(ge=1, description="nodes per run")] = 1
    gpus_per_node: Annotated[int, Field(ge=0, description="GPUs per node, one rank each; 0: ranks on the CPU")] = 0
    tasks_per_node: Annotated[int | None, Field(ge=1, description="ranks per node (default: its GPUs, or 3)")] = None
    hours: Annotated[float | None, Field(gt=0, description="time limit (default: the profile's)")] = None

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 3

    @property
    def placement(self) -> str:
        return describe_placement(self.ranks_per_node, self.gpus_per_node, self.nodes)


def read_profile(name: str | None, file: str | Path) -> Profile:
    if name is None:
        return Profile()
    profiles = read_yaml(expand_path(file))
    if not isinstance(profiles, dict) or name not in profiles:
        names = list(profiles) if isinstance(profiles, dict) else []
        raise ConfigError(f"no profile {name!r} in {file}; {suggest(name, names)}")
    return validate_mapping(Profile, profiles[name] or {}, f"profile {name} of {file}")


def slurm_options(name: str, resources: Resources, profile: Profile, max_parallel: int = 256) -> Options:
    """submitit's parameters, which have Slurm's names."""
    names_memory = any(option.startswith("mem") for option in profile.sbatch)
    memory_gb = profile.memory_gb or (0 if names_memory else MEMORY_GB_PER_GPU * resources.gpus_per_node)
    optional = {
        "gpus_per_node": resources.gpus_per_node,
        "mem": f"{round(1024 * memory_gb)}M" if memory_gb else None,
        "setup": profile.setup,
        **{key: getattr(profile, key) for key in ("partition", "account", "constraint", "qos")},
    }
    return {
        "job_name": name,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.ranks_per_node,
        "cpus_per_task": profile.cpus_per_task,
        "time": max(1, round(60 * (resources.hours or profile.hours))),
        "stderr_to_stdout": True,
        "signal_delay_s": profile.signal_seconds,
        # srun does not inherit the number of CPUs from the job.
        "srun_args": ["--kill-on-bad-exit=1", "--wait=0", f"--cpus-per-task={profile.cpus_per_task}"],
        "array_parallelism": max_parallel,
        "additional_parameters": {"requeue": True} | profile.sbatch,
        **{key: value for key, value in optional.items() if value},
    }


def create_executor(folder: Path, options: Options, remedy: str) -> submitit.SlurmExecutor:
    """A Slurm executor; nothing is submitted yet."""
    if shutil.which("sbatch") is None:
        raise UserError(f"no sbatch on the PATH: submit from a login node, or run here with {remedy}")
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=MAX_REQUEUES)
    executor.update_parameters(**options)
    return executor


@contextlib.contextmanager
def submission() -> Iterator[None]:
    """Within it jobs are submitted; what sbatch refuses is the user's to change."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
            yield
    except FailedJobError as e:
        reasons = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(e).splitlines()]
        raise UserError(
            f"sbatch refused the job: {'; '.join(reasons) or 'it gave no reason'}; "
            "--dry-run shows its script, profiles.yaml has partition, account and limits"
        ) from e


class _ScriptWriter(submitit.SlurmExecutor):
    """Writes batch scripts without an installed Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def batch_script(folder: Path, options: Options, runs: int = 1) -> str:
    """The script that would be submitted; several runs are an array."""
    writer = _ScriptWriter(folder=folder)
    writer.update_parameters(**options)
    writer.parameters |= {"map_count": runs} if runs > 1 else {}
    return str(writer._make_submission_file_text(writer._submitit_command_str, "dry-run"))
