"""What a newcomer does first: run, run something else, look before running, go on for longer, come from anywhere."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fl_dist.common.paths import expand
from fl_dist.config import load
from fl_dist.config.arguments import LONGEST_NAME, default_name, resolve
from fl_dist.machine import bf16
from fl_dist.main import main
from launch.status import reason
from tests.jobs import QUIET, model_hash, results, run, run_ranks

SMALL = (*QUIET, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


class TestFolder:
    """Without run.dir, the folder's name says what differs from the file."""

    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_another_algorithm_gets_another_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*SMALL, "rounds=1"]) == 0
        assert main([*SMALL, "rounds=1", "algorithm.name=fedavg"]) == 0
        assert len(list(Path("runs").iterdir())) == 2

    def test_the_same_configuration_resumes_whatever_the_order_and_the_layout(self) -> None:
        one, _ = resolve(["seed=3", "local.lr=0.02", "rounds=9"])
        two, _ = resolve(["local.lr=0.02", "topology.server=shared", "seed=3", "monitor.wandb.mode=disabled"])
        assert one.run.dir == two.run.dir == "runs/quickstart-local.lr=0.02-seed=3"

    @pytest.mark.parametrize(
        ("overrides", "name"),
        [
            ([], "mine"),
            (["algorithm.name=fedavg"], "mine-fedavg"),
            (["data={name: npz, path: /a/b/c.npz}"], "mine-data=c.npz"),
            (["local.lr=1e-3", "comm.timeout=5"], "mine-local.lr=1e-3"),
            (["model={name: mlp, hidden: [8, 8]}"], "mine-model=name_mlp_hidden_8_8"),
            (["seed=1", "seed=2"], "mine-seed=2"),
        ],
    )
    def test_names_tell(self, overrides: list[str], name: str) -> None:
        assert default_name("configs/mine.yaml", overrides) == name

    def test_long_names_are_cut_and_still_differ(self) -> None:
        names = {default_name("mine.yaml", [f"data.path={'x' * 200}{k}"]) for k in range(3)}
        assert len(names) == 3
        assert all(len(name) == LONGEST_NAME for name in names)

    def test_ranks_of_torchrun_agree_on_the_folder(self, tmp_path: Path) -> None:
        codes, outputs = run_ranks(2, [*SMALL, "rounds=1", "seed=5"])
        assert codes == [0, 0], outputs
        (folder,) = Path("runs").iterdir()
        assert sorted(p.name for p in (folder / "logs").glob("rank*")) == ["rank0.log", "rank1.log"]


