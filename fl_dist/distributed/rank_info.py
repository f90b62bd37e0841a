"""This process's rank in its job, from the environment variables of torchrun or Slurm's srun."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_dist.common.errors import UserError

REMEDY = "start ranks with torchrun, launch.local or srun, or unset the variable to run in one process"
PORTS = range(20000, 30000)
"""For the rendezvous of a Slurm job: so many that jobs that share a node, and steps of one job, rarely collide."""


class RankInfoError(UserError):
    """Environment variables that do not describe a rank."""


@dataclass(frozen=True)
class RankInfo:
    rank: int
    size: int
    local_rank: int
    local_size: int
    """Ranks on this node."""
    host: str
    port: int
    """Of the rendezvous, on rank 0's node."""
    has_launcher: bool = field(default=False, compare=False)
    """Whether this rank ends with the process that started it; a rank started by a shell may outlive the shell."""

    @property
    def is_single_node(self) -> bool:
        return self.local_size == self.size

    def to_environment(self) -> dict[str, str]:
        """The variables from which `find_rank` reads it, as torchrun sets them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


SINGLE_PROCESS = RankInfo(0, 1, 0, 1, "127.0.0.1", 0)


def find_rank(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """The rank of this process; None for a process that runs alone."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _read_torchrun(environ)
    # Only srun sets the number of tasks of a step: a batch script is not a rank, whatever its job requests.
    if "SLURM_PROCID" in environ and _read_number(environ, "SLURM_STEP_NUM_TASKS", 1, default=1) > 1:
        return _read_srun(environ)
    return None


def is_rank0(rank_info: RankInfo | None) -> bool:
    """Whether this process prints for all; one that runs alone does."""
    return rank_info is None or rank_info.rank == 0


def rendezvous_port(job: int, step: int = 0) -> int:
    """Jobs that run at the same time have neighbouring numbers, so steps are placed far from them."""
    return PORTS[(job + 3571 * step) % len(PORTS)]


def _read_torchrun(environ: Mapping[str, str]) -> RankInfo:
    size = _read_number(environ, "WORLD_SIZE", 1)
    rank = _read_number(environ, "RANK", 0, size - 1)
    local_size = _read_number(environ, "LOCAL_WORLD_SIZE", 1, size, default=size)
    if local_size < size:
        _check_restarts(environ)
    return RankInfo(
        rank,
        size,
        _read_number(environ, "LOCAL_RANK", 0, local_size - 1, default=rank % local_size),
        local_size,
        environ.get("MASTER_ADDR") or "127.0.0.1",
        _read_number(environ, "MASTER_PORT", 1, 65535),
        has_launcher="TORCHELASTIC_RUN_ID" in environ,
    )


def _check_restarts(environ: Mapping[str, str]) -> None:
    """torchrun's attempts may share one store, and its agents on several nodes number the attempts differently."""
    has_shared_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_shared_store and _read_number(environ, "TORCHELASTIC_MAX_RESTARTS", 0, default=0):
        raise RankInfoError(
            "torchrun with --max-restarts on several nodes: restarted ranks would read what the previous ones left; "
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node and use --rdzv-backend=c10d, or use launch.local"
        )


def _read_srun(environ: Mapping[str, str]) -> RankInfo:
    size = _read_number(environ, "SLURM_STEP_NUM_TASKS", 1)
    tasks = _parse_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    local_size = tasks[_read_number(environ, "SLURM_NODEID", 0, len(tasks) - 1, default=0)]
    job, step = _read_number(environ, "SLURM_JOB_ID", 0), _read_number(environ, "SLURM_STEP_ID", 0, default=0)
    return RankInfo(
        _read_number(environ, "SLURM_PROCID", 0, size - 1),
        size,
        _read_number(environ, "SLURM_LOCALID", 0, local_size - 1),
        local_size,
        _first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        rendezvous_port(job, step),
        has_launcher=True,
    )


def _read_number(
    environ: Mapping[str, str], name: str, low: int, high: int | None = None, default: int | None = None
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise RankInfoError(f"{name} is not set, but other variables of a distributed job are: {REMEDY}")
    if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise RankInfoError(f"the environment variable {name} is {text!r}, not a number {bounds}: {REMEDY}")
    return int(text)


def _parse_tasks(text: str) -> list[int]:
    """Tasks of each node, from Slurm's notation: 4(x2),3."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]


def _first_host(nodes: str) -> str:
    """The first node of Slurm's list: n03 of n[03-07,12],m1."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else nodes
