"""The seams: plan, exact sums, flat vectors, client state, one process."""

import os
import subprocess
import sys
from pathlib import Path

from fl_dist.main import main
from tests.support.processes import QUIET, ROOT, run_ranks
from tests.support.run_folder import model_hash


def test_memory_that_was_freed_is_kept() -> None:
    script = """
import resource, sys, torch
from fl_dist.machine.memory import keep_freed
if sys.argv[1:]:
    keep_freed()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(1 << 20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages()
print(pages())
"""
    gives_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else it depends on what lies above in the heap
    plain, keeps = (
        int(subprocess.check_output([sys.executable, "-c", script, *more], cwd=ROOT, env=gives_back))
        for more in ([], ["keep"])
    )
    assert keeps < plain / 10


def test_a_full_gradient_is_taken_at_the_received_model_whatever_ran_before(tmp_path: Path) -> None:
    """With SAM the client before leaves the model bound to a perturbed point."""
    settings = [*QUIET, "rounds=2", "model={name: mlp, hidden: []}", "clients.total=4", "local.epochs=1"]
    chain = "algorithm={parts: [{sam: {rho: 5.0}}, {mime: {}}]}"
    both = [*settings, chain, "clients.schedule=[[0, 1], [2, 3]]"]
    assert main([*both, f"run.dir={tmp_path / 'one'}"]) == 0
    codes, outputs = run_ranks(3, [*both, f"run.dir={tmp_path / 'three'}"])
    assert not any(codes), outputs
    assert model_hash(tmp_path / "one") == model_hash(tmp_path / "three")
