"""A failing client is dropped as if it had not been sampled, on any worker."""

from pathlib import Path

from fl_dist.main import main
from tests.support.data_files import write_diverging_client
from tests.support.processes import NO_WANDB, start_ranks
from tests.support.run_folder import model_hash


def test_clients_that_fail_in_their_first_round_may_change_worker(tmp_path: Path) -> None:
    data = write_diverging_client(tmp_path / "d.npz")
    clients = "clients={total: 6, schedule: [[2, 3], [2, 0, 1], [0, 2], [4, 5, 2]], on_failure: drop}"
    settings = (*NO_WANDB, *data, "rounds=4", "algorithm.name=scaffold", clients, "local={epochs: 1, batch_size: 4}")
    with start_ranks(3, [*settings, f"run.dir={tmp_path / 'run'}"]) as processes:
        outputs = [p.communicate(timeout=60)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0, 0], outputs
    assert main([*settings, f"run.dir={tmp_path / 'alone'}"]) == 0
    assert model_hash(tmp_path / "run") == model_hash(tmp_path / "alone")
