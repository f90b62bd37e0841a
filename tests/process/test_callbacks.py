"""Callbacks on real ranks: the guide in an empty folder; early stopping on any layout and after kills."""

import sys
from pathlib import Path

import pytest

from tests.support.marks import exhaustive
from tests.support.processes import environment, run
from tests.support.run_folder import model_hash, read_records, reproducible_records
from tests.support.user_guide import CALLBACKS, follow_guide, install_package

CALLBACK_LIST = "best_model, {early_stopping: {target: 0.25, patience: 4}}"
SETTINGS = (
    *("rounds=12", "data=digits", "model={name: mlp, hidden: [8]}", "clients={total: 6, per_round: 3}", "seed=2"),
    *("local={epochs: 1, lr: 0.1}", "monitor.wandb.mode=disabled", "algorithm=scaffold"),
    f"callbacks=[{CALLBACK_LIST}]",
)

NEVER_CLOSES = """
import time
from fl_dist import Callback

class NeverCloses(Callback):
    def on_round_end(self, record, context):
        raise ValueError("no answer")

    def close(self):
        time.sleep(3600)
"""


def test_the_guide_works_from_an_empty_folder_in_one_process_and_on_three_ranks(tmp_path: Path) -> None:
    installed, workspace = tmp_path / "installed", tmp_path / "workspace"
    install_package(tmp_path / "source", installed)
    workspace.mkdir()
    follow_guide(workspace, installed, CALLBACKS)
    runs = workspace / "runs"
    assert model_hash(runs / "watched") == model_hash(runs / "ranks")
    progress = (runs / "watched" / "progress.txt").read_text()
    assert progress == (runs / "ranks" / "progress.txt").read_text() and len(progress.splitlines()) == 6
    assert len(read_records(runs / "stopped")) < 40 and (runs / "stopped" / "best.safetensors").exists()


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    code, output = run([sys.executable, "-m", "fl_dist.main", *SETTINGS, f"run.dir={folder}"])
    assert code == 0 and "stopped         after round" in output, output
    assert len(read_records(folder)) < 12
    return folder


def assert_same_stop(folder: Path, other: Path) -> None:
    assert model_hash(folder) == model_hash(other) and reproducible_records(folder) == reproducible_records(other)
    assert (folder / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()


@pytest.mark.parametrize("layout", ["dedicated", "shared"])
def test_a_run_stops_in_the_same_round_on_any_layout(layout: str, single_process: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.local", "-n", "3", *SETTINGS, f"topology.server={layout}"]
    code, output = run([*command, f"callbacks=[tensorboard, {CALLBACK_LIST}]", f"run.dir={tmp_path / 'run'}"])
    assert code == 0, output
    assert_same_stop(single_process, tmp_path / "run")
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


def test_a_callback_that_never_closes_does_not_hide_why_a_job_failed(tmp_path: Path) -> None:
    """As one whose disk does not answer."""
    (tmp_path / "my_callbacks.py").write_text(NEVER_CLOSES)
    command = [sys.executable, "-m", "launch.local", "-n", "2", *SETTINGS, f"run.dir={tmp_path / 'run'}"]
    code, output = run([*command, "callbacks=['my_callbacks:NeverCloses']"], cwd=tmp_path)
    assert code == 1 and "callback my_callbacks:NeverCloses failed in on_round_end: ValueError: no answer" in output


@exhaustive
@pytest.mark.parametrize("point", ["broadcast", "server", "save-written", "save-switched"])
def test_a_run_stops_in_the_same_round_after_any_interruption(point: str, single_process: Path, tmp_path: Path) -> None:
    """Kill the run each time it passes the point and restart it until it finishes."""
    command = [sys.executable, "-m", "launch.local", "-n", "2", *SETTINGS, f"run.dir={tmp_path / 'run'}"]
    for count in range(len(read_records(single_process)) + 2, 0, -1):
        code, output = run(command, env=environment(FL_DIST_FAULT=f"{point}:{count}"))
        if code == 0:
            break
    else:
        code, output = run(command)
    assert code == 0, output
    assert_same_stop(single_process, tmp_path / "run")
