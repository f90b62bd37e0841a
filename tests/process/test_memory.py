"""Freed memory is kept for the next round."""

import os
import subprocess
import sys

from tests.support.processes import ROOT


def test_freed_memory_is_reused() -> None:
    script = """
import resource, sys, torch
from fl_dist.distributed.memory import keep_freed_memory
if sys.argv[1:]:
    keep_freed_memory()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(1 << 20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages()
print(pages())
"""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else the result depends on the heap's layout
    without_reuse, with_reuse = (
        int(subprocess.check_output([sys.executable, "-c", script, *more], cwd=ROOT, env=env))
        for more in ([], ["keep"])
    )
    assert with_reuse < without_reuse / 10
