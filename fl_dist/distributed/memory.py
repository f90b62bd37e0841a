"""How much memory this process uses, and whether it returns freed memory to the system."""

import contextlib
import ctypes
import os
import resource
import sys
from functools import cache

import torch

STATM = "/proc/self/statm"
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
MALLOC_OPTIONS = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 2**31 - 1}
"""For glibc's mallopt; 32 MB is the largest threshold that it takes."""


def keep_freed_memory() -> None:
    """Keep freed memory for the next step, which would otherwise begin with thousands of page faults.

    For a process that does nothing but train; without glibc it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC_OPTIONS.items():
            mallopt(option, value)


def resident_bytes() -> int:
    """Host memory in use now; where the system does not tell, the peak."""
    with contextlib.suppress(OSError):
        return int(os.pread(_open_statm(os.getpid()), 128, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@cache
def _open_statm(pid: int) -> int:
    """Stays open, because each round reads it; the file describes the process that opened it, hence the pid."""
    return os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)


def peak_device_bytes(device: torch.device) -> int:
    """Peak memory of tensors on the GPU; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
