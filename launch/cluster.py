"""Resources and cluster profiles, and the submitit executor that they make."""

import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Annotated, Any

import submitit
from pydantic import Field, ValidationError

from fl_dist.config import ConfigError, read_yaml
from fl_dist.registry import Strict, nearest

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


def checked(schema: type[Any], given: Any, where: str) -> Any:
    """A mapping from a file, validated; the error names the key and the file."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must be a mapping of keys, not {type(given).__name__}")
    try:
        return schema.model_validate(given)
    except ValidationError as e:
        error = e.errors()[0]
        key = ".".join(map(str, error["loc"]))
        if error["type"] == "extra_forbidden":
            raise ConfigError(f"unknown key {key} in {where}; {nearest(key, list(schema.model_fields))}") from None
        raise ConfigError(f"{where}: {key}: {error['msg'].lower()}, got {error['input']!r}") from None


def read_profile(name: str | None, file: str | Path) -> Profile:
    if name is None:
        return Profile()
    profiles = read_yaml(file)
    if not isinstance(profiles, dict) or name not in profiles:
        names = list(profiles) if isinstance(profiles, dict) else []
        raise ConfigError(f"no profile {name!r} in {file}; {nearest(name, names)}")
    return checked(Profile, profiles[name] or {}, f"profile {name} of {file}")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--profile", help="cluster profile: partition, account, limits, set-up lines")
    parser.add_argument(
        "--profiles", default=PROFILES, metavar="FILE", help="YAML file of profiles (default %(default)s)"
    )


def executor(folder: Path, name: str, resources: Resources, profile: Profile, parallel: int = 256) -> Any:
    """A Slurm executor; nothing is submitted yet."""
    made = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=RESTARTS)
    made.update_parameters(
        name=name,
        nodes=resources.nodes,
        tasks_per_node=resources.tasks,
        cpus_per_task=profile.cpus_per_task,
        timeout_min=max(1, round(60 * (resources.hours or profile.hours))),
        stderr_to_stdout=True,
        slurm_signal_delay_s=profile.signal_seconds,
        slurm_srun_args=["--kill-on-bad-exit=1"],
        slurm_array_parallelism=parallel,
        slurm_setup=profile.setup or None,
        **_given(resources, profile),
    )
    return made


def _given(resources: Resources, profile: Profile) -> dict[str, Any]:
    """Options that sbatch gets only if they are set."""
    options = {
        "gpus_per_node": resources.gpus_per_node,
        "mem_gb": profile.memory_gb,
        "slurm_additional_parameters": {"requeue": True} | profile.sbatch,
        **{f"slurm_{key}": getattr(profile, key) for key in ("partition", "account", "constraint", "qos")},
    }
    return {key: value for key, value in options.items() if value}


def batch_script(made: Any) -> str:
    """The script that would be submitted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = made._executor
        return str(inner._make_submission_file_text(inner._submitit_command_str, "dry-run"))


def have_slurm() -> bool:
    return bool(submitit.SlurmExecutor.affinity() > 0)


def described(arguments: Namespace) -> Resources:
    given = {"nodes": arguments.nodes, "gpus_per_node": arguments.gpus_per_node}
    return checked(Resources, given | {"tasks_per_node": arguments.tasks_per_node}, "the command line")
