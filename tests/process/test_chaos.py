"""Promise: kill any process at any time, restart on any number of workers, and the result is the same."""

from pathlib import Path

import pytest

from fl_dist.main import main
from tests.support.chaos import chaos, settings
from tests.support.marks import exhaustive
from tests.support.processes import environment, run, torchrun
from tests.support.run_folder import model_hash, reproducible_records

pytestmark = [exhaustive, pytest.mark.timeout(900)]


def test_random_kills_change_nothing(tmp_path: Path) -> None:
    report = chaos(4, seed=20, root=tmp_path)
    assert report.disturbances.total() >= 4
    assert report.differences == 0, report
    assert report.losses == 0, report


def test_restarts_of_torchrun_resume_without_help(tmp_path: Path) -> None:
    reference, killed = (settings("scaffold", tmp_path / name) for name in ("reference", "killed"))
    assert main(reference) == 0
    # In every attempt rank 1 dies at its 40th client; each attempt resumes from the last checkpoint.
    command = [*torchrun(3, "--max-restarts=20"), "-m", "fl_dist.main", *killed]
    code, output = run(command, timeout=280, env=environment(FL_DIST_FAULT="local:40@1"))
    assert code == 0, output
    assert "resuming after round" in output
    assert model_hash(tmp_path / "killed") == model_hash(tmp_path / "reference")
    assert reproducible_records(tmp_path / "killed") == reproducible_records(tmp_path / "reference")
