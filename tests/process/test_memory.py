"""Memory that was freed is kept for the next round."""

import os
import subprocess
import sys

from tests.support.processes import ROOT


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
