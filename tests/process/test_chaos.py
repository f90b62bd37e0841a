"""Promise: kill any process at any moment, restart on any number of workers, and nothing differs."""

from pathlib import Path

import pytest

from fl_dist.main import main
from tests.support.chaos import chaos, settings
from tests.support.marks import exhaustive
from tests.support.processes import environment, run, torchrun
from tests.support.run_folder import model_hash, results

pytestmark = [exhaustive, pytest.mark.timeout(900)]


def test_random_kills_change_nothing(tmp_path: Path) -> None:
    score = chaos(4, seed=20, root=tmp_path)
    assert score.done.total() >= 4
    assert score.differences == 0, score


def test_torchrun_restarts_recover_by_themselves(tmp_path: Path) -> None:
    calm, wild = (settings("scaffold", tmp_path / name) for name in ("calm", "wild"))
    assert main(calm) == 0
    # In every attempt rank 1 dies at its 40th client, if it gets so far; each attempt goes on where the last was saved.
    command = [*torchrun(3, "--max-restarts=20"), "-m", "fl_dist.main", *wild]
    code, output = run(command, timeout=280, env=environment(FL_DIST_FAULT="local:40@1"))
    assert code == 0, output
    assert "resuming after round" in output
    assert model_hash(tmp_path / "wild") == model_hash(tmp_path / "calm")
    assert results(tmp_path / "wild") == results(tmp_path / "calm")
