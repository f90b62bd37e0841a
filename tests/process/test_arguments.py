"""Ranks agree on what the command line means, and log what they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import QUIET, run_ranks

SMALL = (*QUIET, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


class TestFolder:
    """Without run.dir, the folder's name says what differs from the file."""

    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_ranks_of_torchrun_agree_on_the_folder(self, tmp_path: Path) -> None:
        codes, outputs = run_ranks(2, [*SMALL, "rounds=1", "seed=5"])
        assert codes == [0, 0], outputs
        (folder,) = Path("runs").iterdir()
        assert sorted(p.name for p in (folder / "logs").glob("rank*")) == ["rank0.log", "rank1.log"]


class TestHints:
    def test_one_of_a_thing_is_one(self, tmp_path: Path) -> None:
        codes, outputs = run_ranks(2, [*SMALL, "rounds=1", "evaluate.last=1", f"run.dir={tmp_path}"])
        assert codes == [0, 0], outputs
        assert "server + 1 worker on" in outputs[0]
        assert "(the last evaluated round)" in outputs[0]
        assert "±" not in outputs[0]


def test_every_rank_logs_what_it_is(tmp_path: Path) -> None:
    codes, outputs = run_ranks(3, [*SMALL, "rounds=1", f"run.dir={tmp_path}"])
    assert codes == [0, 0, 0], outputs
    for rank in range(3):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        for words in ("fl_dist ", "torch ", f"rank {rank} of 3 on ", "4 clients by dirichlet: ", "INFO finished"):
            assert words in text, text


def test_a_dry_run_needs_no_slurm(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    env = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    shown = subprocess.run(
        [sys.executable, "-m", "launch.submit", "rounds=1", "--nodes", "2", "--dry-run"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "#SBATCH --nodes=2\n" in shown.stdout
