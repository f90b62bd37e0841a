"""A run as an object: what a program or a notebook sees of it, finished, interrupted or under way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fl_dist
from fl_dist.common.reading import ConfigError
from fl_dist.data.digits import FILE
from fl_dist.main import main
from tests.support.run_folder import metrics, model_hash

SMALL: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "cnn", "norm": "batch"},
    "clients": {"total": 5, "per_round": 2},
    "local": {"epochs": 1},
    "algorithm": "scaffold",
    "monitor": {"wandb": {"mode": "disabled"}},
}


def linear(shape: tuple[int, ...], classes: int, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes, bias=bias))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fl_dist.Run:
    return fl_dist.run(SMALL, run={"dir": tmp_path_factory.mktemp("runs") / "finished"}, quiet=True)


def test_a_run_from_python_is_that_of_the_command_line(finished: fl_dist.Run, tmp_path: Path) -> None:
    words = ["model={name: cnn, norm: batch}", "clients={total: 5, per_round: 2}", "local.epochs=1", "rounds=3"]
    (tmp_path / "empty.yaml").write_text("{}")
    more = ["algorithm=scaffold", "monitor.wandb.mode=disabled", f"run.dir={tmp_path / 'run'}"]
    assert main([str(tmp_path / "empty.yaml"), *words, *more]) == 0
    assert model_hash(finished.path) == model_hash(tmp_path / "run")
    assert fl_dist.load(tmp_path / "run").config.model_dump(exclude={"run"}) == finished.config.model_dump(
        exclude={"run"}
    )


def test_it_shows_what_the_folder_holds(finished: fl_dist.Run) -> None:
    assert finished.finished and finished.config.clients.total == 5
    assert finished.history == metrics(finished.path)
    assert finished.summary == json.loads((finished.path / "summary.json").read_text())
    assert finished.summary["last_accuracy"] == finished.history[-1]["test_accuracy"]
    assert repr(finished) == f"Run('{finished.path}', finished, 3 of 3 rounds)"


def test_its_model_has_the_weights_and_the_accuracy(finished: fl_dist.Run) -> None:
    model, saved = finished.model(), load_file(finished.path / "model.safetensors")
    state = model.state_dict()
    assert state.keys() == saved.keys() and all(torch.equal(state[name], saved[name]) for name in saved)
    assert not model.training
    last = finished.history[-1]
    assert finished.evaluate() == {"loss": last["test_loss"], "accuracy": last["test_accuracy"]}
    arrays = np.load(FILE)
    assert finished.evaluate(arrays["x_test"], arrays["y_test"]) == finished.evaluate()
    assert finished.evaluate(arrays["x_test"][:40], arrays["y_test"][:40])["accuracy"] * 40 % 1 == 0


def test_its_clients_divide_the_rows(finished: fl_dist.Run) -> None:
    clients, labels = finished.clients, np.load(FILE)["y_train"]
    assert len(clients) == 5 and sum(clients.sizes) == len(labels)
    assert sorted(np.concatenate(clients.rows)) == list(range(len(labels)))
    assert clients.classes is not None and clients.classes.sum(1).tolist() == clients.sizes
    assert clients.classes[2, 3] == (labels[clients.rows[2]] == 3).sum()


def test_its_rows_are_a_frame_if_pandas_is_there(finished: fl_dist.Run) -> None:
    frame = finished.history.frame()
    assert frame["round"].tolist() == [1, 2, 3]
    assert {"seconds.local", "method.control_norm", "test_accuracy"} <= set(frame.columns)


def test_functions_stand_for_their_names(tmp_path: Path) -> None:
    made = fl_dist.run(
        SMALL, model={"name": linear, "bias": False}, rounds=1, run={"dir": tmp_path / "run"}, quiet=True
    )
    assert made.config.model["name"] == "tests.unit.test_runs:linear"
    assert [tuple(p.shape) for p in made.model().parameters()] == [(10, 64)]
    with pytest.raises(ConfigError, match="defined inside a function and cannot be imported"):
        fl_dist.run(SMALL, model=lambda shape: None)


def test_it_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.get_rng_state()
    made = fl_dist.run(SMALL, rounds=1, topology={"threads": 2}, run={"dir": tmp_path / "run"}, quiet=True)
    made.model()
    after = torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])


def test_errors_are_exceptions(finished: fl_dist.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="is finished; raise rounds"):
        fl_dist.run(SMALL, run={"dir": finished.path})
    with pytest.raises(ConfigError, match="unknown key local.lrr"):
        fl_dist.run(SMALL, local={"lrr": 1})
    with pytest.raises(ConfigError, match="is no run: it has no config.yaml"):
        fl_dist.load(tmp_path)
    assert "Traceback" not in capsys.readouterr().err


def test_reading_a_run_imports_nothing_that_it_names(finished: fl_dist.Run, tmp_path: Path) -> None:
    """A folder from elsewhere must not run code before somebody asks for its model."""
    folder = tmp_path / "run"
    fl_dist.run(SMALL, rounds=1, run={"dir": folder}, quiet=True)
    text = (folder / "config.yaml").read_text().replace("name: cnn", "name: nothing_of_that_name:net")
    (folder / "config.yaml").write_text(text)
    read = fl_dist.load(folder)
    assert read.config.model["name"] == "nothing_of_that_name:net" and read.summary["rounds"] == 1
    with pytest.raises(ConfigError, match="there is no module 'nothing_of_that_name'"):
        read.model()
