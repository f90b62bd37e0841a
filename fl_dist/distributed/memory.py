"""How much memory this process uses and may use, and whether it returns freed memory to the system."""

import contextlib
import ctypes
import os
import resource
import sys
from functools import cache

import torch

from fl_dist.common.errors import FlDistError
from fl_dist.config import Topology
from fl_dist.distributed.hardware_errors import OUT_OF_GPU_MEMORY

STATM = "/proc/self/statm"
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
MALLOC_OPTIONS = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 2**31 - 1}
"""For glibc's mallopt; 32 MB is the largest threshold that it takes."""
MAX_DEFAULT_BYTES = 16e9
"""Of clients' variables and of rows, per rank, unless the configuration says how many."""
DEFAULT_SHARE = 0.25
"""Of the memory of a node or a GPU, for all its ranks together."""


class FailedAllocationError(FlDistError):
    """An operation got less memory than it asked for, and continued in another way."""


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


def max_state_bytes(topology: Topology, ranks_on_node: int) -> float:
    """Clients' variables that a rank holds in host memory."""
    if topology.state_memory is not None:
        return 1e9 * topology.state_memory
    return min(MAX_DEFAULT_BYTES, DEFAULT_SHARE * _host_bytes() / ranks_on_node)


def max_row_bytes(topology: Topology, device: torch.device, ranks_on_node: int) -> float:
    """Rows that a rank holds on its device. Host memory holds those of all ranks once."""
    if topology.data_memory is not None:
        return 1e9 * topology.data_memory
    if device.type != "cuda":
        return MAX_DEFAULT_BYTES
    ranks_on_gpu = -(-ranks_on_node // torch.cuda.device_count()) if topology.oversubscribe else 1
    total = torch.cuda.get_device_properties(device).total_memory
    return min(MAX_DEFAULT_BYTES, DEFAULT_SHARE * total / ranks_on_gpu)


def _host_bytes() -> float:
    """Memory of this machine, or of the Slurm job on it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    job = os.environ.get("SLURM_MEM_PER_NODE", "")  # in MB; unset if the job has all of it
    return min(total, float(job) * 2**20) if job.isdecimal() and int(job) else total


class AllocationMonitor:
    """Notices that cuDNN did not get its workspace and silently took another algorithm, which computes other bits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._initial_failures = self._failures()

    def check(self) -> None:
        """FailedAllocationError if an allocation on the GPU has failed since the beginning."""
        if self._failures() > self._initial_failures:
            raise FailedAllocationError(
                "memory on the GPU ran out, and an operation continued with a slower algorithm that may compute "
                f"other bits; {OUT_OF_GPU_MEMORY.remedy}"
            )

    def _failures(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_ooms", 0)) if self._device.type == "cuda" else 0
