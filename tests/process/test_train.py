"""Rounds of several ranks."""

from pathlib import Path

from fl_dist.main import main
from tests.support.processes import QUIET, run_ranks
from tests.support.run_folder import model_hash


def test_a_full_gradient_is_taken_at_the_received_model_whatever_ran_before(tmp_path: Path) -> None:
    """With SAM the client before leaves the model bound to a perturbed point."""
    settings = [*QUIET, "rounds=2", "model={name: mlp, hidden: []}", "clients.total=4", "local.epochs=1"]
    chain = "algorithm={parts: [{sam: {rho: 5.0}}, {mime: {}}]}"
    both = [*settings, chain, "clients.schedule=[[0, 1], [2, 3]]"]
    assert main([*both, f"run.dir={tmp_path / 'one'}"]) == 0
    codes, outputs = run_ranks(3, [*both, f"run.dir={tmp_path / 'three'}"])
    assert not any(codes), outputs
    assert model_hash(tmp_path / "one") == model_hash(tmp_path / "three")
