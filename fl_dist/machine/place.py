"""This process's place among the ranks of a job, as torchrun or Slurm's srun says it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

REMEDY = "start ranks with torchrun, launch.local or srun, or unset the variable to run in one process"
PORTS = range(20000, 30000)
"""Where the ranks of a Slurm job meet: jobs that share a node, and steps of one job, hardly collide."""


class BadPlace(ValueError):
    """Variables of the environment that do not make sense as a rank."""


@dataclass(frozen=True)
class Place:
    rank: int
    size: int
    local_rank: int
    local_size: int
    """Ranks on this node."""
    host: str
    port: int
    """Where the ranks meet: an address of rank 0's node."""
    launched: bool = field(default=False, compare=False)
    """A launcher watches over this rank, which ends with it; a rank that a shell started may outlive the shell."""

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def find(environ: Mapping[str, str] = os.environ) -> Place | None:
    """What the environment says; None for a process that runs alone."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _of_torchrun(environ)
    # Only srun counts its tasks: a batch script itself is no rank, whatever its job asked for.
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1, default=1) > 1:
        return _of_srun(environ)
    return None


def port_of(job: int, step: int = 0) -> int:
    """Neighbouring numbers are those of jobs that run at the same time: steps go far from them."""
    return PORTS[(job + 3571 * step) % len(PORTS)]


def _of_torchrun(environ: Mapping[str, str]) -> Place:
    size = _number(environ, "WORLD_SIZE", 1)
    rank = _number(environ, "RANK", 0, size - 1)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, size, default=size)
    return Place(
        rank,
        size,
        _number(environ, "LOCAL_RANK", 0, local_size - 1, default=rank % local_size),
        local_size,
        environ.get("MASTER_ADDR") or "127.0.0.1",
        _number(environ, "MASTER_PORT", 1, 65535),
        launched="TORCHELASTIC_RUN_ID" in environ,
    )


def _of_srun(environ: Mapping[str, str]) -> Place:
    size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    tasks = _tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    local_size = tasks[_number(environ, "SLURM_NODEID", 0, len(tasks) - 1, default=0)]
    job, step = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_STEP_ID", 0, default=0)
    return Place(
        _number(environ, "SLURM_PROCID", 0, size - 1),
        size,
        _number(environ, "SLURM_LOCALID", 0, local_size - 1),
        local_size,
        _first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        port_of(job, step),
        launched=True,
    )


def _number(
    environ: Mapping[str, str], name: str, low: int, high: int | None = None, default: int | None = None
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise BadPlace(f"{name} is not set, but other variables of a distributed job are: {REMEDY}")
    if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
        wanted = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise BadPlace(f"the environment variable {name} is {text!r}, not a number {wanted}: {REMEDY}")
    return int(text)


def _tasks(text: str) -> list[int]:
    """Tasks of each node, from Slurm's way to write them: 4(x2),3."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in runs for _ in range(int(nodes or 1))]


def _first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: n[03-07,12],m1 begins with n03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes
