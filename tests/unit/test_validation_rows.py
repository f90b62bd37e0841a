"""Clients' own validation rows: never trained on, and measured as their definition says."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fl_dist
from fl_dist import Run
from fl_dist.common.errors import ConfigError, DataError
from fl_dist.data import normalise
from fl_dist.data.digits import digits
from fl_dist.results.__main__ import main as results
from tests.support.run_folder import model_hash, read_records

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "seed": 5,
    "model": {"name": "mlp", "hidden": [16]},
    "clients": {"total": 12, "per_round": 4, "validation": 0.25},
    "partition": {"name": "dirichlet", "alpha": 0.5, "variant": "unbalanced"},
    "algorithm": {"name": "scaffold"},
    "local": {"epochs": 2, "batch_size": 10, "lr": 0.1, "momentum": 0.0},
    "evaluate": {"every": 2, "batch_size": 7},
    "monitor": {"wandb": {"mode": "disabled"}},
}


def run(folder: Path, **changes: Any) -> Run:
    return fl_dist.run(SETTINGS | changes, quiet=True, run={"dir": str(folder)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    both = {"clients": {"every": 3}, "training": {"name": "clients", "on": "train", "every": 3}}
    return run(tmp_path_factory.mktemp("validation") / "run", diagnostics=both)


def training_rows(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Rows of the digits as the model gets them, and their classes."""
    data = digits()
    return normalise(data.x_train[rows], data, torch.float32), data.y_train[rows]


def accuracies(run: Run, clients: list[np.ndarray]) -> list[float]:
    """Of each client's rows, if it has some, by the final model."""
    batches = [training_rows(rows) for rows in clients if len(rows)]
    model = run.model()
    return [float((model(x).argmax(1) == y).double().mean()) for x, y in batches]


def test_training_is_that_on_a_data_set_without_the_rows(trained: Run, tmp_path: Path) -> None:
    """So they count neither in weights nor in steps nor in any sum."""
    data, clients = digits(), trained.clients
    rows = np.concatenate(clients.rows)
    owners = np.repeat(np.arange(len(clients)), clients.sizes)
    order = np.argsort(rows)
    np.savez(
        tmp_path / "rest.npz",
        x_train=data.x_train.numpy()[rows[order]],
        y_train=data.y_train.numpy()[rows[order]],
        x_test=data.x_test.numpy(),
        y_test=data.y_test.numpy(),
        client=owners[order],
    )
    rest = run(
        tmp_path / "run",
        data={"name": "npz", "path": str(tmp_path / "rest.npz"), "mean": [*data.mean], "std": [*data.std]},
        partition={"name": "given"},
        clients={"total": 12, "per_round": 4},
    )
    assert model_hash(rest.path) == model_hash(trained.path)
    for mine, other in zip(read_records(trained.path), read_records(rest.path), strict=True):
        assert mine["train_loss"] == other["train_loss"]
        assert (mine["forwards"], mine["bytes_up"]) == (other["forwards"], other["bytes_up"])


def test_record_and_diagnostic_are_those_of_the_definition(trained: Run) -> None:
    expected, last = sorted(accuracies(trained, trained.clients.validation)), read_records(trained.path)[-1]
    known = {
        "mean": np.mean(expected),
        "std": np.std(expected),
        "best": expected[-1],
        "worst_tenth": np.mean(expected[: -(-len(expected) // 10)]),
    }
    spread = {name: last["spread"][f"validation_{name}"] for name in known}
    assert spread == pytest.approx(known, rel=1e-9)
    measured = last["diagnostics"]["clients"]
    assert {name: measured[name] for name in known} == pytest.approx(known, rel=1e-9)
    assert measured["worst"] == expected[0]


def test_the_diagnostic_can_use_training_rows(trained: Run) -> None:
    expected = accuracies(trained, trained.clients.rows)
    measured = read_records(trained.path)[-1]["diagnostics"]["training"]
    assert (measured["mean"], measured["std"]) == pytest.approx((np.mean(expected), np.std(expected)), rel=1e-9)


def test_only_evaluated_rounds_have_them(trained: Run) -> None:
    has = ["validation_mean" in record["spread"] for record in read_records(trained.path)]
    assert has == [False, True, True]


def test_without_them_there_is_no_such_number(tmp_path: Path) -> None:
    plain = run(tmp_path, clients={"total": 12, "per_round": 4})
    assert not any(name.startswith("validation") for name in read_records(plain.path)[-1]["spread"])
    assert all(len(rows) == 0 for rows in plain.clients.validation)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_beyond_its_range_is_one_line(share: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"clients\.validation") as caught:
        run(tmp_path, clients={"total": 12, "per_round": 4, "validation": share})
    assert "\n" not in str(caught.value)


def test_clients_without_a_training_row_are_named(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "few.npz",
        x_train=np.zeros((5, 3), np.float32),
        y_train=np.arange(5) % 2,
        x_test=np.zeros((2, 3), np.float32),
        y_test=np.arange(2),
        client=np.array([0, 0, 0, 0, 1]),
    )
    with pytest.raises(DataError, match="leaves 1 client without training rows: 1"):
        run(
            tmp_path / "run",
            data={"name": "npz", "path": str(tmp_path / "few.npz")},
            partition={"name": "given"},
            clients={"total": 2, "per_round": 1, "validation": 0.5},
        )


def test_the_loss_of_diagnostics_is_that_of_training_rows(tmp_path: Path) -> None:
    measured = run(tmp_path, diagnostics={"sharpness": {"every": 3}})
    x, y = training_rows(np.concatenate(measured.clients.rows))
    with torch.no_grad():
        expected = float(cross_entropy(measured.model()(x), y))
    assert read_records(measured.path)[-1]["diagnostics"]["sharpness"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_table_has_a_column_of_the_worst_tenth(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    key = "spread.validation_worst_tenth"
    assert results([str(trained.path), "--also", key, "--format", "csv"]) == 0
    lines = csv.DictReader(io.StringIO(capsys.readouterr().out))
    (value,) = [float(line["value"]) for line in lines if line["measure"] == key]
    assert value == pytest.approx(read_records(trained.path)[-1]["spread"]["validation_worst_tenth"], rel=1e-12)
