"""Torch as a run needs it: threads, deterministic kernels, the precision of products."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic

from fl_dist.common.torch_globals import preserve_torch_globals, use_default_settings
from fl_dist.config import Config
from fl_dist.distributed.tf32 import use_tf32

memory: Any = torch.utils.deterministic


@contextlib.contextmanager
def torch_settings(config: Config) -> Iterator[None]:
    """Within it; afterwards all settings and random states are those of before."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with preserve_torch_globals(), use_tf32(config.local.precision == "tf32"):
        use_default_settings()
        torch.set_num_threads(config.topology.threads)
        torch.backends.cudnn.benchmark = False
        # Operations without a deterministic kernel raise. Not use_deterministic_algorithms, which imports a compiler:
        # two seconds of every rank's start.
        torch.set_deterministic_debug_mode("error")
        # By default every torch.empty would be filled with NaN, a pass over memory that is about to be written.
        memory.fill_uninitialized_memory = False
        yield
