"""Whichever ranks evaluate, on any layout and after interruptions, the metrics equal those of one process."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from fl_dist.tasks.classification import Classification
from tests.support.marks import examples, timing
from tests.support.processes import NO_WANDB, run_ranks, start_ranks
from tests.support.run_folder import model_hash, newest_saved_round, read_records, reproducible_records
from tests.support.user_guide import write_files
from tests.support.waiting import Hold, wait_for

WHERE = ("server", "workers", "auto")
SMALL = (*NO_WANDB, "rounds=3", "clients={total: 6, per_round: 4}", "local={epochs: 1, batch_size: 10, lr: 0.05}")
SETTINGS: dict[str, Sequence[str]] = {
    "classes": ("model={name: cnn, norm: batch}", "local.steps=2", "evaluate={batch_size: 70, every: 2}"),
    "numbers": (
        "task=regression",
        "data=my_data:waves",
        "partition=iid",
        "model=my_models:net",
        "evaluate.batch_size=7",
    ),
    "tokens": ("task=next_token", "data=my_text:letters", "partition=iid", "model=my_text:Letters", "algorithm=fedacg"),
    "validation": (
        "model=mlp",
        "clients.validation=0.3",
        "partition={name: dirichlet, variant: per_client}",
        "evaluate={batch_size: 7}",
        "algorithm=scaffold",
    ),
    "five rows": ("data={name: npz, path: five.npz}", "model=mlp", "evaluate.batch_size=2", "algorithm=fedgmt"),
    "one row": ("data={name: npz, path: one.npz}", "model=mlp", "algorithm=fednsam"),
    "by class": ("model=mlp", "task=tests.process.test_evaluation:ByClass", "local.steps=1", "evaluate.batch_size=4"),
    "by prediction": (
        "model=mlp",
        "task=tests.process.test_evaluation:ByPrediction",
        "local.steps=1",
        "evaluate.batch_size=4",
    ),
}
"""BatchNorm, every task, lookahead models, ranks without a batch, metric names that depend on the batch."""


class ByClass(Classification):
    """Metric names depend on the labels of the batch."""

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        values = super().measure(outputs, y)
        return values | {f"of_{c}": values["accuracy"][y == c] for c in y.unique().tolist()}


class ByPrediction(Classification):
    """Metric names depend on the predictions for the batch."""

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
        values, predicted = super().measure(outputs, y), outputs.argmax(-1)
        return values | {f"predicted_{c}": values["loss"][predicted == c] for c in predicted.unique().tolist()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and the runs of one process."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_files(folder)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)), rng.integers(0, 3, 60)
    for name, rows in (("five", 5), ("one", 1)):
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x[:rows], y_test=y[:rows])
    codes, outputs = run_ranks(1, *(arguments(folder, folder / "alone" / name, name) for name in SETTINGS))
    assert not any(codes), outputs
    return folder


def arguments(folder: Path, run: Path, name: str, *more: str) -> list[str]:
    file = folder / "config.yaml"
    file.write_text("seed: 0\n")
    settings = [setting.replace("path: ", f"path: {folder}/") for setting in SETTINGS[name]]
    return [str(file), *SMALL, *settings, f"run.dir={run}", "topology.server=shared", *more]


@pytest.mark.parametrize(
    ("ranks", "server"),
    examples([(2, "dedicated"), (2, "shared"), (3, "dedicated"), (3, "shared")], [(3, "dedicated")]),
)
def test_the_metrics_equal_those_of_one_process(folder: Path, tmp_path: Path, ranks: int, server: str) -> None:
    runs = [(where, name) for where in WHERE for name in SETTINGS]
    commands = [
        arguments(folder, tmp_path / where / name, name, f"topology.server={server}", f"evaluate.where={where}")
        for where, name in runs
    ]
    codes, outputs = run_ranks(ranks, *commands, timeout=300)
    assert not any(codes), outputs
    for where, name in runs:
        assert reproducible_records(tmp_path / where / name) == reproducible_records(folder / "alone" / name), (
            where,
            name,
        )
        assert model_hash(tmp_path / where / name) == model_hash(folder / "alone" / name), (where, name)
        assert set(evaluators(tmp_path / where / name)) <= {0, 1, ranks}
    assert evaluators(tmp_path / "server" / "classes") == [0, 1, 1]
    assert evaluators(tmp_path / "workers" / "classes") == [0, ranks, ranks]


def evaluators(run: Path) -> list[int]:
    """The number of ranks that evaluated, by round."""
    return [sum("evaluate" in worker for worker in record["workers"].values()) for record in read_records(run)]


@timing
def test_with_slow_evaluation_a_shared_server_switches_to_all_ranks(folder: Path, tmp_path: Path) -> None:
    """Every batch takes much longer than all of local training."""
    more = ("evaluate.batch_size=36", "evaluate.every=1", "rounds=6")
    slow = "evaluate:*@0=sleep:0.1,evaluate:*@1=sleep:0.1"
    codes, outputs = run_ranks(2, arguments(folder, tmp_path, "classes", *more), FL_DIST_FAULT=slow)
    assert not any(codes), outputs
    assert evaluators(tmp_path)[:2] == [1, 1]
    assert 2 in evaluators(tmp_path)


@pytest.mark.parametrize(
    ("point", "ranks", "where"),
    examples(
        [("evaluate:1@0", 2, "workers"), ("evaluate:3@1", 1, "auto"), ("evaluate:8@2", 3, "server")],
        [("evaluate:1@0", 2, "workers")],
    ),
)
def test_a_kill_during_evaluation_changes_nothing(
    folder: Path, tmp_path: Path, point: str, ranks: int, where: str
) -> None:
    interrupted = arguments(folder, tmp_path, "numbers", "evaluate.where=workers", "topology.server=dedicated")
    codes, outputs = run_ranks(3, interrupted, FL_DIST_FAULT=point, SYNCHRONOUS_CHECKPOINTS="1")
    assert -signal.SIGKILL in codes and 0 not in codes, outputs
    assert newest_saved_round(tmp_path) > 0
    codes, outputs = run_ranks(ranks, arguments(folder, tmp_path, "numbers", f"evaluate.where={where}"))
    assert not any(codes), outputs
    assert reproducible_records(tmp_path) == reproducible_records(folder / "alone" / "numbers")
    assert model_hash(tmp_path) == model_hash(folder / "alone" / "numbers")


@timing
def test_a_signal_ends_a_run_whose_ranks_all_evaluate(folder: Path, tmp_path: Path) -> None:
    more = ("rounds=60", "evaluate.where=workers", "topology.server=dedicated")
    uninterrupted = arguments(folder, tmp_path / "uninterrupted", "numbers", "rounds=60")
    assert run_ranks(1, uninterrupted)[0] == [0]
    interrupted = arguments(folder, tmp_path / "interrupted", "numbers", *more)
    hold = Hold(tmp_path / "hold")
    with start_ranks(3, interrupted, FL_DIST_FAULT=hold.at("broadcast:6")) as ranks:
        wait_for(lambda: hold.is_reached, "the sixth round")
        os.kill(ranks[1].pid, signal.SIGTERM)
        hold.release()
        outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75] * 3, outputs
    assert evaluators(tmp_path / "interrupted")[-1] == 3, "also for the round in which the signal arrived"
    codes, outputs = run_ranks(2, interrupted)
    assert not any(codes), outputs
    assert reproducible_records(tmp_path / "interrupted") == reproducible_records(tmp_path / "uninterrupted")
    assert model_hash(tmp_path / "interrupted") == model_hash(tmp_path / "uninterrupted")
