"""A run as a Python object: finished, interrupted or in progress."""

import contextlib
import json
import logging
import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fl_dist
from fl_dist.algorithms.core import Algorithm, Part
from fl_dist.common import torch_globals
from fl_dist.common.errors import ConfigError, FlDistError
from fl_dist.common.torch_globals import preserve_torch_globals
from fl_dist.data import Dataset
from fl_dist.data.digits import FILE
from fl_dist.diagnostics.base import Diagnostic
from fl_dist.distributed import bf16
from fl_dist.distributed.signals import HANDLED_SIGNALS
from fl_dist.main import main
from fl_dist.results.__main__ import main as show_results
from fl_dist.runs import Run
from fl_dist.tasks import Task
from tests.support.run_folder import model_hash, read_records

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


def failing(shape: tuple[int, ...], classes: int) -> nn.Module:
    raise RuntimeError("no")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fl_dist.Run:
    return fl_dist.run(SMALL, run={"dir": tmp_path_factory.mktemp("runs") / "finished"}, quiet=True)


def test_a_run_from_python_equals_that_of_the_command_line(finished: fl_dist.Run, tmp_path: Path) -> None:
    overrides = ["model={name: cnn, norm: batch}", "clients={total: 5, per_round: 2}", "local.epochs=1", "rounds=3"]
    (tmp_path / "empty.yaml").write_text("{}")
    more = ["algorithm=scaffold", "monitor.wandb.mode=disabled", f"run.dir={tmp_path / 'run'}"]
    assert main([str(tmp_path / "empty.yaml"), *overrides, *more]) == 0
    assert model_hash(finished.path) == model_hash(tmp_path / "run")
    assert fl_dist.load(tmp_path / "run").config.model_dump(exclude={"run"}) == finished.config.model_dump(
        exclude={"run"}
    )


def test_a_run_shows_the_contents_of_its_folder(finished: fl_dist.Run) -> None:
    assert finished.finished and finished.config.clients.total == 5
    assert finished.history == read_records(finished.path)
    assert finished.summary == json.loads((finished.path / "summary.json").read_text())
    assert finished.summary["last_accuracy"] == finished.history[-1]["test_accuracy"]
    assert repr(finished) == f"Run('{finished.path}', finished, 3 of 3 rounds)"


def test_the_model_of_a_run_has_its_weights_and_accuracy(finished: fl_dist.Run) -> None:
    model, saved = finished.model(), load_file(finished.path / "model.safetensors")
    state = model.state_dict()
    assert state.keys() == saved.keys() and all(torch.equal(state[name], saved[name]) for name in saved)
    assert not model.training
    last = finished.history[-1]
    assert finished.evaluate() == {"loss": last["test_loss"], "accuracy": last["test_accuracy"]}
    arrays = np.load(FILE)
    assert finished.evaluate(arrays["x_test"], arrays["y_test"]) == finished.evaluate()
    assert finished.evaluate(arrays["x_test"][:40], arrays["y_test"][:40])["accuracy"] * 40 % 1 == 0


@pytest.mark.parametrize(
    "local",
    [{"precision": "bf16"}, {"memory_format": "contiguous"}, {"precision": "bf16", "memory_format": "contiguous"}],
)
def test_a_run_is_evaluated_as_it_was_trained(local: dict[str, str], tmp_path: Path) -> None:
    trained = fl_dist.run(SMALL, local={"epochs": 1, **local}, rounds=1, run={"dir": tmp_path / "run"}, quiet=True)
    last = trained.history[-1]
    assert trained.evaluate() == {"loss": last["test_loss"], "accuracy": last["test_accuracy"]}


def test_the_clients_of_a_run_partition_the_rows(finished: fl_dist.Run) -> None:
    clients, labels = finished.clients, np.load(FILE)["y_train"]
    assert len(clients) == 5 and sum(clients.sizes) == len(labels)
    assert sorted(np.concatenate(clients.rows)) == list(range(len(labels)))
    assert clients.classes is not None and clients.classes.sum(1).tolist() == clients.sizes
    assert clients.classes[2, 3] == (labels[clients.rows[2]] == 3).sum()


