"""Promise: the same bits with every optimiser, on any number of workers and after a kill."""

import signal
from pathlib import Path

import pytest

from fl_dist.main import main
from tests.support.checkpoints import run_forked_main
from tests.support.harness import synchronous_checkpoints
from tests.support.processes import NO_WANDB, run_ranks
from tests.support.run_folder import assert_same_run
from tests.support.user_guide import OPTIMIZERS, follow_guide, install_package, write_files

SMALL = """
rounds: 6
partition: iid
model: {name: mlp, hidden: [8]}
clients: {total: 5, schedule: [[0, 1], [2, 3], [0, 2], [0, 3], [4, 1, 2], [1, 3]]}
local: {epochs: 1, batch_size: 64, lr: 0.01}
"""
"""Two clients of some cohorts trained on one worker before: the variables of one of them have to move."""
CASES = {
    "adamw": ("local.optimizer=adamw", "local.schedule={name: linear, warmup: 2}", "algorithm=fedsam"),
    "kept adamw": (
        "local.optimizer={name: adamw, keep: client}",
        "local.schedule=cosine",
        "server.schedule={name: step, milestones: [2]}",
        "algorithm={name: scaffold, control: gradients}",
    ),
    "kept momentum": ("local.optimizer={name: sgd, keep: client}", "algorithm=fedavg"),
    "kept lion": ("local.optimizer={name: mine:Lion, keep: client}", "algorithm=fedgmt"),
}


@pytest.mark.parametrize("name", CASES)
def test_any_layout_and_a_kill_give_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    """Clients move between workers and, after the kill, to another number of them."""
    write_files(tmp_path, OPTIMIZERS)
    (tmp_path / "small.yaml").write_text(SMALL)

    def arguments(folder: str) -> list[str]:
        return [str(tmp_path / "small.yaml"), *NO_WANDB, *CASES[name], f"run.dir={tmp_path / folder}"]

    assert main(arguments("one")) == 0
    codes, outputs = run_ranks(3, arguments("three"))
    assert not any(codes), outputs
    with synchronous_checkpoints():
        assert run_forked_main("server:4", arguments("killed")) == -signal.SIGKILL
    codes, outputs = run_ranks(3, arguments("killed"))
    assert not any(codes) and "resuming after round" in outputs[0], outputs
    assert_same_run(tmp_path / "three", tmp_path / "one")
    assert_same_run(tmp_path / "killed", tmp_path / "one")


def test_the_guide_works_from_an_empty_folder(tmp_path: Path) -> None:
    installed, workspace = tmp_path / "installed", tmp_path / "workspace"
    install_package(tmp_path / "source", installed)
    workspace.mkdir()
    follow_guide(workspace, installed, OPTIMIZERS)
    models = {(workspace / "runs" / name / "model.safetensors").read_bytes() for name in ("kept", "lion", "polynomial")}
    assert len(models) == 3
