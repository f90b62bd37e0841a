"""Promise: the same bits on any number of workers, in any layout."""

import itertools
import json
from pathlib import Path

import pytest

from fl_dist.main import main
from tests.support.marks import examples
from tests.support.processes import NO_WANDB, run, run_ranks, torchrun
from tests.support.run_folder import model_hash, reproducible_records
from tests.support.user_guide import write_files

ALGORITHMS = ("fedavg", "fedsam", "fedgmt")
SETTINGS = (
    *NO_WANDB,
    "rounds=4",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "model={name: cnn, dropout: 0.3}",
    "augment={name: crop_flip, padding: 1}",
    "clients={total: 12, per_round: 5}",
    "local={epochs: 1, batch_size: 16, lr: 0.05}",
)


def arguments(folder: Path, algorithm: str, *more: str) -> list[str]:
    # Models without normalisation use the channel-blocked layout.
    norm = "none" if algorithm == "fedgmt" else "batch"
    return [*SETTINGS, f"model.norm={norm}", f"algorithm.name={algorithm}", f"run.dir={folder / algorithm}", *more]


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    for algorithm in ALGORITHMS:
        assert main(arguments(folder, algorithm)) == 0
    return folder


@pytest.mark.parametrize(
    ("workers", "server"),
    examples(itertools.product((1, 2, 3, 4), ("dedicated", "shared")), [(3, "shared"), (4, "dedicated")]),
)
def test_any_number_of_workers_gives_the_bits_of_one_process(
    single_process: Path, tmp_path: Path, server: str, workers: int
) -> None:
    runs = [arguments(tmp_path, a, f"topology.server={server}") for a in ALGORITHMS]
    codes, outputs = run_ranks(workers + (server == "dedicated"), *runs)
    assert not any(codes), outputs
    assert_same_runs(tmp_path, single_process)


def test_torchrun_gives_the_bits_of_one_process(single_process: Path, tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text(json.dumps([arguments(tmp_path, a) for a in ALGORITHMS]))
    code, output = run([*torchrun(3), "-m", "tests.support.run_several", str(tmp_path / "runs.json")])
    assert code == 0, output
    assert_same_runs(tmp_path, single_process)


def assert_same_runs(folder: Path, single_process: Path) -> None:
    for algorithm in ALGORITHMS:
        assert model_hash(folder / algorithm) == model_hash(single_process / algorithm)
        assert reproducible_records(folder / algorithm) == reproducible_records(single_process / algorithm)


def test_another_seed_gives_different_bits(single_process: Path, tmp_path: Path) -> None:
    for algorithm in ALGORITHMS:
        assert main(arguments(tmp_path, algorithm, "seed=5")) == 0
        assert model_hash(tmp_path / algorithm) != model_hash(single_process / algorithm)


def test_float32_reduce_is_close_to_the_exact_one(single_process: Path, tmp_path: Path) -> None:
    assert main(arguments(tmp_path, "fedavg", "comm.reduce=float32")) == 0
    approximate, exact = (
        reproducible_records(tmp_path / "fedavg")[-1],
        reproducible_records(single_process / "fedavg")[-1],
    )
    assert approximate["test_loss"] == pytest.approx(exact["test_loss"], rel=1e-3)
    assert model_hash(tmp_path / "fedavg") != model_hash(single_process / "fedavg")


@pytest.mark.parametrize(
    "text",
    [
        "task: next_token\ndata: my_text:letters\nmodel: my_text:Letters\nalgorithm: fedgmt\n",
        "task: regression\ndata: my_data:waves\nmodel: my_models:net\nalgorithm: scaffold\n",
    ],
)
def test_every_task_gives_the_bits_of_one_process(text: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    rest = "partition: iid\nrounds: 3\nclients: {total: 6, per_round: 4}\nlocal: {epochs: 1, batch_size: 10}\n"
    (tmp_path / "task.yaml").write_text(text + rest)
    command = [str(tmp_path / "task.yaml"), *NO_WANDB]
    for ranks in (1, 3, 4):
        server = "topology.server=shared" if ranks == 1 else "topology.server=dedicated"
        codes, outputs = run_ranks(ranks, [*command, server, f"run.dir={tmp_path / str(ranks)}"])
        assert not any(codes), outputs
    assert len({model_hash(tmp_path / ranks) for ranks in "134"}) == 1
    assert (
        reproducible_records(tmp_path / "1")
        == reproducible_records(tmp_path / "3")
        == reproducible_records(tmp_path / "4")
    )
