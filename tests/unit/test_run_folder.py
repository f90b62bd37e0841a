"""`run.json`, also of older run folders, and the classification of storage errors."""

import json
from pathlib import Path

import pytest

from fl_dist.common.errors import ConfigError, FlDistError
from fl_dist.storage.checkpoint import CheckpointFailedError, CorruptCheckpointError
from fl_dist.storage.run_folder import RUN_INFO, FolderInUseError, FolderLostError, RunFolder

METRIC = {"name": "rmse", "best": "min", "percent": False}


@pytest.mark.parametrize("key", ["primary_metric", "headline"])
def test_the_primary_metric_is_read_under_its_old_key_too(key: str, tmp_path: Path) -> None:
    (tmp_path / RUN_INFO).write_text(json.dumps({"id": "0", "facts": {"shape": [3], key: METRIC}}))
    assert RunFolder(tmp_path).read_facts() == {"shape": [3], "primary_metric": METRIC}


def test_a_folder_without_run_info_has_no_facts(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).read_facts() == {}


def test_only_a_folder_in_use_is_a_user_error() -> None:
    assert issubclass(FolderInUseError, ConfigError) and FolderInUseError.is_user_error
    for error in (CorruptCheckpointError, CheckpointFailedError, FolderLostError):
        assert issubclass(error, FlDistError) and not error.is_user_error
