"""What a newcomer does first: run, run something else, look before running, go on for longer, come from anywhere."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from fl_dist.main import main
from launch.status import reason
from tests.support.processes import QUIET, run, run_ranks
from tests.support.run_folder import model_hash, results

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


class TestMoreRounds:
    """A run that is to be longer goes on, and ends with the bits of one that was meant to be so long."""

    LONG = (*SMALL, "algorithm.name=fedgmt", "evaluate.every=2")

    @pytest.fixture(scope="class")
    @classmethod
    def meant(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("meant")
        assert main([*cls.LONG, "rounds=6", f"run.dir={folder}"]) == 0
        return folder

    def test_a_finished_run_goes_on(self, meant: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*self.LONG, "rounds=3", f"run.dir={tmp_path}"]) == 0
        short = model_hash(tmp_path)
        codes, outputs = run_ranks(3, [*self.LONG, "rounds=6", f"run.dir={tmp_path}"])
        assert codes == [0, 0, 0], outputs
        assert "resuming after round 3 of 6" in outputs[0]
        assert model_hash(tmp_path) == model_hash(meant)
        assert results(tmp_path) == results(meant)
        (tmp_path / "model-3.safetensors").rename(tmp_path / "model.safetensors")
        assert model_hash(tmp_path) == short

    def test_an_unfinished_run_goes_on(self, meant: Path, tmp_path: Path) -> None:
        stopped = [*self.LONG, "rounds=4", f"run.dir={tmp_path}"]
        run_ranks(1, [*stopped, "topology.server=shared"], FL_DIST_FAULT="server:3")
        assert not (tmp_path / "model.safetensors").exists()
        assert main([*self.LONG, "rounds=6", f"run.dir={tmp_path}"]) == 0
        assert model_hash(tmp_path) == model_hash(meant)
        assert yaml.safe_load((tmp_path / "config.yaml").read_text())["rounds"] == 6

    def test_fewer_rounds_are_another_run(self, meant: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*self.LONG, "rounds=5", f"run.dir={meant}"]) == 2
        assert "belongs to another config (rounds: 6 -> 5)" in capsys.readouterr().err
        assert main([*self.LONG, "rounds=6", f"run.dir={meant}"]) == 2
        assert "is finished; raise rounds to go on" in capsys.readouterr().err

    def test_a_schedule_that_is_too_short_is_said(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        given = [*self.LONG, "clients.schedule=[[0], [1]]", f"run.dir={tmp_path}"]
        assert main([*given, "rounds=2"]) == 0
        assert main([*given, "rounds=3"]) == 2
        assert "clients.schedule has 2 rounds, but rounds is 3" in capsys.readouterr().err

    def test_without_a_checkpoint_nothing_is_lost(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        never = [*self.LONG, "checkpoint.every=0", f"run.dir={tmp_path}"]
        assert main([*never, "rounds=2"]) == 0
        before = model_hash(tmp_path)
        assert main([*never, "rounds=3"]) == 2
        assert "ended after 2 rounds and kept no checkpoint to go on from" in capsys.readouterr().err
        assert model_hash(tmp_path) == before


class TestFirstCause:
    DIVERGING = (*SMALL[1:], "rounds=3", "local.lr=1e8", "algorithm.name=fedavg")

    @pytest.mark.parametrize("attempt", [0, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in range(1, 8))])
    def test_a_diverging_run_says_so_and_what_to_do(self, attempt: int, tmp_path: Path) -> None:
        """And nothing else, however its threads and tensors end."""
        codes, outputs = run_ranks(3, [*self.DIVERGING, f"run.dir={tmp_path}"], WHOLE_END="1")
        assert codes == [1, 1, 1]
        assert not re.search("Traceback|terminate|Fatal", "".join(outputs))
        (error,) = [line for line in outputs[0].splitlines() if line.startswith("error: ")]
        assert "lower local.lr or set local.clip" in error
        assert "training diverge" in error

    def test_no_thread_is_left_when_a_run_fails(self, tmp_path: Path) -> None:
        """A thread of ours at the interpreter's end may be the one that frees a tensor, which aborts the process."""
        before = set(threading.enumerate())
        offline = [*self.DIVERGING, "monitor.wandb.mode=offline", f"run.dir={tmp_path}"]
        assert main(offline) == 1
        assert set(threading.enumerate()) <= before

    def test_the_first_error_of_the_last_attempt_is_the_reason(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        attempts = ["starting x", "error: old", "starting x", "error: cause", "error: rank 0 was ended by SIGABRT"]
        log.write_text("\n".join(attempts))
        assert reason(log) == "cause"
        log.write_text("job 3 on n1\nsrun: error: later\nerror: unknown key a\n")
        assert reason(log) == "unknown key a"
        log.write_text("\n".join(attempts[:2] + ["starting x", "round 1/3"]))
        assert reason(log) is None

    def test_a_rank_that_dies_after_its_word_adds_nothing(self, tmp_path: Path) -> None:
        abort = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGABRT))"
        (tmp_path / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '0':\n    {abort}\n")
        command = [sys.executable, "-m", "launch.local", "-n", "2", *self.DIVERGING, *QUIET, f"run.dir={tmp_path}/run"]
        env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
        code, output = run(command, env=env)
        assert code == 1
        assert output.count("error: ") == 1, output
        assert "SIGABRT" not in output


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
