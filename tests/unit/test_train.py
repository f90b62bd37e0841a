"""Rounds in one process: their steps, schedule, precision, and an end."""

from pathlib import Path
from unittest import mock

import pytest

from fl_dist.machine.comm import Alone
from fl_dist.main import main
from tests.support.processes import QUIET
from tests.support.run_folder import metrics, model_hash, results


def test_rounds_begin_for_those_who_are_told_of_lost_ranks_and_orders_to_stop_are_none(tmp_path: Path) -> None:
    begun: list[tuple[int, int]] = []
    told = mock.patch.object(Alone, "begins", lambda self, index, assignment: begun.append((index, len(assignment))))
    with told:
        assert main([*QUIET, "rounds=2", "clients={total: 4, per_round: 2}", f"run.dir={tmp_path}"]) == 0
    assert begun == [(0, 2), (1, 2)]


def test_steps_end_a_clients_round_early(tmp_path: Path) -> None:
    """Two epochs in 12 steps: cut after 6 they are one epoch; cut after 12 or later they are whole."""
    small = [*QUIET, "rounds=2", "data={name: digits}", "partition=iid", "model={name: mlp, hidden: []}"]
    small += ["clients={total: 4, per_round: 2}", "local={batch_size: 60}", "evaluate.every=2", "algorithm=scaffold"]
    cut = {"one": (1, "null"), "cut": (2, 6), "two": (2, "null"), "enough": (2, 12)}
    for name, (epochs, steps) in cut.items():
        assert main([*small, f"local.epochs={epochs}", f"local.steps={steps}", f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "one") == model_hash(tmp_path / "cut") != model_hash(tmp_path / "two")
    assert model_hash(tmp_path / "two") == model_hash(tmp_path / "enough")
    assert [metrics(tmp_path / name)[0]["backwards"] for name in cut] == [12, 12, 24, 24]
    one, other = (metrics(tmp_path / name)[-1]["train_loss"] for name in ("one", "cut"))
    assert one == other, "the mean over the steps that were made"


def test_main_can_be_called_again_and_again(tmp_path: Path) -> None:
    small = [*QUIET, "rounds=2", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    for name in ("a", "b"):
        assert main([*small, f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "a") == model_hash(tmp_path / "b")
    assert results(tmp_path / "a") == results(tmp_path / "b")


def test_a_schedule_from_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "schedule.yaml").write_text("- [3, 1]\n- [0]\n- [2, 0, 1]\n")
    small = [*QUIET, "rounds=3", "model={name: mlp, hidden: []}", "clients.total=4"]
    assert main([*small, f"clients.schedule={tmp_path / 'schedule.yaml'}", f"run.dir={tmp_path / 'run'}"]) == 0
    assert [r["clients"] for r in metrics(tmp_path / "run")] == [2, 1, 3]


@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_other_precisions_train(precision: str, tmp_path: Path) -> None:
    small = [*QUIET, "rounds=3", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    assert main([*small, f"local.precision={precision}", f"run.dir={tmp_path}"]) == 0
    rows = metrics(tmp_path)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_a_teacher_is_asked_once_a_batch_unless_the_inputs_change(tmp_path: Path) -> None:
    small = [*QUIET, "rounds=1", "model={name: mlp, hidden: []}", "clients={total: 4, per_round: 2}"]
    passes = {"{sam: {}}": (3, 2), "{affine: {ascent_steps: 3}}": (6, 3)}
    for k, (part, (forwards, backwards)) in enumerate(passes.items()):
        chain = f"algorithm={{parts: [{part}, {{nottrue: {{}}}}]}}"
        assert main([*small, chain, f"run.dir={tmp_path / str(k)}"]) == 0
        row = metrics(tmp_path / str(k))[0]
        assert row["forwards"] * backwards == row["backwards"] * forwards
