"""A failing client is dropped as if it had not been sampled, or ends the run."""

from pathlib import Path

import pytest

from fl_dist.main import main
from tests.support.checkpoints import arguments, read_newest
from tests.support.data_files import write_diverging_client
from tests.support.processes import NO_WANDB
from tests.support.run_folder import model_hash, reproducible_records


@pytest.mark.parametrize("policy", ["drop", "retry"])
def test_a_dropped_client_has_no_effect(policy: str, tmp_path: Path) -> None:
    data = write_diverging_client(tmp_path / "d.npz")
    common = (*NO_WANDB, *data, "rounds=3", "algorithm.name=scaffold", "local={epochs: 2, batch_size: 4, lr: 0.05}")
    with_client, without_client = "[[0, 2, 3], [1, 4, 5], [2, 3, 5]]", "[[0, 3], [1, 4, 5], [3, 5]]"
    for name, schedule in (("with", with_client), ("without", without_client)):
        clients = f"clients={{total: 6, schedule: {schedule}, on_failure: {policy}}}"
        assert main([*common, clients, f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "with") == model_hash(tmp_path / "without")
    assert [r["dropped"] for r in reproducible_records(tmp_path / "with")] == [[2], [], [2]]
    log = (tmp_path / "with" / "logs" / "rank0.log").read_text()
    assert log.count("client 2") == (4 if policy == "retry" else 2)
    assert 2 not in read_newest(tmp_path / "with").index


def test_too_few_survivors_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_diverging_client(tmp_path / "d.npz")
    clients = "clients={total: 6, schedule: [[0, 1], [2, 3]], on_failure: drop, min_survivors: 2}"
    assert main([*NO_WANDB, *data, "rounds=2", clients, f"run.dir={tmp_path / 'run'}"]) == 1
    assert "round 2: 1 of 2 clients survived, clients.min_survivors asks for 2" in capsys.readouterr().err
    assert len(reproducible_records(tmp_path / "run")) == 1


def test_a_client_past_its_deadline_is_dropped(tmp_path: Path) -> None:
    more = ("clients={total: 8, per_round: 3, deadline: 1e-9, on_failure: drop, min_survivors: 1}",)
    assert main([*arguments(tmp_path), *more]) == 1
    assert "longer than clients.deadline" in (tmp_path / "logs" / "rank0.log").read_text()
