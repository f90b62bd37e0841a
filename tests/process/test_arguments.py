"""Ranks agree on the arguments and log their versions and data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import NO_WANDB, run_ranks

SMALL = (*NO_WANDB, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


class TestFolder:
    """Without run.dir, the folder's name says what differs from the file."""

    @pytest.fixture(autouse=True)
    def _working_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_ranks_of_torchrun_agree_on_the_folder(self, tmp_path: Path) -> None:
        codes, outputs = run_ranks(2, [*SMALL, "rounds=1", "seed=5"])
        assert codes == [0, 0], outputs
        (folder,) = Path("runs").iterdir()
        assert sorted(p.name for p in (folder / "logs").glob("rank*")) == ["rank0.log", "rank1.log"]


class TestHints:
    def test_counts_of_one_are_singular(self, tmp_path: Path) -> None:
        codes, outputs = run_ranks(2, [*SMALL, "rounds=1", "evaluate.final_window=1", f"run.dir={tmp_path}"])
        assert codes == [0, 0], outputs
        assert "server + 1 worker on" in outputs[0]
        assert "(the last evaluated round)" in outputs[0]
        assert "±" not in outputs[0]


def test_every_rank_logs_its_versions_rank_and_data(tmp_path: Path) -> None:
    codes, outputs = run_ranks(3, [*SMALL, "rounds=1", f"run.dir={tmp_path}"])
    assert codes == [0, 0, 0], outputs
    for rank in range(3):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        for expected in ("fl_dist ", "torch ", f"rank {rank} of 3 on ", "4 clients by dirichlet: ", "INFO finished"):
            assert expected in text, text


def test_a_dry_run_needs_no_slurm(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    env = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-m", "launch.submit", "rounds=1", "--nodes", "2", "--dry-run"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "#SBATCH --nodes=2\n" in result.stdout