class TestPaths:
    def test_home_and_variables_are_filled_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "mine.yaml").write_text("rounds: 1\n")
        (tmp_path / "home" / "schedule.yaml").write_text("[[0]]\n")
        assert main(["~/mine.yaml", *SMALL, "run.dir=~/x", "clients.schedule=~/schedule.yaml"]) == 0
        assert main([*SMALL, "rounds=1", "run.dir=$SCRATCH/a/${SCRATCH}"]) == 0
        assert (tmp_path / "home" / "x" / "model.safetensors").exists()
        assert (tmp_path / "scratch" / "a").exists()
        assert not {"~", "$SCRATCH", "${SCRATCH}"} & {p.name for p in tmp_path.rglob("*")}

    def test_data_and_weights_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.setenv("SCRATCH", str(tmp_path))
        assert main(["--check", "data={name: npz, path: $SCRATCH/d.npz}"]) == 2
        assert f"data file {tmp_path}/d.npz does not exist" in capsys.readouterr().err
        assert main(["--check", "data={name: cinic10, root: $SCRATCH/c}"]) == 2
        assert f"no CINIC-10 in {tmp_path}/c" in capsys.readouterr().err
        assert main(["--check", "model.init=$SCRATCH/w.safetensors"]) == 2
        assert f"model.init {tmp_path}/w.safetensors does not exist" in capsys.readouterr().err

    def test_a_variable_that_is_not_set_is_named(self, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.delenv("NOWHERE", raising=False)
        with pytest.raises(ValueError, match=r"\$\{NOWHERE\}, which is not set"):
            expand("${NOWHERE}/x")
        assert main([*SMALL, "run.dir=$NOWHERE/x"]) == 2
        assert capsys.readouterr().err == (
            "error: the path $NOWHERE/x names $NOWHERE, which is not set in the environment\n"
        )
        assert not Path("$NOWHERE").exists()


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


class TestCheck:
    def test_data_clients_and_classes_are_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--check", *SMALL, "partition={name: shards, per_client: 3}"]) == 0
        text = capsys.readouterr().out
        assert "# data digits: 1,437 training and 360 test rows of 1x8x8, 10 classes" in text
        assert "# 4 clients by shards: " in text
        assert "# model mlp: 650 parameters" in text
        assert yaml.safe_load(text)["clients"]["total"] == 4

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("data={name: npz, path: /none.npz}", "data file /none.npz does not exist"),
            ("clients={total: 5000}", "5000 clients cannot share 1437 training rows"),
        ],
    )
    def test_what_would_fail_later_fails_now(self, override: str, message: str, tmp_path: Path, capsys) -> None:
        assert main(["--check", override, f"run.dir={tmp_path / 'run'}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert message in error

    def test_options_may_stand_anywhere(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "mine.yaml").write_text("rounds: 7\n")
        assert main([str(tmp_path / "mine.yaml"), "--check", "seed=9"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["seed"] == 9


class TestBfloat16:
    """A CPU that ends processes which compute in bfloat16 is found out by a child."""

    CONFIG = ["local.precision=bf16", "topology.device=cpu"]

    @staticmethod
    def broken(helped: bool) -> Callable[[], None]:
        def compute() -> None:
            if not (helped and os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE_BF16"):
                os.kill(os.getpid(), signal.SIGILL)

        return compute

    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")

    def test_without_the_broken_instructions_it_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bf16, "compute", self.broken(helped=True))
        bf16.make_safe(load(None, self.CONFIG))
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"

    def test_or_it_is_refused_in_one_line(self, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
        monkeypatch.setattr(bf16, "compute", self.broken(helped=False))
        assert main([*self.CONFIG, f"run.dir={tmp_path / 'run'}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: local.precision is bf16, but this CPU ends a process that computes with it")
        assert error.count("\n") == 1
        assert not (tmp_path / "run").exists()

    def test_other_precisions_try_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fork", lambda: pytest.fail("a child was started"))
        bf16.make_safe(load(None, []))

    def test_a_trial_that_works_changes_nothing(self) -> None:
        assert bf16._survives({})
        assert "ONEDNN_MAX_CPU_ISA" not in os.environ


class TestFirstCause:
    DIVERGING = (*SMALL[1:], "rounds=3", "local.lr=1e8", "algorithm.name=fedavg")

    @pytest.mark.parametrize("attempt", [0, *(pytest.param(k, marks=pytest.mark.thorough) for k in range(1, 8))])
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
        env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}
        code, output = run(command, env=env)
        assert code == 1
        assert output.count("error: ") == 1, output
        assert "SIGABRT" not in output


class TestHints:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("algorithm={parts: [fedsam]}", "fedsam is an algorithm, not a part; its parts are sam"),
            ("algorithm={parts: [mofedsam]}", "mofedsam is an algorithm, not a part; its parts are sam + client"),
        ],
    )
    def test_an_algorithm_is_no_part(self, override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([override]) == 2
        assert message in capsys.readouterr().err

    def test_a_sweep_is_no_configuration_and_the_other_way_round(self, tmp_path: Path, capsys) -> None:
        from launch import sweep

        (tmp_path / "sweep.yaml").write_text("grid: {seed: [0, 1]}\n")
        assert main([str(tmp_path / "sweep.yaml")]) == 2
        assert f"run it with python -m launch.sweep {tmp_path / 'sweep.yaml'}" in capsys.readouterr().err
        (tmp_path / "mine.yaml").write_text("rounds: 3\n")
        assert sweep.main([str(tmp_path / "mine.yaml"), "--dry-run"]) == 2
        assert "is a key of a configuration: run one with python -m fl_dist.main" in capsys.readouterr().err

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
    env = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    shown = subprocess.run(
        [sys.executable, "-m", "launch.submit", "rounds=1", "--nodes", "2", "--dry-run"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert "#SBATCH --nodes=2\n" in shown.stdout
