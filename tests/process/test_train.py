"""Rounds on several ranks."""

from pathlib import Path

from fl_dist.main import main
from tests.support.processes import NO_WANDB, run_ranks
from tests.support.run_folder import model_hash


def test_the_full_gradient_is_at_the_received_model_whichever_client_ran_before(tmp_path: Path) -> None:
    """With SAM the previous client leaves the model bound to a perturbed point."""
    settings = [*NO_WANDB, "rounds=2", "model={name: mlp, hidden: []}", "clients.total=4", "local.epochs=1"]
    chain = "algorithm={parts: [{sam: {rho: 5.0}}, {mime: {}}]}"
    arguments = [*settings, chain, "clients.schedule=[[0, 1], [2, 3]]"]
    assert main([*arguments, f"run.dir={tmp_path / 'one'}"]) == 0
    codes, outputs = run_ranks(3, [*arguments, f"run.dir={tmp_path / 'three'}"])
    assert not any(codes), outputs
    assert model_hash(tmp_path / "one") == model_hash(tmp_path / "three")
