"""A small run with a checkpoint per round: interrupt it and read its checkpoints."""

import json
import os
from pathlib import Path

import pytest

from fl_dist.distributed import fault_injection
from fl_dist.main import main
from fl_dist.storage.checkpoint import Checkpoint, newest_checkpoint
from tests.support.harness import synchronous_checkpoints
from tests.support.processes import NO_WANDB

SETTINGS = (
    *NO_WANDB,
    "rounds=6",
    "model={name: mlp, hidden: [16]}",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "clients={total: 8, per_round: 3}",
    "local={epochs: 1, batch_size: 32, lr: 0.05, momentum: 0.0}",
    "algorithm.name=fedgmt",
)


def arguments(folder: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"run.dir={folder}", *more]


def run_forked(folder: Path, fault: str, *more: str) -> int:
    """The small run in a child process that kills itself at the fault; return its exit status."""
    return run_forked_main(fault, arguments(folder, *more))


def run_forked_main(fault: str, arguments: list[str]) -> int:
    """Any run in such a process."""
    child = os.fork()
    if child == 0:
        try:
            fault_injection.point = fault_injection.parse_faults(fault)
            os._exit(main(arguments))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train_undisturbed(folder: Path) -> Path:
    """Train without faults, with a checkpoint of every round however slow the disk is."""
    with synchronous_checkpoints():
        assert main(arguments(folder)) == 0
    return folder


def read_newest(folder: Path) -> Checkpoint:
    newest = newest_checkpoint(folder / "checkpoint", json.loads((folder / "run.json").read_text())["id"], pytest.fail)
    assert newest is not None
    return newest


def replace_by_file(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.touch()
