"""A run whose `rounds` is raised continues and ends with the bits of a run of that length."""

import signal
from pathlib import Path

import pytest
import yaml

from fl_dist.main import main
from tests.support.checkpoints import run_forked_main
from tests.support.harness import synchronous_checkpoints
from tests.support.processes import NO_WANDB, run_ranks
from tests.support.run_folder import model_hash, newest_saved_round, reproducible_records

SMALL = (*NO_WANDB, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


class TestMoreRounds:
    """A run whose `rounds` is raised continues and ends with the bits of a run of that length."""

    LONG = (*SMALL, "algorithm.name=fedgmt", "evaluate.every=2")

    @pytest.fixture(scope="class")
    @classmethod
    def long_run(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("long")
        assert main([*cls.LONG, "rounds=6", f"run.dir={folder}"]) == 0
        return folder

    def test_a_finished_run_continues(self, long_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*self.LONG, "rounds=3", f"run.dir={tmp_path}"]) == 0
        short = model_hash(tmp_path)
        codes, outputs = run_ranks(3, [*self.LONG, "rounds=6", f"run.dir={tmp_path}"])
        assert codes == [0, 0, 0], outputs
        assert "resuming after round 3 of 6" in outputs[0]
        assert model_hash(tmp_path) == model_hash(long_run)
        assert reproducible_records(tmp_path) == reproducible_records(long_run)
        (tmp_path / "model-3.safetensors").rename(tmp_path / "model.safetensors")
        assert model_hash(tmp_path) == short

    def test_an_unfinished_run_continues(self, long_run: Path, tmp_path: Path) -> None:
        shorter = [*self.LONG, "rounds=4", f"run.dir={tmp_path}"]
        with synchronous_checkpoints():
            assert run_forked_main("server:3", shorter) == -signal.SIGKILL
        assert newest_saved_round(tmp_path) == 2
        assert main([*self.LONG, "rounds=6", f"run.dir={tmp_path}"]) == 0
        assert model_hash(tmp_path) == model_hash(long_run)
        assert yaml.safe_load((tmp_path / "config.yaml").read_text())["rounds"] == 6

    def test_fewer_rounds_are_refused(self, long_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*self.LONG, "rounds=5", f"run.dir={long_run}"]) == 2
        assert "belongs to another config (rounds: 6 -> 5, which may only be raised)" in capsys.readouterr().err
        assert main([*self.LONG, "rounds=6", f"run.dir={long_run}"]) == 2
        assert "is finished; raise rounds to continue" in capsys.readouterr().err

    def test_a_schedule_shorter_than_rounds_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        scheduled = [*self.LONG, "clients.schedule=[[0], [1]]", f"run.dir={tmp_path}"]
        assert main([*scheduled, "rounds=2"]) == 0
        assert main([*scheduled, "rounds=3"]) == 2
        assert "clients.schedule has 2 rounds, but rounds is 3" in capsys.readouterr().err

    def test_without_a_checkpoint_the_finished_model_is_kept(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        settings = [*self.LONG, "checkpoint.every=0", f"run.dir={tmp_path}"]
        assert main([*settings, "rounds=2"]) == 0
        before = model_hash(tmp_path)
        assert main([*settings, "rounds=3"]) == 2
        assert "ended after 2 rounds and left no checkpoint to resume" in capsys.readouterr().err
        assert model_hash(tmp_path) == before
