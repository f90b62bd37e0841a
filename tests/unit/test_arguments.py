"""Command-line arguments: the run folder, paths, --check and hints."""

from pathlib import Path

import pytest
import yaml

from fl_dist.common.paths import expand_path
from fl_dist.config.arguments import MAX_NAME_LENGTH, default_run_name, resolve_arguments
from fl_dist.main import main
from tests.support.processes import NO_WANDB

SMALL = (*NO_WANDB, "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}", "local.epochs=1")


class TestFolder:
    """Without run.dir, the folder's name lists the overrides of the configuration file."""

    @pytest.fixture(autouse=True)
    def _working_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_another_algorithm_gets_another_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*SMALL, "rounds=1"]) == 0
        assert main([*SMALL, "rounds=1", "algorithm.name=fedavg"]) == 0
        assert len(list(Path("runs").iterdir())) == 2

    def test_the_same_configuration_resumes_whatever_the_order_and_the_layout(self) -> None:
        one, _ = resolve_arguments(["seed=3", "local.lr=0.02", "rounds=9"])
        two, _ = resolve_arguments(["local.lr=0.02", "topology.server=shared", "seed=3", "monitor.wandb.mode=disabled"])
        assert one.run.dir == two.run.dir == "runs/quickstart-local.lr=0.02-seed=3"

    @pytest.mark.parametrize(
        ("overrides", "name"),
        [
            ([], "config"),
            (["algorithm.name=fedavg"], "config-fedavg"),
            (["data={name: npz, path: /a/b/c.npz}"], "config-data=c.npz"),
            (["local.lr=1e-3", "comm.timeout=5"], "config-local.lr=1e-3"),
            (["model={name: mlp, hidden: [8, 8]}"], "config-model=name_mlp_hidden_8_8"),
            (["seed=1", "seed=2"], "config-seed=2"),
        ],
    )
    def test_folder_names_list_the_overrides(self, overrides: list[str], name: str) -> None:
        assert default_run_name("configs/config.yaml", overrides) == name

    def test_long_names_are_truncated_and_stay_distinct(self) -> None:
        names = {default_run_name("config.yaml", [f"data.path={'x' * 200}{k}"]) for k in range(3)}
        assert len(names) == 3
        assert all(len(name) == MAX_NAME_LENGTH for name in names)


class TestPaths:
    def test_home_and_environment_variables_are_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "config.yaml").write_text("rounds: 1\n")
        (tmp_path / "home" / "schedule.yaml").write_text("[[0]]\n")
        assert main(["~/config.yaml", *SMALL, "run.dir=~/x", "clients.schedule=~/schedule.yaml"]) == 0
        assert main([*SMALL, "rounds=1", "run.dir=$SCRATCH/a/${SCRATCH}"]) == 0
        assert (tmp_path / "home" / "x" / "model.safetensors").exists()
        assert (tmp_path / "scratch" / "a").exists()
        assert not {"~", "$SCRATCH", "${SCRATCH}"} & {p.name for p in tmp_path.rglob("*")}

    def test_paths_of_data_and_weights_are_expanded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
    ) -> None:
        monkeypatch.setenv("SCRATCH", str(tmp_path))
        assert main(["--check", "data={name: npz, path: $SCRATCH/d.npz}"]) == 2
        assert f"data file {tmp_path}/d.npz does not exist" in capsys.readouterr().err
        assert main(["--check", "data={name: cinic10, root: $SCRATCH/c}"]) == 2
        assert f"no CINIC-10 in {tmp_path}/c" in capsys.readouterr().err
        assert main(["--check", "model.init=$SCRATCH/w.safetensors"]) == 2
        assert f"model.init {tmp_path}/w.safetensors does not exist" in capsys.readouterr().err

    def test_an_unset_variable_is_named(self, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.delenv("NOWHERE", raising=False)
        with pytest.raises(ValueError, match=r"\$\{NOWHERE\}, which is not set"):
            expand_path("${NOWHERE}/x")
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
    def test_check_finds_errors_of_the_run(self, override: str, message: str, tmp_path: Path, capsys) -> None:
        assert main(["--check", override, f"run.dir={tmp_path / 'run'}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert message in error

    def test_options_may_appear_anywhere(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.yaml").write_text("rounds: 7\n")
        assert main([str(tmp_path / "config.yaml"), "--check", "seed=9"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["seed"] == 9


class TestHints:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("algorithm={parts: [fedsam]}", "fedsam is an algorithm, not a part; its parts are sam"),
            ("algorithm={parts: [mofedsam]}", "mofedsam is an algorithm, not a part; its parts are sam + client"),
        ],
    )
    def test_an_algorithm_is_not_a_part(self, override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([override]) == 2
        assert message in capsys.readouterr().err

    def test_sweeps_and_configurations_are_not_interchangeable(self, tmp_path: Path, capsys) -> None:
        from launch import sweep

        (tmp_path / "sweep.yaml").write_text("grid: {seed: [0, 1]}\n")
        assert main([str(tmp_path / "sweep.yaml")]) == 2
        assert f"run it with fl-dist sweep {tmp_path / 'sweep.yaml'}" in capsys.readouterr().err
        (tmp_path / "config.yaml").write_text("rounds: 3\n")
        assert sweep.main([str(tmp_path / "config.yaml"), "--dry-run"]) == 2
        assert "is a key of a configuration: run one with fl-dist run" in capsys.readouterr().err
