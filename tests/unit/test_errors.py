"""Promise: errors are for people. One line that says what, where and what to do; a non-zero exit on every rank."""

from pathlib import Path

import numpy as np
import pytest

from fl_dist.config import load
from fl_dist.main import main
from tests.support.data_files import SMALL, npz, save_npz

BAD_VALUES = [
    ("local.learning_rate=0.1", "unknown key local.learning_rate (set in the command line); valid: batch_size, clip"),
    ("local.ephocs=1", "unknown key local.ephocs (set in the command line); did you mean 'epochs'?"),
    ("loca.lr=0.1", "unknown key loca (set in the command line); did you mean 'local'?"),
    ("rounds=many", "rounds (set in the command line): input should be a valid integer"),
    ("seed=true", "seed (set in the command line): input should be a valid integer, got True"),
    ("local.lr=-1", "local.lr (set in the command line): input should be greater than 0, got -1"),
    ("algorithm.name=fedsma", "algorithm: unknown algorithm 'fedsma'; did you mean 'fedsam'?"),
    ("algorithm={name: fedsam, roh: 1}", "unknown key algorithm.roh (set in the command line); did you mean 'rho'?"),
    ("algorithm={name: fedsam, rho: -1}", "algorithm.rho (set in the command line): input should be greater than"),
    ("algorithm={parts: [{sam: {}}, {asam: {}}]}", "parts sam and asam exclude each other: both set the evaluation"),
    ("algorithm={parts: [{dual: {}}, {nesterov: {}}]}", "part dual has to stand after nesterov"),
    ("algorithm={parts: [{momentumperturb: {}}]}", "needs the server variable 'm', which no part keeps"),
    ("clients.per_round=9", "clients.per_round is 9, more than the 4 of clients.total"),
    ("clients.schedule=[[0, 7]]", "round 0 names client 7; there are clients 0 to 3"),
    ("clients.schedule=[[]]", "round 0 names no client"),
    ("clients.schedule=[[1, 1]]", "round 0 names a client twice"),
    ("clients.schedule=no/such/file.yaml", "cannot read no/such/file.yaml: No such file or directory"),
    ("local.batch_size=0", "local.batch_size"),
    ("data={name: npz}", "missing key data.path"),
    ("model={name: mlp, init: nowhere.safetensors}", "nowhere.safetensors does not exist"),
    ("rounds", "override 'rounds' is not of the form key.sub=value"),
]


@pytest.mark.parametrize(("override", "message"), BAD_VALUES, ids=[o for o, _ in BAD_VALUES])
def test_a_bad_value_is_named_in_one_line(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, f"run.dir={tmp_path / 'run'}", override]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_the_file_of_a_bad_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("local: {lr: 1e-3, epoch: 2}\n")
    assert main([str(tmp_path / "mine.yaml")]) == 2
    assert (
        f"unknown key local.epoch (set in {tmp_path / 'mine.yaml'}); did you mean 'epochs'?" in capsys.readouterr().err
    )


def test_check_validates_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "local.lr=1e-3", f"run.dir={tmp_path / 'run'}"]) == 0
    assert "lr: 0.001" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for key in ("local.weight_decay", "clients.on_failure", "monitor.wandb.mode", "algorithm.ema_decay", "data.path"):
        assert key in text


def test_a_finished_run_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, f"run.dir={tmp_path}"]) == 0
    assert main([*SMALL, f"run.dir={tmp_path}"]) == 2
    assert "is finished" in capsys.readouterr().err


def test_a_diverging_client_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = npz(save_npz(tmp_path / "d.npz", x_train=np.full((40, 3), 1e30)))
    code = main([*SMALL, *data, "local.lr=1e9", f"run.dir={tmp_path / 'run'}", "clients.schedule=[[2]]"])
    assert code == 1
    error = capsys.readouterr().err
    assert "round 1, client 2: " in error
    assert "update" in error


@pytest.mark.parametrize(
    ("overrides", "name", "settings"),
    [
        (["algorithm=fedavg", "algorithm=fedsam"], "fedsam", {"rho": 0.05}),
        (["algorithm.name=fedsam", "algorithm.rho=0.3", "algorithm=fedasam"], "fedasam", {"rho": 0.3}),
        (["algorithm={name: fedprox, prox: 2.0}", "algorithm.name=fedsam"], "fedsam", {"rho": 0.05}),
        (["algorithm=fedsam", "algorithm={name: fedprox, prox: 2.0}"], "fedprox", {"prox": 2.0}),
        (["algorithm.rho=0.3", "algorithm=fedsam"], "fedsam", {"rho": 0.3}),
    ],
)
def test_the_last_of_several_overrides_counts(overrides: list[str], name: str, settings: dict[str, float]) -> None:
    chosen = load(None, overrides).algorithm
    assert chosen["name"] == name and chosen.items() >= settings.items()
