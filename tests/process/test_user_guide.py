"""A user's own model, data, task and method: the guide, followed to the letter with an installed wheel."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import exhaustive
from tests.support.run_folder import metrics, model_hash
from tests.support.user_guide import blocks, file_of, install, variables, write_files
from tests.support.waiting import PATIENCE

pytestmark = exhaustive


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    install(tmp_path_factory.mktemp("source") / "copy", target)
    return target


@pytest.fixture(scope="module")
def desk(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, in which everything that the guide says was done."""
    folder = tmp_path_factory.mktemp("empty")
    write_files(folder)
    for command in [command for snippet in blocks("sh") for command in snippet.commands()]:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=variables(installed),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return folder


def test_all_ways_to_run_it_give_the_same_bits(desk: Path) -> None:
    assert len({model_hash(desk / "runs" / name) for name in ("alone", "ranks", "submitted")}) == 1
    rows = metrics(desk / "runs" / "alone")
    assert {"test_loss", "test_covered"} <= rows[0].keys()
    assert 0 < rows[-1]["method"]["correlation"] < 1


def test_of_a_model_that_is_trained_in_part_only_that_part_is_sent(desk: Path) -> None:
    whole, head = (metrics(desk / "runs" / name)[0] for name in ("alone", "head"))
    assert head["bytes_up"] / whole["bytes_up"] == pytest.approx((16 + 1) / (3 * 16 + 16 + 1))


def test_a_language_model_learns(desk: Path) -> None:
    rows = metrics(desk / "runs" / "text")
    assert rows[-1]["test_perplexity"] < 0.8 * rows[0]["test_perplexity"]
    assert rows[0]["test_accuracy"] < rows[-1]["test_accuracy"]


def test_the_cells_run_in_a_notebook(desk: Path, installed: Path) -> None:
    cells = "\n".join(snippet.text for snippet in blocks("python") if file_of(snippet) is None)
    done = subprocess.run(
        [sys.executable, "-c", cells],
        cwd=desk,
        env=variables(installed),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "Run('runs/alone', finished, 6 of 6 rounds) 0.05 [" in done.stdout


def test_the_help_of_ones_own_model_is_like_that_of_others(desk: Path, installed: Path) -> None:
    shown = subprocess.run(
        ["fl-dist", "run", "--help", "model=my_models:net"],
        cwd=desk,
        env=variables(installed),
        capture_output=True,
        text=True,
    ).stdout
    assert re.search(r"model\.name=my_models:net +One hidden layer\.\n +model\.width +int +32", shown)
    assert "model.pretrained" in shown and "model.name=cnn" not in shown
