"""Promise: an error is one line that says what is wrong, where and what to do, with a nonzero exit code."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fl_dist.algorithms.core import ChainError
from fl_dist.common.errors import ConfigError, DataError, FlDistError, ModelError, UserError
from fl_dist.common.hook_contract import HookContractError
from fl_dist.common.imports import UserImportError
from fl_dist.common.key_listing import list_diagnostics, read_key_listing
from fl_dist.common.registry import BuilderError, UnknownNameError
from fl_dist.common.yaml_reader import YamlError
from fl_dist.config import load
from fl_dist.config.help import help_lines, summary_of
from fl_dist.diagnostics import diagnostics
from fl_dist.distributed.rendezvous import RankLostError
from fl_dist.federation.local_training import ClientFailedError
from fl_dist.federation.server import ServerDivergedError
from fl_dist.main import main
from fl_dist.storage.checkpoint import CheckpointFailedError
from fl_dist.storage.folder_lock import FolderInUseError, FolderLostError
from launch import sweep
from tests.support.data_files import SMALL_RUN, npz_arguments, save_npz

BAD_VALUES = [
    ("local.learning_rate=0.1", "unknown key local.learning_rate (set on the command line); valid: batch_size, clip"),
    ("local.ephocs=1", "unknown key local.ephocs (set on the command line); did you mean 'epochs'?"),
    ("loca.lr=0.1", "unknown key loca (set on the command line); did you mean 'local'?"),
    ("lr=0.1", "unknown key lr (set on the command line); did you mean local.lr or server.lr?"),
    ("per_round=3", "unknown key per_round (set on the command line); did you mean clients.per_round?"),
    ("local=3", "local (set on the command line): input should be a mapping such as {key: value}, got 3"),
    (
        "local.optimizer={name: adamw, betas: 3}",
        "local.optimizer.betas (set on the command line): input should be a list",
    ),
    ("rounds=many", "rounds (set on the command line): input should be a valid integer"),
    (
        "local.batch_size=half",
        "local.batch_size (set on the command line): input should be a valid integer, got 'half'",
    ),
    (
        "data={name: parquet, path: x, test: 2}",
        "data.test (set on the command line): input should be less than 1, got 2",
    ),
    (
        "data={name: parquet, path: x, classes: [a, 3]}",
        "data.classes.1 (set on the command line): input should be a valid string, got 3",
    ),
    ("seed=true", "seed (set on the command line): input should be a valid integer, got True"),
    ("local.lr=-1", "local.lr (set on the command line): input should be greater than 0, got -1"),
    ("algorithm.name=fedsma", "algorithm: unknown algorithm 'fedsma'; did you mean 'fedsam'? One of your own"),
    ("model=x", "vgg11, vit_cifar. One of your own is named module:name (set on the command line)"),
    ("diagnostics.lpf=3", "diagnostics.lpf must be a mapping such as {every: 10}, on the command line"),
    ("algorithm={name: fedsam, roh: 1}", "unknown key algorithm.roh (set on the command line); did you mean 'rho'?"),
    ("algorithm={name: fedsam, rho: -1}", "algorithm.rho (set on the command line): input should be greater than"),
    ("algorithm={parts: [{sam: {}}, {asam: {}}]}", "parts sam and asam exclude each other: both set the evaluation"),
    ("algorithm={parts: [{dual: {}}, {nesterov: {}}]}", "part dual must come after nesterov"),
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
    ("comm.meeting=3", "error: comm.meeting is now comm.rendezvous_timeout (set on the command line)\n"),
    ("evaluate={last: 3}", "error: evaluate.last is now evaluate.final_window (set on the command line)\n"),
]


@pytest.mark.parametrize(("override", "message"), BAD_VALUES, ids=[o for o, _ in BAD_VALUES])
def test_a_bad_value_is_named_in_one_line(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL_RUN, f"run.dir={tmp_path / 'run'}", override]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_the_file_of_a_bad_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("local: {lr: 1e-3, epoch: 2}\n")
    assert main([str(tmp_path / "config.yaml")]) == 2
    assert (
        f"unknown key local.epoch (set in {tmp_path / 'config.yaml'}); did you mean 'epochs'?"
        in capsys.readouterr().err
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


def test_the_listing_that_help_shows_is_that_of_the_code() -> None:
    assert read_key_listing() == list(help_lines()), "run python -m fl_dist.config.help"
    assert list_diagnostics() == {name: summary_of(diagnostics[name]) for name in diagnostics}


def test_a_finished_run_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL_RUN, f"run.dir={tmp_path}"]) == 0
    assert main([*SMALL_RUN, f"run.dir={tmp_path}"]) == 2
    assert "is finished" in capsys.readouterr().err


def test_a_diverging_client_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = npz_arguments(save_npz(tmp_path / "d.npz", x_train=np.full((40, 3), 1e30)))
    code = main([*SMALL_RUN, *data, "local.lr=1e9", f"run.dir={tmp_path / 'run'}", "clients.schedule=[[2]]"])
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
    algorithm = load(None, overrides).algorithm
    assert algorithm["name"] == name and algorithm.items() >= settings.items()


def test_renamed_keys_of_files_and_sweeps_name_the_new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("comm: {meeting: 3}\n")
    assert main([str(tmp_path / "config.yaml")]) == 2
    expected = f"error: comm.meeting is now comm.rendezvous_timeout (set in {tmp_path / 'config.yaml'})\n"
    assert capsys.readouterr().err == expected
    for text, message in (
        ("grid: {seed: [0]}\nset: {evaluate.last: 3}", "run seed0: evaluate.last is now evaluate.final_window (set in"),
        ("grid: {evaluate.last: [3]}", "run last3: evaluate.last is now evaluate.final_window (set in the sweep)"),
        ("table: {last: 3}", f"table.last is now table.final_window (set in {tmp_path / 'sweep.yaml'})"),
        ("table: {also: {}}", f"table.also is now table.extra_columns (set in {tmp_path / 'sweep.yaml'})"),
    ):
        (tmp_path / "sweep.yaml").write_text(text)
        assert sweep.main([str(tmp_path / "sweep.yaml"), "--dry-run"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("bad shape"), OSError(5, "Input/output error"), KeyError("lost")])
def test_an_unexpected_error_has_its_traceback_in_the_log(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fl_dist.execute.train", mock.Mock(side_effect=error))
    assert main([*SMALL_RUN, f"run.dir={tmp_path / 'run'}"]) == 1
    log = tmp_path / "run" / "logs" / "rank0.log"
    message = {ValueError: "bad shape", OSError: "Input/output error", KeyError: "KeyError: 'lost'"}[type(error)]
    assert capsys.readouterr().err == f"error: {message}; the traceback is in {log}\n"
    assert "Traceback" in log.read_text() and type(error).__name__ in log.read_text()


def test_an_expected_error_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fl_dist.execute.train", mock.Mock(side_effect=DataError("the data ended")))
    assert main([*SMALL_RUN, f"run.dir={tmp_path / 'run'}"]) == 1
    assert capsys.readouterr().err == "error: the data ended\n"
    assert "Traceback" not in (tmp_path / "run" / "logs" / "rank0.log").read_text()


def test_errors_are_classified_as_user_errors_or_not() -> None:
    """User errors are ValueErrors as well."""
    user_errors = (ConfigError, DataError, ModelError, HookContractError, UserImportError, BuilderError, YamlError)
    for kind in (*user_errors, UnknownNameError, ChainError, FolderInUseError):
        assert issubclass(kind, UserError) and issubclass(kind, ValueError)
    for kind in (RankLostError, ClientFailedError, ServerDivergedError, CheckpointFailedError, FolderLostError):
        assert issubclass(kind, FlDistError) and not issubclass(kind, UserError)
