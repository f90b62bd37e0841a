"""Personalised models: plain SGD of each client from the global model, as its definition says."""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fl_dist
from fl_dist import Run
from fl_dist.common.errors import ConfigError
from fl_dist.common.randomness import torch_generator
from fl_dist.diagnose import main as diagnose
from tests.support.run_folder import model_hash, read_records

CLIENTS, FEATURES, SEED = 6, 5, 4
BATCH_SIZE, LR, OWN_LR, STEPS, EPOCHS, SAMPLE = 6, 0.05, 0.02, 7, 2, 3
DIAGNOSTICS: dict[str, dict[str, Any]] = {
    "personalization": {},
    "epochs": {"epochs": EPOCHS, "lr": OWN_LR},
    "steps": {"steps": STEPS},
    "sample": {"clients": SAMPLE},
    "all": {"clients": 10 * CLIENTS},
    "diverging": {"lr": 1e300},
}


class NormedNet(nn.Module):
    """A network whose running statistics follow the rows."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(*shape, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


SIZES = (20, 12, 32, 17, 22, 24)
"""Also without the rows that are held out no multiple of the batch size plus one: BatchNorm needs two rows."""


def write_data(file: Path, kind: str, sizes: Sequence[int] = SIZES) -> None:
    """Clients with rows and targets of their own kind."""
    rng = np.random.default_rng(1)
    client = np.repeat(np.arange(CLIENTS), sizes)
    x = rng.normal(size=(len(client), FEATURES)) + 0.3 * client[:, None]
    y = x[:, 0] * (client % 3 - 1) + 0.1 * rng.normal(size=len(x))
    y = y if kind == "regression" else (y > 0).astype(int) + (y > 1)
    np.savez(file, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20], client=client)


def run(folder: Path, kind: str, **changes: Any) -> Run:
    """Three rounds by an algorithm and a local optimiser that are not plain SGD, in float64."""
    if not (folder / "data.npz").exists():
        write_data(folder / "data.npz", kind)
    config: dict[str, Any] = {
        "seed": SEED,
        "rounds": 3,
        "data": {"name": "npz", "path": str(folder / "data.npz")},
        "partition": "given",
        "task": kind,
        "model": "tests.unit.test_personalization:NormedNet",
        "algorithm": {"name": "feddyn", "dual": 0.1},
        "clients": {"total": CLIENTS, "per_round": 2, "validation": 0.3},
        "local": {"epochs": 3, "batch_size": BATCH_SIZE, "lr": LR, "lr_decay": 0.5, "momentum": 0.8, "clip": 0.5},
        "monitor": {"wandb": {"mode": "disabled"}},
        "run": {"dir": str(folder / "run")},
        "diagnostics": {label: {"name": "personalization", "every": 3, **own} for label, own in DIAGNOSTICS.items()},
    }
    config["local"] |= {"weight_decay": 0.1, "precision": "float64"}
    return fl_dist.run(config | changes, quiet=True)


@pytest.fixture(scope="module", params=["regression", "classification"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp(request.param), request.param)


def batches(rows: np.ndarray, client: int) -> Iterator[np.ndarray]:
    """Epoch after epoch, the rows in the order of the client's first round."""
    order = torch_generator(SEED, "batches", 0, client)
    while True:
        shuffled = rows[torch.randperm(len(rows), generator=order).numpy()]
        yield from np.split(shuffled, range(BATCH_SIZE, len(rows), BATCH_SIZE))


def personal_metrics(trained: Run, lr: float = LR, epochs: int = 1, steps: int | None = None) -> list[list[float]]:
    """Of each client the metric of the global model, and of its own, by torch's SGD."""
    with np.load(trained.path.parent / "data.npz") as data:
        x, y = torch.from_numpy(data["x_train"]), torch.from_numpy(data["y_train"])
    is_regression = y.is_floating_point()
    found = []
    for client, (rows, held_out) in enumerate(zip(trained.clients.rows, trained.clients.validation, strict=True)):
        module = copy.deepcopy(trained.model())
        metrics = [metric(module, x[held_out], y[held_out])]
        optimizer = torch.optim.SGD(module.parameters(), lr)
        of_client = batches(rows, client)
        for _ in range(steps or epochs * math.ceil(len(rows) / BATCH_SIZE)):
            batch = next(of_client)
            outputs = module.train()(x[batch])
            optimizer.zero_grad()
            if is_regression:
                functional.mse_loss(outputs.squeeze(1), y[batch]).backward()
            else:
                functional.cross_entropy(outputs, y[batch]).backward()
            optimizer.step()
        found.append([*metrics, metric(module, x[held_out], y[held_out])])
    return found


