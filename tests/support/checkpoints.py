"""A small run that saves each round, ways to interrupt it, and what its checkpoints hold."""

import json
import os
from pathlib import Path

import pytest

from fl_dist.machine import faults
from fl_dist.main import main
from fl_dist.storage.checkpoint import Save, newest
from tests.support.harness import saving_at_once
from tests.support.processes import QUIET

SETTINGS = (
    *QUIET,
    "rounds=6",
    "model={name: mlp, hidden: [16]}",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "clients={total: 8, per_round: 3}",
    "local={epochs: 1, batch_size: 32, lr: 0.05, momentum: 0.0}",
    "algorithm.name=fedgmt",
)


def arguments(folder: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"run.dir={folder}", *more]


def forked(folder: Path, fault: str, *more: str) -> int:
    """Run in a child process that ends itself at the fault; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            faults.point = faults.armed(fault)
            os._exit(main(arguments(folder, *more)))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train_undisturbed(folder: Path) -> Path:
    """Every round is saved, however fast the disk is."""
    with saving_at_once():
        assert main(arguments(folder)) == 0
    return folder


def newest_of(folder: Path) -> Save:
    found = newest(folder / "checkpoint", json.loads((folder / "run.json").read_text())["id"], pytest.fail)
    assert found is not None
    return found


def replaced_by_a_file(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.touch()