def test_the_history_is_a_data_frame(finished: fl_dist.Run) -> None:
    frame = finished.history.frame()
    assert frame["round"].tolist() == [1, 2, 3]
    assert {"seconds.local", "method.control_norm", "test_accuracy"} <= set(frame.columns)


def test_builders_may_be_given_as_functions(tmp_path: Path) -> None:
    run = fl_dist.run(SMALL, model={"name": linear, "bias": False}, rounds=1, run={"dir": tmp_path / "run"}, quiet=True)
    assert run.config.model["name"] == "tests.unit.test_runs:linear"
    assert [tuple(p.shape) for p in run.model().parameters()] == [(10, 64)]
    with pytest.raises(ConfigError, match="defined inside a function and cannot be imported"):
        fl_dist.run(SMALL, model=lambda shape: None)


def process_state() -> dict[str, Any]:
    log, torch_backends = logging.getLogger("fl_dist"), torch.backends
    return {
        "log": (log.level, log.propagate, list(log.handlers)),
        "path": list(sys.path),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in HANDLED_SIGNALS},
        "streams": (sys.stdout, sys.stderr),
        "threads": (torch.get_num_threads(), threading.active_count()),
        "kernels": (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory),
        "precision": (torch_backends.cudnn.benchmark, torch_backends.cudnn.allow_tf32, torch.get_default_dtype()),
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "gradients": torch.is_grad_enabled(),
        "device": torch.get_default_device(),
        "libraries": (torch.is_autocast_enabled("cpu"), torch_backends.mkldnn.enabled),
    }


FAILURES = {
    "of a configuration": {"local": {"lrr": 1}},
    "of a client": {"local": {"lr": 1e30}},
    "of a model": {"model": {"name": failing}},
}


def test_settings_of_torch_before_a_run_do_not_reach_it(tmp_path: Path) -> None:
    def train(name: str) -> str:
        return model_hash(fl_dist.run(SMALL, run={"dir": tmp_path / name}, quiet=True).path)

    expected = train("plain")
    with preserve_torch_globals():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("medium")
        torch.set_autocast_enabled("cpu", True)
        torch.backends.mkldnn.enabled = False
        before = process_state()
        assert train("other") == expected
        assert process_state() == before
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() != "medium"


@pytest.mark.parametrize("failure", [None, *FAILURES])
def test_a_run_restores_the_state_of_the_process(
    failure: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bf16, "ensure_bf16_works", lambda config: os.environ.update(bf16.WITHOUT_AMX))
    log = logging.getLogger("fl_dist")
    monkeypatch.setattr(log, "level", logging.ERROR)
    torch.manual_seed(5)
    before = process_state()
    expected = pytest.raises(FlDistError) if failure else contextlib.nullcontext()
    with expected:
        fl_dist.run(
            {**SMALL, **FAILURES.get(failure or "", {})},
            rounds=1,
            topology={"threads": 2},
            run={"dir": tmp_path / "run"},
            quiet=True,
        )
    assert process_state() == before


def test_a_loaded_run_restores_the_state_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: fl_dist.Run
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    before, run = process_state(), fl_dist.load(finished.path)
    run.evaluate()
    assert run.clients and run.task and process_state() == before


