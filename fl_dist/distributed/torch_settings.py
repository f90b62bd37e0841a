"""Torch as a run needs it: threads, deterministic kernels, the precision of products."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic

from fl_dist.config import Config
from fl_dist.distributed.tf32 import use_tf32


@contextlib.contextmanager
def torch_settings(config: Config) -> Iterator[None]:
    """Within it; afterwards all settings and random states are those of before."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    state, cuda_states = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch.set_num_threads(config.topology.threads)
    torch.backends.cudnn.benchmark = False
    try:
        with _deterministic_kernels(), use_tf32(config.local.precision == "tf32"):
            yield
    finally:
        torch.set_rng_state(state)
        torch.cuda.set_rng_state_all(cuda_states)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def _deterministic_kernels() -> Iterator[None]:
    """Operations use deterministic kernels; those that have none raise."""
    memory: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    # Not use_deterministic_algorithms, which imports a compiler: two seconds of every rank's start.
    torch.set_deterministic_debug_mode("error")
    # By default every torch.empty would be filled with NaN, a pass over memory that is about to be written.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill
