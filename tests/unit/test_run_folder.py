"""`run.json`, also of older run folders; links and pipes in a run folder; the classification of storage errors."""

import json
import os
from pathlib import Path

import pytest

from fl_dist.common.errors import ConfigError, FlDistError, UserError
from fl_dist.common.yaml_reader import read_yaml, to_yaml
from fl_dist.config import validate
from fl_dist.main import main
from fl_dist.storage import folder_lock
from fl_dist.storage.checkpoint import CheckpointFailedError, CorruptCheckpointError
from fl_dist.storage.checkpoint_files import create_folder
from fl_dist.storage.folder_lock import FolderInUseError, FolderLostError
from fl_dist.storage.run_folder import RUN_INFO, RunFolder
from tests.support.processes import NO_WANDB

SMALL_RUN = ["rounds=1", "model=mlp", "clients={total: 2, per_round: 1}", "local.epochs=1", *NO_WANDB]
METRIC = {"name": "rmse", "best": "min", "percent": False}


@pytest.mark.parametrize("key", ["primary_metric", "headline"])
def test_the_primary_metric_is_read_under_its_old_key_too(key: str, tmp_path: Path) -> None:
    (tmp_path / RUN_INFO).write_text(json.dumps({"id": "0", "facts": {"shape": [3], key: METRIC}}))
    assert RunFolder(tmp_path).read_facts() == {"shape": [3], "primary_metric": METRIC}


def test_a_run_of_a_version_with_fewer_keys_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL_RUN, f"run.dir={tmp_path}"]
    assert main(arguments) == 0
    recorded = read_yaml(tmp_path / "config.yaml")
    del recorded["local"]["memory_format"]
    (tmp_path / "config.yaml").write_text(to_yaml(recorded))
    assert main([*arguments, "rounds=2", "local.memory_format=contiguous"]) == 2
    assert "another config (local.memory_format: channels_last -> contiguous)" in capsys.readouterr().err
    assert main([*arguments, "rounds=2"]) == 0


def test_a_folder_without_run_info_has_no_facts(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).read_facts() == {}


def test_only_a_folder_in_use_is_a_user_error() -> None:
    assert issubclass(FolderInUseError, ConfigError)
    for error in (CorruptCheckpointError, CheckpointFailedError, FolderLostError):
        assert issubclass(error, FlDistError) and not issubclass(error, UserError)


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "attempts.jsonl", "logs/rank0.log"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_a_run_writes_through_no_link(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    assert main([*SMALL_RUN, f"run.dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert f"{file} is " in error and error.count("\n") == 1
    assert outside.read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_a_folder_that_is_a_link_may_hold_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch" / "logs" / "older").mkdir(parents=True)  # what a run does not write to is no concern of it
    assert main([*SMALL_RUN, f"run.dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "scratch" / "model.safetensors").exists()


def test_a_checkpoint_is_not_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "run" / "checkpoint" / "round-000001"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic link"):
        create_folder(folder, "id")
    assert not [*outside.iterdir()]


def test_a_job_whose_lock_did_not_exclude_another_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On file systems where every lock succeeds, such as NFS with local locks, the content of the file decides."""
    monkeypatch.setattr(folder_lock, "_try_lock", lambda file, kind: True)
    config = validate({"rounds": 1})
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.acquire(config)
    first.lock.check()
    second.acquire(config)
    second.lock.check()
    with pytest.raises(FolderLostError, match="another job"):
        first.lock.check()
    first.release()
    second.release()
