"""How much memory this process uses, and what becomes of memory that it has freed."""

import contextlib
import ctypes
import os
import resource
import sys
from functools import cache

import torch

STATM = "/proc/self/statm"


KEPT = {-3: 32 << 20, -1: 2**31 - 1}
"""Of glibc's mallopt: from which size on blocks are the system's own (32 MB is the most), and what is given back."""


def keep_freed() -> None:
    """Keep freed memory for the next step, which else begins by asking the system for thousands of pages.

    For a process that does nothing but train; on other systems than those with glibc it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in KEPT.items():
            mallopt(name, value)


def host_bytes() -> int:
    """What lies in memory now; where the system does not tell, the most so far."""
    with contextlib.suppress(OSError):
        return int(os.pread(_statm(os.getpid()), 128, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@cache
def _statm(process: int) -> int:
    """Kept open, for each round asks; what was opened tells of the process that opened it."""
    return os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)


def device_bytes(device: torch.device) -> int:
    """The most that tensors took on the GPU so far; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