@torch.no_grad()
def metric(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """The root mean squared error, or the accuracy."""
    outputs = module.eval()(x)
    if y.is_floating_point():
        return float((outputs.squeeze(1) - y).square().mean().sqrt())
    return float((outputs.argmax(1) == y).double().mean())


def measured(trained: Run, label: str = "personalization") -> dict[str, Any]:
    return read_records(trained.path)[-1]["diagnostics"][label]


@pytest.mark.parametrize(
    ("label", "settings"),
    [("personalization", {}), ("epochs", {"epochs": EPOCHS, "lr": OWN_LR}), ("steps", {"steps": STEPS})],
)
def test_values_are_those_of_plain_sgd(trained: Run, label: str, settings: dict[str, Any]) -> None:
    before, after = np.array(personal_metrics(trained, **settings)).T
    is_regression = trained.config.task["name"] == "regression"
    ranked = sorted(after, reverse=not is_regression)
    assert measured(trained, label) == pytest.approx(
        {
            "mean": np.mean(after),
            "std": np.std(after),
            "best": ranked[0],
            "worst": ranked[-1],
            "worst_tenth": ranked[-1],  # of six clients
            "gain": np.mean(before - after if is_regression else after - before),
            "clients": CLIENTS,
        },
        rel=1e-9,
        abs=1e-12,
    )


def test_the_reference_can_tell_the_settings_apart(trained: Run) -> None:
    if trained.config.task["name"] == "regression":
        variants = [partial(personal_metrics, trained, **own) for own in ({}, {"lr": OWN_LR}, {"steps": STEPS})]
        means = [np.mean([after for _, after in variant()]) for variant in variants]
        assert min(abs(a - b) for a, b in zip(means, means[1:], strict=False)) > 1e-4


def test_a_sample_has_some_of_the_clients(trained: Run) -> None:
    some, values = measured(trained, "sample"), [after for _, after in personal_metrics(trained)]
    assert some["clients"] == SAMPLE
    middle = SAMPLE * some["mean"] - some["best"] - some["worst"]
    for value in (some["best"], some["worst"], middle):
        assert min(abs(value - own) for own in values) < 1e-9
    assert measured(trained, "all") == measured(trained)


def test_clients_that_diverge_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diverging = {"personalization": {"every": 3, "lr": 1e300}}
    found = measured(run(tmp_path, "regression", diagnostics=diverging))
    warning = "the local steps of 6 of 6 clients diverged or failed; a lower lr may help"
    assert warning in capsys.readouterr().err
    assert found == dict.fromkeys(found) | {"clients": CLIENTS}


def test_a_client_that_fails_is_reported_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data.npz", "classification", (20, 12, 32, 18, 22, 24))
    clients = {"total": CLIENTS, "per_round": 2, "validation": 0.3, "on_failure": "drop"}
    found = measured(run(tmp_path, "classification", clients=clients, diagnostics={"personalization": {"every": 3}}))
    warnings = capsys.readouterr().err
    assert "local steps of client 3: ValueError: Expected more than 1 value per channel" in warnings
    assert "the local steps of 1 of 6 clients diverged or failed" in warnings
    assert (found["mean"], found["worst"]) == (None, None) and 0 < found["best"] <= 1


def test_training_is_that_without_it(trained: Run, tmp_path: Path) -> None:
    plain = run(tmp_path, trained.config.task["name"], diagnostics={})
    assert model_hash(plain.path) == model_hash(trained.path)


def test_the_command_gives_the_values_of_the_record(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose([str(trained.path), f"personalization.steps={STEPS}"]) == 0
    assert "personalization.gain" in capsys.readouterr().out
    entry = json.loads((trained.path / "diagnostics.jsonl").read_text().splitlines()[0])
    assert entry["values"] == measured(trained, "steps")


def test_without_rows_that_are_held_out_it_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clients = {"total": CLIENTS, "per_round": 2}
    message = "diagnostics.personalization measures rows that clients hold out, but clients.validation is 0"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "classification", clients=clients, diagnostics={"personalization": {}})
    existing = run(tmp_path, "classification", clients=clients, diagnostics={})
    assert diagnose([str(existing.path), "personalization"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (existing.path / "diagnostics.jsonl").exists()
