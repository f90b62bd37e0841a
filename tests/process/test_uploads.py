"""Promise: the same bits on any number of workers and after a kill, also of uploads that are changed on their way."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fl_dist.diagnose import main as diagnose
from fl_dist.main import main
from tests.support.checkpoints import run_forked
from tests.support.processes import NO_WANDB, run_ranks, start_ranks
from tests.support.run_folder import assert_same_run, read_records

SMALL = (
    *NO_WANDB,
    "rounds=6",
    "partition={name: dirichlet, alpha: 0.5}",
    "model={name: mlp, hidden: [8]}",
    "clients={total: 6, schedule: [[0, 1, 2], [2, 3, 4], [0, 2, 5], [0, 3, 1], [4, 1, 2], [1, 3, 5]]}",
    "local={epochs: 1, batch_size: 64, lr: 0.1}",
)
"""Clients of some cohorts trained on another worker before: their variables have to move."""
MODEL_SIZE = 64 * 8 + 8 + 8 * 10 + 10
CASES: dict[str, Sequence[str]] = {
    "private": (
        "algorithm={name: fedsam, with: [{clip_and_noise: {clip: 0.5, noise: 0.3}}]}",
        "server.weighting=uniform",
    ),
    "top_k": ("algorithm={name: scaffold, with: [{top_k: {share: 0.05}}]}",),
    "quantise": ("algorithm={name: fedavg, with: [{quantise: {bits: 4}}]}",),
    "median": ("algorithm={name: fedavg, with: [sign, median]}", "comm.reduce=gather"),
    "gather": ("algorithm=feddyn", "comm.reduce=gather"),
    "budget": (
        "algorithm.with=[{clip_and_noise: {clip: 0.5, noise: 1.0}}]",
        *(
            "server.weighting=uniform",
            "rounds=40",
            "clients={total: 8, per_round: 1, sampling: bernoulli, schedule: null}",
        ),
        "callbacks=[{early_stopping: {metric: epsilon, limit: 3.5}}]",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each case in one process, on a server and two workers, and killed in round 4 and resumed by two workers."""
    folder = tmp_path_factory.mktemp("uploads")

    def arguments(case: str, kind: str, *more: str) -> list[str]:
        return [*SMALL, *CASES[case], f"run.dir={folder / case / kind}", *more]

    for case in CASES:
        assert main(arguments(case, "one")) == 0
        run_forked(folder / case / "killed", "server:4", *arguments(case, "killed"))
        assert not (folder / case / "killed" / "model.safetensors").exists()
    codes, outputs = run_ranks(3, *(arguments(case, "three") for case in CASES))
    assert not any(codes), outputs
    resumed = [arguments(case, "killed", "topology.server=shared") for case in CASES]
    codes, outputs = run_ranks(2, *resumed)
    assert not any(codes) and outputs[0].count("resuming after round") == len(CASES), outputs
    return folder


@pytest.mark.parametrize("case", CASES)
def test_any_layout_and_a_kill_give_the_bits_of_one_process(case: str, folder: Path) -> None:
    assert_same_run(folder / case / "three", folder / case / "one")
    assert_same_run(folder / case / "killed", folder / case / "one")


def test_a_budget_ends_the_run_before_it_is_spent(folder: Path) -> None:
    values = [record["method"]["epsilon"] for record in read_records(folder / "budget" / "one")]
    assert len(values) < 40 and values == sorted(values)
    assert values[-1] <= 3.5 < 2 * values[-1] - values[-4]


def test_gathered_updates_give_the_model_of_the_exact_reduce(folder: Path, tmp_path: Path) -> None:
    assert main([*SMALL, *CASES["gather"], "comm.reduce=exact", f"run.dir={tmp_path / 'exact'}"]) == 0
    exact, gathered = (load_file(run / "model.safetensors") for run in (tmp_path / "exact", folder / "gather" / "one"))
    assert all((exact[name] - gathered[name]).abs().max() < 1e-5 for name in exact)


def test_the_bytes_of_quantised_updates(folder: Path) -> None:
    for record in read_records(folder / "quantise" / "three"):
        assert record["bytes_up"] == 3 * (MODEL_SIZE * 4 // 8 + 4)


def test_a_worker_killed_between_the_reduce_and_its_updates(folder: Path, tmp_path: Path) -> None:
    """All ranks wait for each other there, point to point."""
    arguments = [*SMALL, *CASES["median"], f"run.dir={tmp_path}"]
    with start_ranks(3, arguments, FL_DIST_FAULT="gather:4@1") as processes:
        assert [process.wait() for process in processes] == [1, -9, 1]
    assert main(arguments) == 0
    assert_same_run(tmp_path, folder / "median" / "one")


def test_a_diagnostic_of_an_existing_run_makes_the_round_that_training_makes(tmp_path: Path) -> None:
    arguments = [*SMALL, *CASES["median"]]
    assert main([*arguments, "rounds=5", f"run.dir={tmp_path / 'five'}"]) == 0
    assert diagnose([str(tmp_path / "five"), "flatness_distance"]) == 0
    measured = json.loads((tmp_path / "five" / "diagnostics.jsonl").read_text())
    assert main([*arguments, "diagnostics.flatness_distance.every=6", f"run.dir={tmp_path / 'six'}"]) == 0
    assert measured["values"] == read_records(tmp_path / "six")[5]["diagnostics"]["flatness_distance"]
