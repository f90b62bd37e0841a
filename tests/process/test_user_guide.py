"""The tutorials of a user's own model, data, task and method, followed with an installed wheel."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import exhaustive
from tests.support.run_folder import model_hash, read_records
from tests.support.user_guide import (
    PYTHON,
    follow_guide,
    guide_snippets,
    install_package,
    installed_environment,
)
from tests.support.waiting import TIMEOUT_SECONDS

pytestmark = exhaustive


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    install_package(tmp_path_factory.mktemp("source") / "copy", target)
    return target


@pytest.fixture(scope="module")
def workspace(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all steps of the guide were executed."""
    folder = tmp_path_factory.mktemp("empty")
    follow_guide(folder, installed)
    return folder


def test_all_launchers_give_the_same_bits(workspace: Path) -> None:
    assert len({model_hash(workspace / "runs" / name) for name in ("alone", "ranks", "submitted")}) == 1
    records = read_records(workspace / "runs" / "alone")
    assert {"test_loss", "test_covered"} <= records[0].keys()
    assert 0 < records[-1]["method"]["correlation"] < 1


def test_the_checks_of_a_method_hold(workspace: Path) -> None:
    hashes = {
        name: model_hash(workspace / "runs" / name) for name in ("off", "fedavg", "momentum", "three", "extended")
    }
    assert hashes["off"] == hashes["fedavg"] != hashes["momentum"]
    assert hashes["momentum"] == hashes["three"] == hashes["extended"]
    attacked, defended, on_ranks = (
        model_hash(workspace / "runs" / name) for name in ("attacked", "defended", "defended-on-ranks")
    )
    assert attacked != defended == on_ranks


def test_only_the_trained_part_of_a_model_is_sent(workspace: Path) -> None:
    full, head = (read_records(workspace / "runs" / name)[0] for name in ("net", "head"))
    assert head["bytes_up"] / full["bytes_up"] == pytest.approx((48 + 1) * 10 / ((64 + 1) * 48 + (48 + 1) * 10))


def test_a_language_model_learns(workspace: Path) -> None:
    records = read_records(workspace / "runs" / "text")
    assert records[-1]["test_perplexity"] < 0.8 * records[0]["test_perplexity"]
    assert records[0]["test_accuracy"] < records[-1]["test_accuracy"]


def test_the_cells_run_in_a_notebook(workspace: Path, installed: Path) -> None:
    cells = "\n".join(snippet.text for snippet in guide_snippets("python", PYTHON))
    result = subprocess.run(
        [sys.executable, "-c", cells],
        cwd=workspace,
        env=installed_environment(installed),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert "Run('runs/python', finished, 6 of 6 rounds) 0.05 [" in result.stdout


def test_help_lists_the_settings_of_the_users_model(workspace: Path, installed: Path) -> None:
    output = subprocess.run(
        ["fl-dist", "run", "--help", "model=my_models:net"],
        cwd=workspace,
        env=installed_environment(installed),
        capture_output=True,
        text=True,
    ).stdout
    assert re.search(r"model\.name=my_models:net +One hidden layer\.\n +model\.width +int +32", output)
    assert "model.pretrained" in output and "model.name=cnn" not in output
