"""What a command line means: the run's folder, paths, --check, and hints."""

from pathlib import Path

import pytest
import yaml

from fl_dist.common.paths import expand
from fl_dist.config.arguments import LONGEST_NAME, default_name, resolve
from fl_dist.main import main
from tests.support.processes import QUIET

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