def test_public_names_are_exported() -> None:
    assert fl_dist.Part is Part and fl_dist.Algorithm is Algorithm and fl_dist.Dataset is Dataset
    assert fl_dist.Task is Task and fl_dist.Diagnostic is Diagnostic and fl_dist.Run is Run
    assert all(hasattr(fl_dist, name) for name in fl_dist.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fl_dist.nothing


def test_errors_are_raised_as_exceptions(
    finished: fl_dist.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="is finished; raise rounds"):
        fl_dist.run(SMALL, run={"dir": finished.path})
    with pytest.raises(ConfigError, match="unknown key local.lrr"):
        fl_dist.run(SMALL, local={"lrr": 1})
    with pytest.raises(ConfigError, match="is no run: it has no config.yaml"):
        fl_dist.load(tmp_path)
    assert "Traceback" not in capsys.readouterr().err


def test_loading_a_run_imports_no_user_code(finished: fl_dist.Run, tmp_path: Path) -> None:
    """A run folder must not execute code before its model is requested."""
    folder = tmp_path / "run"
    fl_dist.run(SMALL, rounds=1, run={"dir": folder}, quiet=True)
    text = (folder / "config.yaml").read_text().replace("name: cnn", "name: nothing_of_that_name:net")
    (folder / "config.yaml").write_text(text)
    run = fl_dist.load(folder)
    assert run.config.model["name"] == "nothing_of_that_name:net" and run.summary["rounds"] == 1
    with pytest.raises(ConfigError, match="there is no module 'nothing_of_that_name'"):
        run.model()


def test_the_task_of_a_loaded_run_may_import_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is built, some time after its module was imported."""
    (tmp_path / "late_helper.py").write_text("PERCENT = True\n")
    (tmp_path / "late_task.py").write_text(
        "from fl_dist.tasks.classification import Classification\n\n"
        "class Late(Classification):\n    def __init__(self):\n        import late_helper\n        super().__init__()\n"
    )
    monkeypatch.chdir(tmp_path)
    path = fl_dist.run(SMALL, rounds=1, task="late_task:Late", run={"dir": tmp_path / "run"}, quiet=True).path
    sys.modules.pop("late_helper")
    assert fl_dist.load(path).task.primary_metric.name == "accuracy"
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("has_precisions", [False, True])
def test_settings_of_older_and_newer_torch_are_preserved(has_precisions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.backends.cudnn.conv and the names of precisions are new in torch 2.9."""
    name = "fp32_precision" if has_precisions else "allow_tf32"
    owners = [SimpleNamespace(**{name: "before"}) for _ in range(3)]
    newer = {"conv": owners[1], "rnn": owners[2]} if has_precisions else {"allow_tf32": "before"}
    backends = SimpleNamespace(
        cuda=SimpleNamespace(matmul=owners[0]),
        cudnn=SimpleNamespace(benchmark=False, **newer),
        mkldnn=SimpleNamespace(enabled=True),
    )
    monkeypatch.setattr(torch_globals, "backends", backends)
    monkeypatch.setattr(torch_globals, "SETTINGS", torch_globals._find_settings())
    changed = [owners[0], owners[1]] if has_precisions else [owners[0], backends.cudnn]
    with preserve_torch_globals():
        for owner in changed:
            setattr(owner, name, "changed")
    assert [getattr(owner, name) for owner in changed] == ["before", "before"]


OLD_KEYS = {"rendezvous_timeout": "meeting", "final_window": "last"}


def test_a_run_folder_with_former_keys_is_read_and_resumed(
    finished: fl_dist.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    settings: dict[str, Any] = {"evaluate": {"final_window": 2}, "run": {"dir": folder}, "quiet": True}
    fl_dist.run(SMALL, rounds=2, **settings)
    text = (folder / "config.yaml").read_text()
    for new, old in OLD_KEYS.items():
        assert f"  {new}: " in text
        text = text.replace(f"  {new}: ", f"  {old}: ")
    (folder / "config.yaml").write_text(text)
    run = fl_dist.load(folder)
    assert run.config.evaluate.final_window == 2 and run.summary["final_accuracy_rounds"] == 2
    assert show_results([str(folder)]) == 0
    assert "last 2 rounds" in capsys.readouterr().out
    resumed = fl_dist.run(SMALL, rounds=3, **settings)
    assert model_hash(resumed.path) == model_hash(finished.path)
    assert not any(f"  {old}: " in (folder / "config.yaml").read_text() for old in OLD_KEYS.values())
