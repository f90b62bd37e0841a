"""Rounds in one process: steps, schedule and precision."""

from pathlib import Path
from unittest import mock

import pytest

from fl_dist.distributed.failure_detector import FailureDetector
from fl_dist.main import main
from tests.support.processes import NO_WANDB
from tests.support.run_folder import model_hash, read_records, reproducible_records


def test_the_failure_detector_learns_of_every_round(tmp_path: Path) -> None:
    rounds: list[tuple[int, int]] = []
    patch = mock.patch.object(
        FailureDetector, "begin_round", lambda self, index, assignment: rounds.append((index, len(assignment)))
    )
    with patch:
        assert main([*NO_WANDB, "rounds=2", "clients={total: 4, per_round: 2}", f"run.dir={tmp_path}"]) == 0
    assert rounds == [(0, 2), (1, 2)]


def test_local_steps_limits_local_training(tmp_path: Path) -> None:
    """Two epochs are 12 steps: a limit of 6 gives one epoch; a limit of 12 changes nothing."""
    small = [*NO_WANDB, "rounds=2", "data={name: digits}", "partition=iid", "model={name: mlp, hidden: []}"]
    small += ["clients={total: 4, per_round: 2}", "local={batch_size: 60}", "evaluate.every=2", "algorithm=scaffold"]
    runs = {"one": (1, "null"), "cut": (2, 6), "two": (2, "null"), "enough": (2, 12)}
    for name, (epochs, steps) in runs.items():
        assert main([*small, f"local.epochs={epochs}", f"local.steps={steps}", f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "one") == model_hash(tmp_path / "cut") != model_hash(tmp_path / "two")
    assert model_hash(tmp_path / "two") == model_hash(tmp_path / "enough")
    assert [read_records(tmp_path / name)[0]["backwards"] for name in runs] == [12, 12, 24, 24]
    one, other = (read_records(tmp_path / name)[-1]["train_loss"] for name in ("one", "cut"))
    assert one == other, "the mean over the executed steps"


def test_main_can_be_called_repeatedly(tmp_path: Path) -> None:
    small = [*NO_WANDB, "rounds=2", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    for name in ("a", "b"):
        assert main([*small, f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "a") == model_hash(tmp_path / "b")
    assert reproducible_records(tmp_path / "a") == reproducible_records(tmp_path / "b")


def test_a_schedule_from_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "schedule.yaml").write_text("- [3, 1]\n- [0]\n- [2, 0, 1]\n")
    small = [*NO_WANDB, "rounds=3", "model={name: mlp, hidden: []}", "clients.total=4"]
    assert main([*small, f"clients.schedule={tmp_path / 'schedule.yaml'}", f"run.dir={tmp_path / 'run'}"]) == 0
    assert [r["clients"] for r in read_records(tmp_path / "run")] == [2, 1, 3]


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_other_precisions_train(precision: str, tmp_path: Path) -> None:
    small = [*NO_WANDB, "rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    assert main([*small, f"local.precision={precision}", f"run.dir={tmp_path}"]) == 0
    records = read_records(tmp_path)
    assert records[-1]["train_loss"] < records[0]["train_loss"]


def test_a_teacher_runs_once_per_batch_unless_the_inputs_change(tmp_path: Path) -> None:
    small = [*NO_WANDB, "rounds=1", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    passes = {"{sam: {}}": (3, 2), "{affine: {ascent_steps: 3}}": (6, 3)}
    for k, (part, (forwards, backwards)) in enumerate(passes.items()):
        chain = f"algorithm={{parts: [{part}, {{nottrue: {{}}}}]}}"
        assert main([*small, chain, f"run.dir={tmp_path / str(k)}"]) == 0
        record = read_records(tmp_path / str(k))[0]
        assert record["forwards"] * backwards == record["backwards"] * forwards
